// A thread that takes a Buffer's control messages while its callers are elsewhere. A caller may be waiting for the GPU,
// the GPU for a peer, and the peer for this rank to map a segment; or a peer may die, and kernels are to hear of it.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "runtime/control_channel.hpp"

namespace deep_moe::cuda {

class Attendant {
 public:
  // Calls `serve`, which does not throw, whenever some peer has sent something or has closed its end.
  Attendant(const ControlChannel& channel, std::function<void()> serve);
  ~Attendant();  // ends the thread; not in a forked child, which has no such thread
  Attendant(const Attendant&) = delete;
  Attendant& operator=(const Attendant&) = delete;

 private:
  int wake_fd_ = -1;
  std::thread thread_;
};

}  // namespace deep_moe::cuda
