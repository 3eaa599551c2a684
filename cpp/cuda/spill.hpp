// Memory of received rows that is not in the heap and that no peer sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

// Given back in the order of the comm stream, behind what its users and the thread that drops it have queued.
class Spill {
 public:
  // `work` uses it first, the comm stream stands behind that when it is given back, and `user` may use it from the
  // start; throws Error where there is no memory.
  Spill(std::size_t bytes, int device, Stream comm, Stream work, Stream user, std::function<Stream()> current_stream);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  char* data() const { return data_; }
  // Another stream that uses it; false if `address` does not lie in it. Thread safe.
  bool record_stream(const void* address, Stream stream);

 private:
  const std::size_t bytes_;
  const int device_;
  const Stream comm_;
  const std::function<Stream()> current_stream_;
  const std::uint64_t forks_;
  char* data_ = nullptr;
  std::mutex mutex_;
  std::vector<Stream> users_;
};

// Those that are alive; thread safe.
class Spills {
 public:
  void add(const std::shared_ptr<Spill>& spill);
  bool record_stream(const void* address, Stream stream);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Spill>> spills_;
};

}  // namespace deep_moe::cuda
