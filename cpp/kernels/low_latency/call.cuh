// How a low-latency call begins and ends on every rank. README.md beside this file has the words and the order among
// them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/units.cuh"
#include "kernels/protocol/announce.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/launch.cuh"
#include "kernels/tuning.hpp"
#include "layout/experts.hpp"

namespace deep_moe::kernels {

// Addresses of this rank that every warp needs at once, made by the host.
struct LowLatencyHot {
  const std::uint64_t* epoch = nullptr;  // of the call, or the one before it
  layout::NotifyState* notify = nullptr;
  layout::LowLatencyState* state = nullptr;
  char* staging = nullptr;  // this rank's

  LowLatencyHot() = default;
  LowLatencyHot(const DeviceDomain& domain, const LowLatencyCall& call)
      : notify(&domain.words.state(domain.workspaces[domain.rank])),
        state(
            reinterpret_cast<layout::LowLatencyState*>(domain.words.low_latency_state(domain.workspaces[domain.rank]))),
        staging(call.staging.bases[domain.rank]) {
    epoch = call.half == LowLatencyHalf::kReceive ? call.epoch : &notify->epoch;
  }
};

// Divides numbers below 2^31 by one that the host knows.
struct Divisor {
  std::uint32_t value = 1, factor = 0x80000001u;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(std::uint32_t divisor) : value(divisor) {
    while (1ull << (shift - 31) < divisor) ++shift;
    factor = static_cast<std::uint32_t>((1ull << shift) / divisor + 1);
  }
  __device__ __forceinline__ std::uint32_t divide(std::uint32_t number, std::uint32_t* rest) const {
    const auto quotient = static_cast<std::uint32_t>(static_cast<std::uint64_t>(number) * factor >> shift);
    *rest = number - quotient * value;
    return quotient;
  }
};

// What a block knows of the call, in shared memory: registers are for rows.
struct CallState {
  WaitFailure failure;
  std::uint64_t epoch;
  std::uint64_t live;        // ranks that take part
  std::int64_t slot_offset;  // in anybody's staging
  int slot;
  bool failed;  // leave
};

struct LowLatencyRun {
  const DeviceDomain& domain;
  const LowLatencyCall& call;
  const LowLatencyHot& hot;
  CallState& state;

  __device__ __forceinline__ int rank() const { return domain.rank; }
  __device__ __forceinline__ int num_ranks() const { return domain.num_ranks; }
  __device__ __forceinline__ std::uint32_t tag() const { return static_cast<std::uint32_t>(state.epoch); }
  __device__ __forceinline__ bool sends() const { return call.half != LowLatencyHalf::kReceive; }
  __device__ __forceinline__ bool receives() const { return call.half != LowLatencyHalf::kSend; }
  // Both halves in one launch: this rank's own rows need not go through the staging.
  __device__ __forceinline__ bool is_whole() const { return call.half == LowLatencyHalf::kBoth; }
  __device__ __forceinline__ bool is_live(int rank) const { return (state.live >> rank & 1) != 0; }
  __device__ __forceinline__ char* slot_of(int rank) const { return call.staging.bases[rank] + state.slot_offset; }
  __device__ __forceinline__ char* my_slot() const { return hot.staging + state.slot_offset; }
  __device__ __forceinline__ layout::LowLatencyState& words() const { return *hot.state; }
  __device__ __forceinline__ std::uint64_t* consumed(int holder, int of_slot, int writer) const {
    return domain.words.consumed(domain.workspaces[holder], of_slot, writer);
  }
  __device__ __forceinline__ bool may_be_masked() const { return call.shrink; }
  __device__ __forceinline__ WaitScope scope() const {
    return {domain, state.epoch, &hot.state->trouble[state.slot], &state.failure,
            call.shrink ? &hot.state->masked : nullptr};
  }
};

// Arguments of a launch are far away at first: each 64 bytes of them come as slowly as a load from L2, when they are
// first touched. The warps of a block touch them ahead, each a part: all but addresses of ranks that there are not.
__device__ __forceinline__ std::uint32_t touch(const void* first, const void* end) {
  constexpr int kLine = 64;
  const int lines =
      static_cast<int>((static_cast<const char*>(end) - static_cast<const char*>(first) + kLine - 1) / kLine);
  std::uint32_t sum = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x / 32); i < lines; i += static_cast<int>(blockDim.x / 32))
    sum += *reinterpret_cast<const std::uint32_t*>(static_cast<const char*>(first) + i * kLine);
  return sum;
}

// All warps of a block meet. Each role does so at a place of its own in the code, which __syncthreads() does not allow.
__device__ __forceinline__ void meet_block() { ptx::barrier_sync(0, static_cast<int>(blockDim.x)); }

// How a block takes part in a call: one warp of it finds out what the call is, waits until it may begin, and says that
// the block has seen the epoch. The others wait for that warp.
class CallEntry {
 public:
  // B1, S1. That warp, behind griddepcontrol_wait; then all threads of the block meet.
  __device__ __forceinline__ void begin(const LowLatencyRun& run) {
    const LowLatencyCall& call = run.call;
    layout::LowLatencyState& words = run.words();
    const std::uint64_t word = ptx::ld_relaxed_gpu(run.hot.epoch);
    const std::uint64_t ready = ptx::ld_relaxed_gpu(&words.ready_epoch);
    const bool has_failed = ptx::ld_relaxed_gpu(&run.hot.notify->failed) != 0;
    const std::uint64_t live = call.live_ranks & ~ptx::ld_relaxed_gpu(&words.masked);
    const std::uint64_t epoch = run.sends() ? layout::epoch_of(word) + 1 : word;
    const int slot = static_cast<int>(epoch % layout::kLowLatencySlots);
    // As one lane has seen them: other blocks of this launch change these words meanwhile.
    const bool failed = __shfl_sync(0xffffffffu, has_failed, 0), is_ready = __shfl_sync(0xffffffffu, ready == epoch, 0);
    if (lane_id() == 0) {
      CallState& state = run.state;
      state.failure.claimed = 0;
      state.epoch = epoch;
      state.live = live;
      state.slot_offset = slot * call.staging.slot_bytes;
      state.slot = slot;
      state.failed = failed;
    }
    __syncwarp();
    if (!run.sends() || failed) return;
    if (!is_ready && !await_slot(run)) [[unlikely]]
      run.state.failed = true;
    made_ = lane_id() == 0;
  }
  // B2. The same warp, behind that meeting.
  __device__ __forceinline__ void arrive(const LowLatencyRun& run) {
    if (made_) before_ = ptx::atom_add_relaxed_gpu(&run.hot.notify->epoch, kOne);
  }
  // At its end. The last block of the launch ends the epoch; nothing has waited for the answer until now.
  __device__ __forceinline__ void finish(const LowLatencyRun& run) const {
    if (!made_ || (before_ >> layout::kArrivalShift) != gridDim.x - 1) return;
    ptx::st_relaxed_gpu(&run.words().sent_epoch[run.state.slot], run.state.epoch);
    ptx::atom_add_relaxed_gpu(&run.hot.notify->epoch, 1 - kOne * gridDim.x);
  }

 private:
  // S1. Nobody reads any more what the slot held before. False: leave.
  __device__ __forceinline__ static bool await_slot(const LowLatencyRun& run) {
    if (blockIdx.x == 0) tell_slot_read(run);
    const std::uint64_t last = ptx::ld_relaxed_gpu(&run.words().sent_epoch[run.state.slot]);
    const bool in_trouble = last == ptx::ld_relaxed_gpu(&run.words().trouble[run.state.slot]);
    bool ok = true;
    if (!__shfl_sync(0xffffffffu, in_trouble, 0)) {
#pragma unroll 1
      for (int peer = lane_id(); peer < run.num_ranks(); peer += 32) {
        if (peer == run.rank() || !run.is_live(peer)) continue;
        std::uint64_t seen;
        ok = wait_in_line(
                 run.scope(), layout::WaitPhase::kSlotSpace, peer, last,
                 [&] { return ptx::ld_acquire_sys(run.consumed(run.rank(), run.state.slot, peer)); },
                 [&](std::uint64_t epoch) { return epoch >= last; }, &seen) &&
             ok;
      }
    }
    return __all_sync(0xffffffffu, ok);
  }

  // What this rank has read of the slot, to every peer: where calls of the other mode lay between, no launch has said
  // so since, and all ranks would wait for each other. The guard of this launch, which may have read more, comes
  // behind.
  __device__ __forceinline__ static void tell_slot_read(const LowLatencyRun& run) {
    const std::uint64_t done = ptx::ld_relaxed_gpu(&run.words().done_epoch[run.state.slot]);
    ptx::fence_acq_rel_sys();
#pragma unroll 1
    for (int peer = lane_id(); peer < run.num_ranks(); peer += 32)
      if (run.is_live(peer)) ptx::st_relaxed_sys(run.consumed(peer, run.state.slot, run.rank()), done);
  }

  static constexpr std::uint64_t kOne = std::uint64_t{1} << layout::kArrivalShift;
  bool made_ = false;
  std::uint64_t before_ = 0;
};
// Every warp, at its end; `ok`: no wait of this thread has failed.
__device__ __forceinline__ void leave(const LowLatencyRun& run, bool ok) {
  if (!ok) report_failure(run.domain, run.state.epoch, run.state.failure);
}

// R1. The header of one peer, or of this rank itself: `*num_tokens` of it. Where `watch`, a peer that makes another
// call is noticed and reported, and all blocks leave. False: leave.
__device__ __forceinline__ bool await_header(const LowLatencyRun& run, int peer, bool watch,
                                             std::uint32_t* num_tokens) {
  constexpr int kRoundsPerLook = 32;  // at the peer's announcement
  const char* header = run.my_slot() + peer * layout::kUnitBytes;
  uint4 unit = no_unit(run.tag());
  bool other = false;
  int round = 0;
  std::uint64_t seen;
  const bool there = wait_in_line(
      run.scope(), layout::WaitPhase::kRouting, peer, run.tag(),
      [&] {
        unit = ptx::ld_relaxed_sys_16(header);
        if (watch && ++round % kRoundsPerLook == 0) {
          const layout::Announce& record = announcement(run.scope(), peer);
          other =
              ptx::ld_acquire_sys(&record.epoch) == run.state.epoch &&
              (record.status != static_cast<std::uint32_t>(layout::CallStatus::kOk) || record.hash != run.call.hash);
        }
        return std::uint64_t{unit.w};
      },
      [&](std::uint64_t tag) { return other || tag == run.tag(); }, &seen);
  if (!there) return false;
  if (unit.w != run.tag() && !other) {  // masked meanwhile
    *num_tokens = 0;
    return true;
  }
  other = other || (unit.y | static_cast<std::uint64_t>(unit.z) << 32) != run.call.hash;
  if (!other) {
    *num_tokens = min(unit.x, static_cast<std::uint32_t>(run.call.max_tokens));
    return true;
  }
  if (watch && wait_for_announcement(run.scope(), peer, run.call.hash) != layout::NotifyOutcome::kFailed)
    ptx::st_relaxed_gpu(&run.words().trouble[run.state.slot], run.state.epoch);
  return false;
}

// H1. One warp of the grid: this rank's header to every peer.
__device__ __forceinline__ void send_header(const LowLatencyRun& run, std::int64_t num_tokens) {
  const uint4 header = make_uint4(static_cast<std::uint32_t>(num_tokens), static_cast<std::uint32_t>(run.call.hash),
                                  static_cast<std::uint32_t>(run.call.hash >> 32), run.tag());
#pragma unroll 1
  for (int peer = lane_id(); peer < run.num_ranks(); peer += 32)
    if (run.is_live(peer)) ptx::st_relaxed_sys_16(run.slot_of(peer) + run.rank() * layout::kUnitBytes, header);
}

// H2. One warp of the grid: what this rank has read of earlier calls and its announcement, to every peer; whether the
// next call may write its slot; this call's marks for later launches.
__device__ __forceinline__ void tell_peers(const LowLatencyRun& run, std::int64_t num_tokens) {
  const LowLatencyCall& call = run.call;
  const layout::LowLatencyState& state = run.words();
  const int next = static_cast<int>((run.state.epoch + 1) % layout::kLowLatencySlots);
  const std::uint64_t sent = ptx::ld_relaxed_gpu(&state.sent_epoch[next]);
  const std::uint64_t trouble = ptx::ld_relaxed_gpu(&state.trouble[next]);
  std::uint64_t done[layout::kLowLatencySlots];
#pragma unroll
  for (int i = 0; i < layout::kLowLatencySlots; ++i) done[i] = ptx::ld_relaxed_gpu(&state.done_epoch[i]);
  bool ready = true;
#pragma unroll 1
  for (int peer = lane_id(); peer < run.num_ranks(); peer += 32) {
    if (!run.is_live(peer)) continue;
    const std::uint64_t read = ptx::ld_relaxed_sys(run.consumed(run.rank(), next, peer));
    if (run.sends())
      fill_announcement(run.scope(), peer, call.signature, call.hash, num_tokens, layout::Place{}, layout::Place{});
    ptx::fence_acq_rel_sys();
#pragma unroll
    for (int i = 0; i < layout::kLowLatencySlots; ++i) ptx::st_relaxed_sys(run.consumed(peer, i, run.rank()), done[i]);
    if (!run.sends()) continue;
    ptx::st_relaxed_sys(&run.domain.words.announce(run.domain.workspaces[peer], run.state.epoch, run.rank()).epoch,
                        run.state.epoch);
    ready = ready && (sent == trouble || peer == run.rank() || read >= sent);
  }
  ready = __all_sync(0xffffffffu, ready);
  if (lane_id() != 0) return;
  layout::LowLatencyState& marks = run.words();
  if (run.sends() && ready) ptx::st_relaxed_gpu(&marks.ready_epoch, run.state.epoch + 1);
  if (run.receives()) ptx::st_relaxed_gpu(&marks.done_epoch[run.state.slot], run.state.epoch);
  if (call.half == LowLatencyHalf::kSend) ptx::st_relaxed_gpu(call.epoch, run.state.epoch);
}

// K1. The same warp waits for the headers of all peers, which tells how long each kept this rank waiting, and calls
// `take(peer, tokens)`. False: leave.
template <typename Take>
__device__ __forceinline__ bool watch_peers(const LowLatencyRun& run, Take take) {
  bool ok = true;
#pragma unroll 1
  for (int peer = lane_id(); peer < run.num_ranks(); peer += 32) {
    if (!run.is_live(peer)) {
      take(peer, 0u);
      continue;
    }
    const std::uint64_t start = run.call.wait_stats == nullptr ? 0 : ptx::globaltimer_ns();
    std::uint32_t tokens = 0;
    ok = await_header(run, peer, true, &tokens) && ok;
    if (run.call.wait_stats != nullptr)
      run.call.wait_stats[peer] += static_cast<std::int64_t>(ptx::globaltimer_ns() - start);
    if (ok) take(peer, tokens);
  }
  return ok;
}

// Which rank owns an expert, without a division.
struct ExpertRanks {
  std::uint32_t split = 0, extra = 0;
  std::uint32_t per_larger = 0, per_smaller = 0;  // 2^28 over the experts of a rank, rounded up

  ExpertRanks() = default;
  explicit ExpertRanks(const layout::ExpertBlocks& experts)
      : split(static_cast<std::uint32_t>(experts.extra * (experts.base + 1))),
        extra(static_cast<std::uint32_t>(experts.extra)),
        per_larger(inverse(experts.base + 1)),
        per_smaller(inverse(experts.base > 0 ? experts.base : 1)) {}
  __device__ __forceinline__ int rank_of(std::uint32_t expert) const {
    return expert < split ? quotient(expert, per_larger)
                          : static_cast<int>(extra) + quotient(expert - split, per_smaller);
  }

 private:
  // Exact as long as dividend and divisor have a product below 2^28.
  static_assert(layout::kMaxExperts <= 1 << 14);
  static std::uint32_t inverse(int divisor) {
    return ((1u << 28) + static_cast<std::uint32_t>(divisor) - 1) / static_cast<std::uint32_t>(divisor);
  }
  __device__ __forceinline__ static int quotient(std::uint32_t expert, std::uint32_t inverse) {
    return static_cast<int>(static_cast<std::uint64_t>(expert) * inverse >> 28);
  }
};

// Ranks as bits: what is common has at most 32.
template <bool kPlain>
using RankBits = std::conditional_t<kPlain, std::uint32_t, std::uint64_t>;

// A token's entries lie in lanes, entry k in lane k; of more than 32, half by half.
inline constexpr int kHalf = 32;
static_assert(layout::kMaxTopk <= 2 * kHalf);
__device__ __forceinline__ int entry_of_lane(int half) { return half * kHalf + lane_id(); }
template <bool kPlain>
__device__ __forceinline__ int num_halves(int topk) {
  return kPlain || topk <= kHalf ? 1 : 2;
}

// What earlier launches have left, or the caller, is loaded past L1: a launch that starts while the one in front of it
// runs may find there what was true before.
// An id as it lies in memory; -1 for an entry that there is not. Nothing waits for it before it is used.
__device__ __forceinline__ std::int64_t raw_id(const TopkIds& ids, std::int64_t token, int k) {
  if (k >= ids.topk) return -1;
  const std::int64_t at = token * ids.row_stride + k;
  return ids.id_bytes == 8
             ? static_cast<std::int64_t>(ptx::ld_relaxed_gpu(static_cast<const std::uint64_t*>(ids.data) + at))
             : std::int64_t{ptx::ld_relaxed_gpu(static_cast<const std::int32_t*>(ids.data) + at)};
}
// -1 where it is none.
__device__ __forceinline__ std::int32_t checked_id(std::int64_t id, int num_experts) {
  return id >= 0 && id < num_experts ? static_cast<std::int32_t>(id) : -1;
}

// The ranks of a token's experts; `first` is the id of this lane's entry of the first half. The whole warp.
template <bool kPlain>
__device__ __forceinline__ RankBits<kPlain> ranks_of(const LowLatencyRun& run, const TopkIds& ids, std::int64_t token,
                                                     std::int32_t first, const ExpertRanks& experts) {
  RankBits<kPlain> bits = 0;
  if (first >= 0) bits = RankBits<kPlain>{1} << experts.rank_of(static_cast<std::uint32_t>(first));
  if constexpr (kPlain) {
    return __reduce_or_sync(0xffffffffu, bits) & static_cast<std::uint32_t>(run.state.live);
  } else {
    if (ids.topk > kHalf) {
      const std::int32_t second = checked_id(raw_id(ids, token, entry_of_lane(1)), run.call.num_experts);
      if (second >= 0) bits |= std::uint64_t{1} << experts.rank_of(static_cast<std::uint32_t>(second));
    }
    const std::uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(bits));
    const std::uint32_t high = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(bits >> 32));
    return (low | static_cast<std::uint64_t>(high) << 32) & run.state.live;
  }
}

// Whether this lane's entry, with the expert `id`, has that in common with an entry further to the front.
__device__ __forceinline__ bool is_repeated(const TopkIds& ids, std::int64_t token, int half, std::int32_t id) {
  bool repeated = (__match_any_sync(0xffffffffu, id) & ((1u << lane_id()) - 1)) != 0;
  if (half > 0) {
#pragma unroll 1
    for (int k = 0; k < half * kHalf; ++k) repeated = repeated || raw_id(ids, token, k) == id;
  }
  return id >= 0 && repeated;
}
// The weight of this lane's entry, and if others further back have the same expert, the sum with theirs in their order.
__device__ __forceinline__ float merged_weight(const TopkIds& ids, std::int64_t token, int half, std::int32_t id,
                                               const float* weights) {
  const int mine = entry_of_lane(half);
  float sum = mine < ids.topk ? __fadd_rn(0.0f, ptx::ld_relaxed_gpu(weights + mine)) : 0.0f;
  const std::uint32_t alike = __match_any_sync(0xffffffffu, id);
  if (id >= 0 && (ids.topk > kHalf || __popc(alike) > 1)) {
#pragma unroll 1
    for (int k = mine + 1; k < ids.topk; ++k)
      if (raw_id(ids, token, k) == id) sum = __fadd_rn(sum, ptx::ld_relaxed_gpu(weights + k));
  }
  return sum;
}

__device__ __forceinline__ int first_of(std::uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
__device__ __forceinline__ int first_of(std::uint64_t bits) { return __ffsll(static_cast<long long>(bits)) - 1; }
// Calls `body(rank)` for each bit.
template <typename Bits, typename Body>
__device__ __forceinline__ void for_each_rank(Bits bits, Body body) {
#pragma unroll 1
  for (; bits != 0; bits &= bits - 1) body(first_of(bits));
}

// Which warps carry rows, and this one among them: neighbours are in the same block as far as it goes, so that parts of
// a row are, and few pages are looked up by an SM.
struct Carriers {
  int mine, count;
  __device__ explicit Carriers(int warps_per_block)
      : mine(static_cast<int>(blockIdx.x) * warps_per_block + static_cast<int>(threadIdx.x / 32)),
        count(warps_per_block * static_cast<int>(gridDim.x)) {}
};

}  // namespace deep_moe::kernels
