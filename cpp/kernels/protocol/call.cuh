// What the launches that move rows have in common: how their blocks begin a call, share out tokens, and end together.
#pragma once

#include <cstdint>

#include "kernels/protocol/announce.cuh"
#include "kernels/ptx/tma.cuh"

namespace deep_moe::kernels {

// Begins a call that no notify precedes: the first block announces it to every rank.
__device__ __forceinline__ void announce_call(const WaitScope& scope, const CallStart& start, std::int64_t num_tokens) {
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x != 0 || thread >= scope.domain.num_ranks || ptx::ld_relaxed_gpu(&scope.state().failed) != 0) return;
  announce(scope, thread, start.signature, start.hash, num_tokens, start.place, start.weight_place);
}

// Every block waits for every peer. The same result in all threads of a block. kRowsFit: go on. kFailed: leave at once.
// Anything else: no rows, but end the call.
__device__ __forceinline__ layout::NotifyOutcome wait_for_peers(const WaitScope& scope, const CallStart& start,
                                                                std::uint32_t* trouble) {
  using layout::NotifyOutcome;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) *trouble = 0;
  if (__syncthreads_or(ptx::ld_relaxed_gpu(&scope.state().failed) != 0)) return NotifyOutcome::kFailed;
  if (thread < scope.domain.num_ranks) {
    const NotifyOutcome outcome = wait_for_announcement(scope, thread, start.hash);
    if (outcome != NotifyOutcome::kNone) atomicMax(trouble, static_cast<std::uint32_t>(outcome));
  }
  __syncthreads();
  return *trouble == 0 ? NotifyOutcome::kRowsFit : static_cast<NotifyOutcome>(*trouble);
}

// Where a place of `peer` is mapped here, or null after reporting that it is not.
__device__ __forceinline__ char* place_address(const WaitScope& scope, char* const* segment_bases, int peer,
                                               const layout::Place& place) {
  const bool known = place.segment >= 0 && place.segment < layout::kMaxSegments;
  char* base = known ? segment_bases[peer * layout::kMaxSegments + place.segment] : nullptr;
  if (base != nullptr) return base + place.offset;
  ptx::st_relaxed_gpu(&scope.state().failed, 1u);
  report_error(scope, layout::KernelErrorKind::kUnknownSegment, layout::WaitPhase::kNone, peer,
               static_cast<std::uint64_t>(layout::kMaxSegments), static_cast<std::uint64_t>(place.segment),
               [](layout::ErrorRecord&) {});
  return nullptr;
}

// Waits for a load of the copy engine which is not there at the first look; apart, so that the code of the loops around
// it stays short. False: the block must leave.
__device__ __noinline__ inline bool wait_longer_for_load(const WaitScope& scope, std::uint64_t* barrier,
                                                         std::uint32_t parity) {
  std::uint64_t seen;
  return wait_until(
      scope, layout::WaitPhase::kRowLoad, scope.domain.rank, 1,
      [&] { return std::uint64_t{ptx::mbarrier_try_wait_acquire_cta(barrier, parity)}; },
      [](std::uint64_t complete) { return complete != 0; }, &seen);
}

// The units of work that warps take: tokens, or, where there are few of them, parts of their rows. Made by the host.
struct Units {
  std::int32_t num_tokens = 0, count = 0;
  int part_shift = 0;  // a token is 1 << part_shift units
  int num_chunks = 1;  // of a row

  Units() = default;
  Units(std::int64_t num_tokens_, int num_chunks_, int num_warps)
      : num_tokens(static_cast<std::int32_t>(num_tokens_)), num_chunks(num_chunks_) {
    while (2 << part_shift <= num_chunks && num_tokens_ << (part_shift + 1) <= num_warps) ++part_shift;
    count = num_tokens << part_shift;
  }
};

// One of them. Past the last: a token past the last.
struct Unit {
  std::int32_t token;
  int first_chunk, end_chunk;

  __device__ Unit(const Units& units, std::int32_t index) {
    const int part = index & ((1 << units.part_shift) - 1);
    token = index >> units.part_shift;
    first_chunk = units.num_chunks * part >> units.part_shift;
    end_chunk = token < units.num_tokens ? units.num_chunks * (part + 1) >> units.part_shift : first_chunk;
  }
  __device__ bool is_first_part() const { return first_chunk == 0; }
  __device__ int num_chunks() const { return end_chunk - first_chunk; }
};

// Units go to warps one by one, as they ask: SMs get unequal shares of a link. Each warp's first two follow from its
// number, so that no answer is waited for at the start. A warp that has been sent past the last unit asks no more, so
// whatever was asked has been received when a warp is through.
class Tickets {
 public:
  __device__ Tickets(const WaitScope& scope, std::int32_t num_units, int num_warps)
      : counter_(&scope.domain.words.row_state(scope.mine()).next_unit), num_units_(num_units), num_warps_(num_warps) {}

  __device__ std::int32_t first() const { return number_of_warp(); }
  __device__ std::int32_t second() { return last_ = min(num_units_, number_of_warp() + all_warps()); }

  // The whole warp; the answer is not waited for before receive(), which follows.
  __device__ void ask() {
    if (last_ < num_units_ && threadIdx.x % 32 == 0) asked_ = ptx::atom_add_relaxed_gpu(counter_, 1);
  }
  __device__ std::int32_t receive() {
    if (last_ < num_units_) {
      const std::uint64_t unit = static_cast<std::uint64_t>(2 * all_warps()) + __shfl_sync(0xffffffffu, asked_, 0);
      last_ = static_cast<std::int32_t>(min(unit, static_cast<std::uint64_t>(num_units_)));
    }
    return last_;
  }

 private:
  __device__ static std::int32_t number_of_warp() {
    return static_cast<std::int32_t>(threadIdx.x / 32 * gridDim.x + blockIdx.x);
  }
  __device__ int all_warps() const { return num_warps_ * static_cast<int>(gridDim.x); }

  std::uint64_t* counter_;
  std::uint64_t asked_ = 0;
  std::int32_t num_units_, num_warps_, last_ = 0;
};

// Every block comes here when it is through, and tells every peer that all its threads have done is in the past; with
// `alone`, this rank's first block only.
__device__ __forceinline__ void post_block_done(const WaitScope& scope, bool alone) {
  const DeviceDomain& domain = scope.domain;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread >= domain.num_ranks || (alone && thread != domain.rank)) return;
  ptx::st_release_sys(domain.words.blocks_done(domain.workspaces[thread], domain.rank) + blockIdx.x,
                      layout::tag_count(scope.epoch, gridDim.x));
}

// The first block then waits for all blocks of every rank (`alone`: of its own), clears the counter for the next
// launch, and ends the call. False in all threads: a wait has failed.
__device__ __forceinline__ bool wait_for_blocks(const WaitScope& scope, layout::WaitPhase phase, bool alone) {
  const DeviceDomain& domain = scope.domain;
  const int lane = static_cast<int>(threadIdx.x % 32), num_warps = static_cast<int>(blockDim.x / 32);
  bool ok = true;
  for (int src = static_cast<int>(threadIdx.x / 32); src < domain.num_ranks; src += num_warps) {
    if (alone && src != domain.rank) continue;
    const std::uint64_t* words = domain.words.blocks_done(scope.mine(), src);
    int num_blocks = 0;  // every word says how many there are
    for (int block = lane; ok && block < max(num_blocks, 32); block += 32) {
      std::uint64_t word;
      ok = wait_for_tag(
          scope, phase, src,
          [&] {
            const std::uint64_t first = ptx::ld_relaxed_sys(words), own = ptx::ld_acquire_sys(words + block);
            const bool is_none = layout::has_tag(first, scope.epoch) && layout::tagged_count(first) <= block;
            return is_none ? first : own;
          },
          &word);
      num_blocks = static_cast<int>(layout::tagged_count(word));
    }
  }
  ok = __syncthreads_and(ok);
  if (ok && threadIdx.x == 0) scope.domain.words.row_state(scope.mine()).next_unit = 0;
  return ok;
}

}  // namespace deep_moe::kernels
