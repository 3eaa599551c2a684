// How the row calls between nodes begin and end.
#pragma once

#include <cstdint>

#include "kernels/internode/ring.cuh"
#include "kernels/protocol/call.cuh"

namespace deep_moe::kernels::internode {

// The gate (D3): what the notify in front has left. The same result in all threads.
__device__ __forceinline__ bool rows_may_move(const WaitScope& scope) {
  using layout::NotifyOutcome;
  const layout::NotifyState& state = scope.state();
  const std::uint64_t word = ptx::ld_relaxed_gpu(&state.outcome);
  const bool fits = ptx::ld_relaxed_gpu(&state.failed) == 0 && layout::has_tag(word, scope.epoch) &&
                    static_cast<NotifyOutcome>(layout::tagged_count(word)) == NotifyOutcome::kRowsFit;
  return __syncthreads_and(fits);
}

// This rank's tokens for one warp after the other. Each asks for its next one before it begins with the last: the
// least token that is not finished is always one that its warp has begun.
class Tokens {
 public:
  __device__ Tokens(const RailDomain& domain, std::int64_t num_tokens)
      : counter_(&domain.state().next_token), num_tokens_(num_tokens) {
    ask();
  }

  // The whole warp. False: there are no more.
  __device__ bool next(std::int64_t* token) {
    *token = static_cast<std::int64_t>(__shfl_sync(0xffffffffu, asked_, 0));
    if (*token >= num_tokens_) return false;
    ask();
    return true;
  }

 private:
  __device__ void ask() {
    if (lane_id() == 0) asked_ = ptx::atom_add_relaxed_gpu(counter_, 1);
  }

  std::uint64_t* counter_;
  const std::int64_t num_tokens_;
  std::uint64_t asked_ = 0;
};

// Of the grid's warps that serve rings, which number this one has.
__device__ __forceinline__ int ring_warp() {
  return static_cast<int>(blockIdx.x * (blockDim.x / 64) + threadIdx.x / 64);
}

// Every block comes here when it is through. The first one waits for all blocks of the node's ranks (D8, C7), and
// counts the call's chunks, by node, as used.
__device__ __forceinline__ void end_rows(const WaitScope& scope, const RailDomain& domain, WaitPhase phase,
                                         const RingCalls& rings) {
  post_block_done(scope, false);
  if (blockIdx.x != 0 || !wait_for_blocks(scope, phase, false)) return;
  const int node = static_cast<int>(threadIdx.x);
  if (node == 0) domain.state().next_token = 0;
  if (node < domain.num_nodes && node != domain.own_node)
    advance_rings(domain, node, rings.out[node].num_chunks(), rings.in[node].num_chunks());
}

}  // namespace deep_moe::kernels::internode
