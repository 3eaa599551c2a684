// Low-latency calls of the CPU backend. State that outlives a call (slots in use, staging) is in LowLatencyState.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "cpu/output_pool.hpp"
#include "cpu/protocol.hpp"

namespace deep_moe::cpu {

struct InFlight;  // a call whose receive half has not run

// The staging of every rank is cut into kLowLatencySlots slots of equal size. A call uses the same slot on all ranks:
// the sequence number of the call, counted alike everywhere (see skip_call), modulo kLowLatencySlots.
struct LowLatencyState {
  struct Slot {
    std::uint64_t last_epoch = 0;    // last call that was counted for it
    std::shared_ptr<InFlight> call;  // whose rows are in it
    std::weak_ptr<void> hook;        // of that call: gone if the user has dropped it
  };
  std::uint64_t sequence = 0;
  std::uint64_t counted_epoch = 0;  // last call that was counted
  Slot slots[layout::kLowLatencySlots];
  std::atomic<std::int64_t> staging_bytes{0};  // of one rank, all slots; equal on all ranks
  std::vector<int> segments;                   // by rank: id of its staging segment
  int spare_segment = -1;                      // the newest of this rank, which a later growth may take
  std::int64_t spare_bytes = 0;
  std::shared_ptr<OutputPool> outputs = std::make_shared<OutputPool>();

  int num_in_flight() const;                    // calls whose hooks are still to be called
  std::size_t slot_bytes() const;               // of one slot
  std::size_t part_bytes(int num_ranks) const;  // of one writer in a slot
  // After a reset: no call is in flight, and ranks that were away may have another idea of the staging, so the next
  // call agrees on it anew.
  void restart();
};

// `lock_call` is what a hook takes before it runs: returns a guard object; throws if the Buffer is failed or destroyed.
struct LowLatencyContext {
  Context base;
  LowLatencyState& state;
  std::function<std::shared_ptr<void>()> lock_call;
  // Runs a receive half with the Buffer's error handling (marks it failed where needed).
  std::function<void(const std::function<void()>&)> guarded;
};

// Collective, once, in the Buffer's constructor: staging of num_rdma_bytes, the largest that a rank asked for. Where a
// rank cannot have it there is none yet, and the first call makes what it needs.
void initialise(LowLatencyContext context);

// Takes a slot for a call that ended in an error which every rank meets: the refused ones, and those of the
// high-throughput mode where ranks did not make the same call. To be called once the call has its epoch; does nothing
// for a low-latency call that came as far as taking its own.
void skip_call(Domain& domain, LowLatencyState& state) noexcept;

void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyDispatchArgs& args);
void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyCombineArgs& args);
LowLatencyDispatchResult low_latency_dispatch(LowLatencyContext context, const LowLatencyDispatchArgs& args);
LowLatencyCombineResult low_latency_combine(LowLatencyContext context, const LowLatencyCombineArgs& args);

}  // namespace deep_moe::cpu
