// The low-latency calls of one rank's GPU Buffer: staging, outputs, slots, hooks and masks around the kernels.
//
// A call runs on the stream it is given and never waits on the host, but where all ranks together make their staging
// larger. Its slot is that of its epoch, so at most kMaxInFlight calls may be sent and not received; a hook that has
// not been called when its slot may come round finds its receive half launched.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "cuda/device_world.hpp"

namespace deep_moe::cuda {

// Where a call runs, and whose its results are: the same stream unless the call is asynchronous.
struct LowLatencyStreams {
  Stream work = nullptr, user = nullptr;
  bool captured = false;  // work
};

class LowLatency {
 public:
  // What a hook holds while it runs: a call under way on the Buffer. Throws what the Buffer has failed with.
  using Enter = std::function<std::shared_ptr<void>()>;
  // Takes the epoch of a call that this rank cannot make, and tells the peers why.
  using Refuse = std::function<void(const layout::CallSignature& signature, const std::string& reason)>;
  struct Options {
    std::int64_t staging_bytes = 0;
    bool shrink = false;  // a rank that does not come is masked
    std::function<Stream()> current_stream;
  };

  // Collective: staging of the largest number of bytes that a rank asks for. Where a rank cannot have it there is none
  // yet, and the first call makes what it needs.
  LowLatency(DeviceWorld& world, Options options, Refuse refuse);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  // Throw before anything is launched, then the peers have to be told.
  void validate(const LowLatencyDispatchArgs& args) const;
  void validate(const LowLatencyCombineArgs& args) const;

  // `number` counts the Buffer's calls of every kind: the same on all ranks.
  LowLatencyDispatchResult dispatch(const LowLatencyDispatchArgs& args, const layout::CallSignature& signature,
                                    std::uint64_t number, LowLatencyStreams streams, const Enter& enter);
  LowLatencyCombineResult combine(const LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                                  std::uint64_t number, LowLatencyStreams streams, const Enter& enter);

  // Whether the calls take the network between nodes; then staging is that of node mates, made in the constructor, and
  // the epoch of a call that is refused is taken here.
  bool is_direct() const { return direct_ != nullptr; }
  void refuse(const layout::CallSignature& signature, const std::string& reason, Stream stream);

  // For this rank alone, from here on in the order of the stream.
  void mask(int peer, Stream stream);
  void query_mask(std::int32_t* status, Stream stream);
  // What the host has seen of masks.
  bool any_masked() const { return masked_by_host() != 0; }

  // Another call of the Buffer follows on `stream`: it goes behind the calls here, and the next call here behind it.
  void before_other_call(Stream stream);
  // At the end: the stream has all calls behind it, as far as that can still be had.
  void depart(Stream stream) noexcept;
  std::int64_t staging_bytes() const;
  // Collective, after a reset of the world: calls that were in flight are gone, and nobody is masked. If some rank has
  // missed a growth the next call makes new staging.
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
  void settle(const LowLatencyStreams& streams);
  void go_behind(Stream stream);
  void receive(InFlight& call, bool with_stats, Stream stream);
  // The outputs of one call, in one block of the heap. Where it cannot be had, the peers are told.
  void make_parts(std::initializer_list<Part> parts, LowLatencyStreams streams, const layout::CallSignature& signature,
                  std::vector<char*>* blocks);
  kernels::LowLatencyCall kernel_call(const layout::CallSignature& signature) const;
  // What a dispatch and the combine behind it, or a combine, need of memory for messages; throws after telling the
  // peers where there is less, or makes it.
  void ensure_room(const kernels::LowLatencyDispatchArgs& args, const TensorView& data,
                   const layout::CallSignature& signature, std::uint64_t number, const LowLatencyStreams& streams);
  void ensure_room(const kernels::LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                   std::uint64_t number, const LowLatencyStreams& streams);
  void check_part(std::int64_t bytes, const layout::CallSignature& signature) const;
  void launch(const kernels::LowLatencyDispatchArgs& args, Stream stream) const;
  void launch(const kernels::LowLatencyCombineArgs& args, Stream stream) const;
  // The hook of a call whose first half has been launched.
  std::function<void()> make_hook(std::shared_ptr<InFlight> call, std::uint64_t sequence, const Enter& enter);

  // cuda_low_latency_staging.cc
  void ensure_staging(std::int64_t slot_bytes, const layout::CallSignature& signature, std::uint64_t number,
                      const LowLatencyStreams& streams);
  std::string grow_staging(std::int64_t slot_bytes, int id, const std::function<void(int peer)>& look);
  std::string take_staging(std::int64_t bytes, Block* block);
  void look_at_missing(int peer, const layout::CallSignature& signature, Stream stream);
  void drop_staging();
  std::uint64_t masked_by_host() const;

  DeviceWorld& world_;
  const Options options_;
  const Refuse refuse_;
  const Nodes* direct_ = nullptr;  // calls go over its network
  int num_blocks_ = 0;
  bool is_alone_ = false;  // no other rank's kernels run on the device at the same time
  kernels::LowLatencyStaging staging_;
  std::int64_t wanted_slot_bytes_ = 0;  // of new staging, whatever the call needs
  std::shared_ptr<void> staging_owner_;
  bool captured_ = false;                    // some rank's graph has the staging's addresses
  std::vector<std::shared_ptr<void>> kept_;  // staging of such graphs
  Slot slots_[layout::kLowLatencySlots];
  std::uint64_t sequence_ = 0;    // calls so far
  std::uint64_t other_call_ = 0;  // sequence_ at the newest other call
  std::uint64_t generation_ = 0;  // restarts
  std::int64_t num_growths_ = 0;
  Stream last_stream_ = nullptr;
  bool has_stream_ = false;
  void* event_ = nullptr;  // a cudaEvent_t
};

}  // namespace deep_moe::cuda
