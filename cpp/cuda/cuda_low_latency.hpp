// The low-latency calls of one rank's GPU Buffer: staging, outputs, slots and hooks around the kernels.
//
// A call runs on the caller's current stream and never waits on the host. Its slot is that of its epoch, so at most
// kMaxInFlight calls may be sent and not received; a hook that has not been called when its slot may come round finds
// its receive half launched.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "cuda/device_world.hpp"

namespace deep_moe::cuda {

class LowLatency {
 public:
  // What a hook holds while it runs: a call under way on the Buffer. Throws what the Buffer has failed with.
  using Enter = std::function<std::shared_ptr<void>()>;
  // Takes the epoch of a call that this rank cannot make, and tells the peers why.
  using Refuse = std::function<void(const layout::CallSignature& signature, const std::string& reason)>;

  // Collective: staging of the largest number of bytes that a rank asks for. Where a rank cannot have it there is none
  // yet, and the first call makes what it needs. `num_sharing`: ranks, this one included, whose kernels share the
  // device at the same time.
  LowLatency(DeviceWorld& world, std::int64_t staging_bytes, int num_sharing, std::function<Stream()> current_stream,
             Refuse refuse);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  // Throw before anything is launched, then the peers have to be told.
  void validate(const LowLatencyDispatchArgs& args) const;
  void validate(const LowLatencyCombineArgs& args) const;

  LowLatencyDispatchResult dispatch(const LowLatencyDispatchArgs& args, const layout::CallSignature& signature,
                                    Stream stream, const Enter& enter);
  LowLatencyCombineResult combine(const LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                                  Stream stream, const Enter& enter);

  // Another call of the Buffer follows on `stream`: it goes behind the calls here, and the next call here behind it.
  void before_other_call(Stream stream);
  // At the end: the stream has all calls behind it, as far as that can still be had.
  void depart(Stream stream) noexcept;
  std::int64_t staging_bytes() const;
  // After a reset of the world: calls that were in flight are gone.
  void restart();

 private:
  struct InFlight;  // a call whose receive half has not been launched
  struct Slot {
    std::shared_ptr<InFlight> call;
    std::weak_ptr<void> hook;    // gone if the user has dropped it
    std::uint64_t sequence = 0;  // of the call
  };
  struct Part {  // of the outputs of one call
    Tensor* tensor;
    DType dtype;
    std::vector<std::int64_t> shape;
  };
  // Launches a half, or both; with the caller's statistics or without.
  using Launch = std::function<void(kernels::LowLatencyHalf half, bool with_stats, Stream stream)>;

  int num_in_flight() const;
  void settle(Stream stream);
  void go_behind(Stream stream);
  void ensure_staging(std::int64_t slot_bytes, Stream stream, const char* call);
  std::string take_staging(std::int64_t bytes, Block* block);
  void make_parts(const std::vector<Part>& parts, Stream stream, const layout::CallSignature& signature);
  kernels::LowLatencyCall kernel_call(const layout::CallSignature& signature) const;
  // Launches the call, or its first half, and returns a hook for the second. `keep` is what that needs.
  std::function<void()> launch_call(const char* name, const Launch& launch, bool halves, std::shared_ptr<void> keep,
                                    std::int64_t* complete, Stream stream, const Enter& enter);

  DeviceWorld& world_;
  const std::function<Stream()> current_stream_;
  const Refuse refuse_;
  int num_blocks_ = 3;
  kernels::LowLatencyStaging staging_;
  std::shared_ptr<void> staging_owner_;
  Slot slots_[layout::kLowLatencySlots];
  std::uint64_t sequence_ = 0;    // calls so far
  std::uint64_t other_call_ = 0;  // sequence_ at the newest other call
  std::uint64_t generation_ = 0;  // restarts
  Stream last_stream_ = nullptr;
  bool has_stream_ = false;
  void* event_ = nullptr;  // a cudaEvent_t
};

}  // namespace deep_moe::cuda
