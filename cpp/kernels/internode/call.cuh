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

// The next of this rank's tokens for the warp, from `num_tokens` on if there is none.
__device__ __forceinline__ std::int64_t next_token(const RailDomain& domain) {
  std::uint64_t token = 0;
  if (lane_id() == 0) token = ptx::atom_add_relaxed_gpu(&domain.state().next_token, 1);
  return static_cast<std::int64_t>(__shfl_sync(0xffffffffu, token, 0));
}

// Of the grid's warps that serve rings, which number this one has.
__device__ __forceinline__ int ring_warp() {
  return static_cast<int>(blockIdx.x * (blockDim.x / 64) + threadIdx.x / 64);
}

// Every block comes here when it is through. The first one waits for all blocks of the node's ranks (D8, C7), and
// counts the call's chunks, by node, as used.
template <typename ChunksOut, typename ChunksIn>
__device__ __forceinline__ void end_rows(const WaitScope& scope, const RailDomain& domain, WaitPhase phase,
                                         ChunksOut chunks_out, ChunksIn chunks_in) {
  post_block_done(scope, false);
  if (blockIdx.x != 0 || !wait_for_blocks(scope, phase, false)) return;
  const int node = static_cast<int>(threadIdx.x);
  if (node == 0) domain.state().next_token = 0;
  if (node < domain.num_nodes && node != domain.own_node)
    advance_rings(domain, node, chunks_out(node), chunks_in(node));
}

}  // namespace deep_moe::kernels::internode
