// How a low-latency call begins and ends on every rank. README.md beside this file has the words and the order among
// them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/units.cuh"
#include "kernels/protocol/announce.cuh"
#include "kernels/ptx/launch.cuh"
#include "kernels/tuning.hpp"
#include "layout/experts.hpp"

namespace deep_moe::kernels {

// The call as one thread sees it. All blocks but two carry rows. The herald tells peers about the call; the clerk
// watches them, and counts.
struct LowLatencyRun {
  static constexpr int kOtherBlocks = 2;
  WaitScope scope;
  const LowLatencyCall& call;
  layout::LowLatencyState& state;
  std::uint32_t tag;
  int slot;
  bool may_write;  // the slot of the peers
  bool failed;     // leave

  __device__ int rank() const { return scope.domain.rank; }
  __device__ int num_ranks() const { return scope.domain.num_ranks; }
  __device__ bool sends() const { return call.half != LowLatencyHalf::kReceive; }
  __device__ bool receives() const { return call.half != LowLatencyHalf::kSend; }
  // Both halves in one launch: this rank's own rows need not go through the staging.
  __device__ bool is_whole() const { return call.half == LowLatencyHalf::kBoth; }
  __device__ char* slot_of(int rank) const {
    return call.staging.bases[rank] + static_cast<std::int64_t>(slot) * call.staging.slot_bytes;
  }
  __device__ char* my_slot() const { return slot_of(rank()); }
  __device__ std::uint64_t* consumed(int holder, int of_slot, int writer) const {
    return scope.domain.words.consumed(scope.domain.workspaces[holder], of_slot, writer);
  }
  __device__ int num_carriers() const { return static_cast<int>(gridDim.x) - kOtherBlocks; }
  __device__ bool is_herald() const { return blockIdx.x == gridDim.x - 2; }
  __device__ bool is_clerk() const { return blockIdx.x == gridDim.x - 1; }
};

__device__ __forceinline__ layout::LowLatencyState& low_latency_state(const DeviceDomain& domain) {
  return *reinterpret_cast<layout::LowLatencyState*>(domain.words.low_latency_state(domain.workspaces[domain.rank]));
}

// B1. Every thread; nothing before it may touch what earlier launches have written.
__device__ __forceinline__ LowLatencyRun begin_call(const DeviceDomain& domain, const LowLatencyCall& call) {
  ptx::griddepcontrol_wait();
  layout::NotifyState& notify = domain.words.state(domain.workspaces[domain.rank]);
  layout::LowLatencyState& state = low_latency_state(domain);
  const bool is_second = call.half == LowLatencyHalf::kReceive;
  const std::uint64_t epoch =
      is_second ? ptx::ld_relaxed_gpu(call.epoch) : layout::epoch_of(ptx::ld_relaxed_gpu(&notify.epoch)) + 1;
  const std::uint64_t ready = ptx::ld_relaxed_gpu(&state.ready_epoch);
  const bool failed = ptx::ld_relaxed_gpu(&notify.failed) != 0;
  const int slot = static_cast<int>(epoch % layout::kLowLatencySlots);
  return {{domain, epoch, &state.trouble[slot]},
          call,
          state,
          static_cast<std::uint32_t>(epoch),
          slot,
          ready == epoch,
          failed};
}

// S1. Nobody reads any more what the slot held before. Every warp, before its first unit goes to a peer.
__device__ __forceinline__ bool await_slot(LowLatencyRun& run) {
  if (run.may_write || run.failed) return !run.failed;
  const std::uint64_t last = ptx::ld_relaxed_gpu(&run.state.sent_epoch[run.slot]);
  bool ok = true;
  if (last != ptx::ld_relaxed_gpu(&run.state.trouble[run.slot])) {
    for (int peer = lane_id(); peer < run.num_ranks(); peer += 32) {
      if (peer == run.rank()) continue;
      std::uint64_t seen;
      ok = wait_until(
               run.scope, layout::WaitPhase::kSlotSpace, peer, last,
               [&] { return ptx::ld_acquire_sys(run.consumed(run.rank(), run.slot, peer)); },
               [&](std::uint64_t epoch) { return epoch >= last; }, &seen) &&
           ok;
    }
  }
  run.may_write = __all_sync(0xffffffffu, ok);
  return run.may_write;
}

// B2. A block says that all its threads have read the epoch and are past await_slot: make, behind a barrier of the
// block. The last block of the launch ends the epoch: finish, at its end, so that nothing waits for the answer.
class Arrival {
 public:
  __device__ __forceinline__ void make(const LowLatencyRun& run) {
    if (threadIdx.x != 0 || run.failed || !run.sends()) return;
    made_ = true;
    before_ = ptx::atom_add_relaxed_gpu(&run.scope.state().epoch, kOne);
  }
  __device__ __forceinline__ void finish(const LowLatencyRun& run) const {
    if (!made_ || (before_ >> layout::kArrivalShift) != gridDim.x - 1) return;
    ptx::st_relaxed_gpu(&run.state.sent_epoch[run.slot], run.scope.epoch);
    ptx::atom_add_relaxed_gpu(&run.scope.state().epoch, 1 - kOne * gridDim.x);
  }

 private:
  static constexpr std::uint64_t kOne = std::uint64_t{1} << layout::kArrivalShift;
  bool made_ = false;
  std::uint64_t before_ = 0;
};

// R1. The header of one peer, or of this rank itself: `*num_tokens` of it. Where `watch`, a peer that makes another
// call is noticed and reported, and all blocks leave. False: leave.
__device__ __forceinline__ bool await_header(const LowLatencyRun& run, int peer, const char* header, bool watch,
                                             std::uint32_t* num_tokens) {
  constexpr int kRoundsPerLook = 32;  // at the peer's announcement
  uint4 unit = no_unit(run.tag);
  bool other = false;
  int round = 0;
  std::uint64_t seen;
  const bool there = wait_until(
      run.scope, layout::WaitPhase::kRouting, peer, run.tag,
      [&] {
        unit = ptx::ld_relaxed_sys_16(header);
        if (watch && ++round % kRoundsPerLook == 0) {
          const layout::Announce& record = announcement(run.scope, peer);
          other =
              ptx::ld_acquire_sys(&record.epoch) == run.scope.epoch &&
              (record.status != static_cast<std::uint32_t>(layout::CallStatus::kOk) || record.hash != run.call.hash);
        }
        return std::uint64_t{unit.w};
      },
      [&](std::uint64_t tag) { return other || tag == run.tag; }, &seen);
  if (!there) return false;
  other = other || (unit.y | static_cast<std::uint64_t>(unit.z) << 32) != run.call.hash;
  if (!other) {
    *num_tokens = min(unit.x, static_cast<std::uint32_t>(run.call.max_tokens));
    return true;
  }
  if (watch && wait_for_announcement(run.scope, peer, run.call.hash) != layout::NotifyOutcome::kFailed)
    ptx::st_relaxed_gpu(&run.state.trouble[run.slot], run.scope.epoch);
  return false;
}

// H1. The herald's only work: this rank's header, what it has read of earlier calls, and its announcement, to every
// peer; whether the next call may write its slot; this call's marks for later launches.
__device__ __forceinline__ void run_herald(LowLatencyRun& run, std::int64_t num_tokens, Arrival& arrival) {
  const LowLatencyCall& call = run.call;
  const int peer = static_cast<int>(threadIdx.x);
  const int next = static_cast<int>((run.scope.epoch + 1) % layout::kLowLatencySlots);
  bool ready = true;
  const bool has_peers = peer / 32 * 32 < run.num_ranks();  // the warp
  const bool may_write = !run.failed && (!run.sends() || !has_peers || await_slot(run));
  if (peer < run.num_ranks() && may_write) {
    if (run.sends()) {
      const uint4 header = make_uint4(static_cast<std::uint32_t>(num_tokens), static_cast<std::uint32_t>(call.hash),
                                      static_cast<std::uint32_t>(call.hash >> 32), run.tag);
      ptx::st_relaxed_sys_16(run.slot_of(peer) + run.rank() * layout::kUnitBytes, header);
      ready =
          ptx::ld_relaxed_gpu(&run.state.sent_epoch[next]) == ptx::ld_relaxed_gpu(&run.state.trouble[next]) ||
          peer == run.rank() ||
          ptx::ld_acquire_sys(run.consumed(run.rank(), next, peer)) >= ptx::ld_relaxed_gpu(&run.state.sent_epoch[next]);
    }
    std::uint64_t done[layout::kLowLatencySlots];
#pragma unroll
    for (int i = 0; i < layout::kLowLatencySlots; ++i) done[i] = ptx::ld_relaxed_gpu(&run.state.done_epoch[i]);
    layout::Announce* record = nullptr;
    if (run.sends())
      record =
          &fill_announcement(run.scope, peer, call.signature, call.hash, num_tokens, layout::Place{}, layout::Place{});
    ptx::fence_acq_rel_sys();
#pragma unroll
    for (int i = 0; i < layout::kLowLatencySlots; ++i) ptx::st_relaxed_sys(run.consumed(peer, i, run.rank()), done[i]);
    if (run.sends()) ptx::st_relaxed_sys(&record->epoch, run.scope.epoch);
  }
  ready = __syncthreads_and(ready);
  arrival.make(run);
  if (threadIdx.x != 0 || run.failed) return;
  if (run.sends() && ready) ptx::st_relaxed_gpu(&run.state.ready_epoch, run.scope.epoch + 1);
  if (run.receives()) ptx::st_relaxed_gpu(&run.state.done_epoch[run.slot], run.scope.epoch);
  if (call.half == LowLatencyHalf::kSend) ptx::st_relaxed_gpu(call.epoch, run.scope.epoch);
}

// K1. The clerk: waits for the headers of all peers, which tells how long each kept this rank waiting. The last threads
// of the block, one a peer. False: leave.
__device__ __forceinline__ bool watch_peers(const LowLatencyRun& run, std::uint32_t* num_tokens) {
  const int peer = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (peer >= run.num_ranks()) return true;
  const std::uint64_t start = run.call.wait_stats == nullptr ? 0 : ptx::globaltimer_ns();
  std::uint32_t tokens = 0;
  const bool ok = !run.failed && await_header(run, peer, run.my_slot() + peer * layout::kUnitBytes, true, &tokens);
  num_tokens[peer] = tokens;
  if (run.call.wait_stats != nullptr)
    run.call.wait_stats[peer] += static_cast<std::int64_t>(ptx::globaltimer_ns() - start);
  return ok;
}

// A token's ids, entries k and k + 32 in lane k, as they lie in memory: nothing waits for them before they are used.
struct RawIds {
  static constexpr int kPerLane = 2;
  static_assert(layout::kMaxTopk <= 32 * kPerLane);
  std::int64_t id[kPerLane];

  __device__ __forceinline__ RawIds(const TopkIds& ids, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int k = lane_id() + 32 * i;
      const std::int64_t at = token * ids.row_stride + k;
      id[i] = -1;
      if (k >= ids.topk) continue;
      if (ids.id_bytes == 8)
        id[i] = static_cast<const std::int64_t*>(ids.data)[at];
      else
        id[i] = static_cast<const std::int32_t*>(ids.data)[at];
    }
  }
};

// The same; -1 where there is none.
struct TokenIds {
  static constexpr int kPerLane = RawIds::kPerLane;
  std::int32_t id[kPerLane];

  __device__ __forceinline__ TokenIds(const RawIds& raw, int num_experts) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      id[i] = raw.id[i] >= 0 && raw.id[i] < num_experts ? static_cast<std::int32_t>(raw.id[i]) : -1;
  }
  // The ranks of the experts as bits. The whole warp.
  __device__ __forceinline__ std::uint64_t ranks(const layout::ExpertBlocks& experts) const {
    std::uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (id[i] >= 0) bits |= std::uint64_t{1} << experts.rank_of(id[i]);
    const std::uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(bits));
    if (experts.num_ranks <= 32) return low;
    const std::uint32_t high = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(bits >> 32));
    return low | static_cast<std::uint64_t>(high) << 32;
  }
};

// Calls `body(rank)` for each bit.
template <typename Body>
__device__ __forceinline__ void for_each_rank(std::uint64_t bits, Body body) {
#pragma unroll 1
  for (; bits != 0; bits &= bits - 1) body(__ffsll(static_cast<long long>(bits)) - 1);
}

// Scratch memory of a warp.
struct alignas(16) TileBuffer {
  char bytes[layout::kTilePayload];
};

// A contiguous share of `total` tasks for one block, enough for all of its warps.
struct TaskRange {
  int begin, end;
  __device__ TaskRange(int total, int num_blocks, int block) {
    const int warps = static_cast<int>(blockDim.x / 32);
    const int share = max((total + num_blocks - 1) / num_blocks, warps);
    const std::int64_t first = static_cast<std::int64_t>(block) * share;
    begin = static_cast<int>(min(first, static_cast<std::int64_t>(total)));
    end = static_cast<int>(min(first + share, static_cast<std::int64_t>(total)));
  }
};

}  // namespace deep_moe::kernels
