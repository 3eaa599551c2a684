// Where the tokens of one rank go.
#pragma once

#include <cstdint>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "layout/experts.hpp"
#include "runtime/topology.hpp"

namespace deep_moe::cpu {

// Tensors of one route; each is also part of what dispatch or get_dispatch_layout hands out.
struct Route {
  std::vector<std::int32_t> rank_counts;    // [R] rows for each rank
  std::vector<std::int32_t> expert_counts;  // [E] entries for each expert
};

// Fills send_index [T, R] (row within (this rank, destination), or -1) and is_token_in_rank [T, R] from topk_idx [T,
// K]. Ids must have been checked.
Route route_tokens(const TensorView& topk_idx, const layout::ExpertBlocks& blocks, std::int32_t* send_index,
                   bool* is_token_in_rank);
// The same from a ready-made is_token_in_rank.
Route route_tokens(const TensorView& is_token_in_rank_in, const TensorView& num_tokens_per_expert, int num_ranks,
                   std::int32_t* send_index, bool* is_token_in_rank);

// Fills send_rdma_index [T, N]: which of this rank's rows for that node the token is; -1 where none of the node's ranks
// gets it, and at this rank's own node. Gives the rows for each node [N].
std::vector<std::int64_t> route_nodes(const Topology& topology, int rank, std::int64_t num_tokens,
                                      const std::int32_t* send_index, std::int32_t* send_rdma_index);

// Reads an id of either type.
inline std::int64_t topk_id(const TensorView& topk_idx, std::int64_t token, std::int64_t k) {
  const std::int64_t at = token * topk_idx.stride[0] + k;
  return topk_idx.dtype == DType::kInt64 ? topk_idx.as<std::int64_t>()[at] : topk_idx.as<std::int32_t>()[at];
}

}  // namespace deep_moe::cpu
