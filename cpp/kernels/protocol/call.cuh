// What the launches that move rows have in common: how their blocks begin a call, share out tokens, and end together.
#pragma once

#include <cstdint>

#include "kernels/protocol/announce.cuh"

namespace deep_moe::kernels {

// Begins a call that no notify precedes. Every block waits for every peer; the first one announces. The same result in
// all threads of a block. kRowsFit: go on. kFailed: leave at once. Anything else: no rows, but end the call.
__device__ __forceinline__ layout::NotifyOutcome open_call(const WaitScope& scope, const CallStart& start,
                                                           std::int64_t num_tokens, std::uint32_t* trouble) {
  using layout::NotifyOutcome;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) *trouble = 0;
  if (__syncthreads_or(ptx::ld_relaxed_gpu(&scope.state().failed) != 0)) return NotifyOutcome::kFailed;
  if (thread < scope.domain.num_ranks) {
    if (blockIdx.x == 0)
      announce(scope, thread, start.signature, start.hash, num_tokens, start.place, start.weight_place);
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

// Tokens go to warps one by one, as they ask: SMs get unequal shares of a link. Each warp's first is its own number. A
// warp that has been sent past the last token asks no more, so whatever was asked has been received when a warp is
// through.
class Tickets {
 public:
  __device__ Tickets(const WaitScope& scope, std::int64_t num_tokens)
      : counter_(&scope.domain.words.row_state(scope.mine()).next_token),
        num_tokens_(num_tokens),
        num_warps_(static_cast<std::int64_t>(blockDim.x / 32) * gridDim.x),
        last_(first_of_warp()) {}

  __device__ static std::int64_t first_of_warp() {
    return static_cast<std::int64_t>(threadIdx.x / 32) * gridDim.x + blockIdx.x;
  }

  __device__ std::int64_t first() const { return last_; }
  // The whole warp; the answer is not waited for before receive(), which follows.
  __device__ void ask() {
    if (last_ < num_tokens_ && threadIdx.x % 32 == 0) asked_ = ptx::atom_add_relaxed_gpu(counter_, 1);
  }
  __device__ std::int64_t receive() {
    if (last_ < num_tokens_) last_ = num_warps_ + static_cast<std::int64_t>(__shfl_sync(0xffffffffu, asked_, 0));
    return last_;
  }

 private:
  std::uint64_t* counter_;
  std::int64_t num_tokens_, num_warps_, last_;
  std::uint64_t asked_ = 0;
};

// Every block comes here after its last row; true in the last one, for which everything that the others have done is in
// the past. Clears the counters for the next launch.
__device__ __forceinline__ bool last_to_finish(const WaitScope& scope, bool* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    layout::RowState& state = scope.domain.words.row_state(scope.mine());
    ptx::fence_acq_rel_sys();
    *is_last = ptx::atom_add_acq_rel_gpu(&state.done_blocks, 1) == gridDim.x - 1;
    if (*is_last) state.next_token = 0, state.done_blocks = 0;
  }
  __syncthreads();
  return *is_last;
}

}  // namespace deep_moe::kernels
