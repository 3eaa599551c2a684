// Low-latency calls of the CPU backend. State that outlives a call (slots in use, staging) is in LowLatencyState.
#pragma once

#include <cstdint>
#include <memory>

#include <deep_moe/buffer.hpp>

#include "cpu/protocol.hpp"

namespace deep_moe::cpu {

// Staging of all ranks has the same size; slot s of rank r starts at address(r, segment[r], s * bytes / kLowLatencySlots).
struct LowLatencyState {
  struct Slot {
    bool pending = false;           // its hook has not run
    std::uint64_t last_epoch = 0;   // last call that used it
  };
  std::uint64_t sequence = 0;  // low-latency calls so far; slot = sequence % kLowLatencySlots
  Slot slots[layout::kLowLatencySlots];
  std::int64_t staging_bytes = 0;  // of one rank, all slots; equal on all ranks
  std::vector<int> segments;       // by rank: id of its staging segment
  int num_pending() const;
};

// `lock_call` is what a hook takes before it runs: returns a guard object; throws if the Buffer is failed or destroyed.
struct LowLatencyContext {
  Context base;
  LowLatencyState& state;
  std::function<std::shared_ptr<void>()> lock_call;
  // Runs a receive half with the Buffer's error handling (marks it failed where needed).
  std::function<void(const std::function<void()>&)> guarded;
};

// Called once in the Buffer's constructor (collective) and when a call needs more than there is (all ranks decide alike).
void initialise(LowLatencyContext context);
void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyDispatchArgs& args);
void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyCombineArgs& args);
layout::CallSignature signature(const LowLatencyDispatchArgs& args);
layout::CallSignature signature(const LowLatencyCombineArgs& args);
LowLatencyDispatchResult low_latency_dispatch(LowLatencyContext context, const LowLatencyDispatchArgs& args);
LowLatencyCombineResult low_latency_combine(LowLatencyContext context, const LowLatencyCombineArgs& args);

}  // namespace deep_moe::cpu
