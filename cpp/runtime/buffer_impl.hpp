// What a Buffer is made of. Shared with the hooks of low-latency calls, which may outlive the Buffer.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include <deep_moe/buffer.hpp>

#include "cpu/low_latency.hpp"
#include "cpu/protocol.hpp"
#include "runtime/domain.hpp"

namespace deep_moe {

struct Buffer::Impl : std::enable_shared_from_this<Buffer::Impl> {
  Impl(const Bootstrap& bootstrap, const BufferOptions& options);
  ~Impl();

  // Held during a call. Throws ForkedProcessError, DestroyedError, or what has failed the Buffer.
  std::unique_lock<std::mutex> lock_call();
  void check_process() const;
  void check_usable() const;  // check_process(), and not destroyed
  // Runs the checks, then the call, with the error handling that the Buffer promises.
  template <typename Check, typename Body>
  auto run(const layout::CallSignature& signature, const Check& check, const Body& body);
  // Errors that all ranks meet alike leave the Buffer usable; any other fails it.
  template <typename Body>
  auto guarded(const Body& body);
  cpu::Context context() { return {*domain, *pool}; }
  cpu::LowLatencyContext low_latency_context();
  void restart_low_latency();
  void unmask();
  void destroy();

  const int rank, num_ranks;
  const BufferOptions options;
  const std::uint64_t forks;
  std::mutex call_mutex;
  std::atomic<bool> destroyed{false};
  std::shared_ptr<Domain> domain;
  std::unique_ptr<cpu::WorkerPool> pool;
  cpu::LowLatencyState low_latency;
  std::uint64_t generation = 1;
  std::mutex scratch_mutex;
  Tensor scratch[2];  // what local_buffer() shows: heap kind, low-latency kind
};

}  // namespace deep_moe
