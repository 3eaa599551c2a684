#include <algorithm>
#include <cstring>

#include "cpu/protocol.hpp"
#include "cpu/route.hpp"

namespace deep_moe::cpu {
namespace {

template <typename Id>
Route route_typed(const TensorView& topk_idx, const layout::ExpertBlocks& blocks, std::int32_t* send_index,
                  bool* is_token_in_rank) {
  const std::int64_t num_tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
  const int num_ranks = blocks.num_ranks;
  Route route{std::vector<std::int32_t>(num_ranks, 0), std::vector<std::int32_t>(blocks.num_experts, 0)};
  std::fill_n(send_index, num_tokens * num_ranks, -1);
  std::memset(is_token_in_rank, 0, static_cast<std::size_t>(num_tokens * num_ranks));
  std::vector<int> rank_of(static_cast<std::size_t>(blocks.num_experts));
  for (int expert = 0; expert < blocks.num_experts; ++expert) rank_of[expert] = blocks.rank_of(expert);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Id* ids = topk_idx.as<Id>() + token * topk_idx.stride[0];
    for (std::int64_t k = 0; k < topk; ++k) {
      if (ids[k] < 0) continue;
      ++route.expert_counts[ids[k]];
      const int rank = rank_of[ids[k]];
      std::int32_t& index = send_index[token * num_ranks + rank];
      if (index >= 0) continue;
      index = route.rank_counts[rank]++;
      is_token_in_rank[token * num_ranks + rank] = true;
    }
  }
  return route;
}

}  // namespace

Route route_tokens(const TensorView& topk_idx, const layout::ExpertBlocks& blocks, std::int32_t* send_index,
                   bool* is_token_in_rank) {
  return topk_idx.dtype == DType::kInt64 ? route_typed<std::int64_t>(topk_idx, blocks, send_index, is_token_in_rank)
                                         : route_typed<std::int32_t>(topk_idx, blocks, send_index, is_token_in_rank);
}

Route route_tokens(const TensorView& is_token_in_rank_in, const TensorView& num_tokens_per_expert, int num_ranks,
                   std::int32_t* send_index, bool* is_token_in_rank) {
  const std::int64_t num_tokens = is_token_in_rank_in.shape[0];
  const std::int32_t* counts = num_tokens_per_expert.as<std::int32_t>();
  Route route{std::vector<std::int32_t>(num_ranks, 0),
              std::vector<std::int32_t>(counts, counts + num_tokens_per_expert.numel())};
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const bool* wanted = is_token_in_rank_in.as<bool>() + token * is_token_in_rank_in.stride[0];
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::int64_t at = token * num_ranks + rank;
      is_token_in_rank[at] = wanted[rank];
      send_index[at] = wanted[rank] ? route.rank_counts[rank]++ : -1;
    }
  }
  return route;
}

std::vector<std::int64_t> route_nodes(const Topology& topology, int rank, std::int64_t num_tokens,
                                      const std::int32_t* send_index, std::int32_t* send_rdma_index) {
  const int num_nodes = topology.num_nodes(), num_local_ranks = topology.num_local_ranks();
  std::vector<std::int64_t> rows(static_cast<std::size_t>(num_nodes), 0);
  for (std::int64_t token = 0; token < num_tokens; ++token, send_index += num_nodes * num_local_ranks) {
    for (int node = 0; node < num_nodes; ++node) {
      bool goes = false;
      for (int local = 0; local < num_local_ranks; ++local)
        goes = goes || send_index[topology.rank_at(node, local)] >= 0;
      goes = goes && node != topology.node_of(rank);
      *send_rdma_index++ = goes ? static_cast<std::int32_t>(rows[static_cast<std::size_t>(node)]++) : -1;
    }
  }
  return rows;
}

LayoutResult dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts, const Topology& topology) {
  const int num_nodes = topology.num_nodes(), num_ranks = num_nodes * topology.num_local_ranks();
  const layout::ExpertBlocks blocks(static_cast<int>(num_experts), num_ranks);
  const std::int64_t num_tokens = topk_idx.shape[0];
  LayoutResult result;
  result.num_tokens_per_rank = make_host_tensor(DType::kInt32, {num_ranks});
  result.num_tokens_per_expert = make_host_tensor(DType::kInt32, {num_experts});
  result.is_token_in_rank = make_host_tensor(DType::kBool, {num_tokens, num_ranks});
  std::vector<std::int32_t> send_index(static_cast<std::size_t>(num_tokens * num_ranks));
  const Route route = route_tokens(topk_idx, blocks, send_index.data(), result.is_token_in_rank.as<bool>());
  std::copy(route.rank_counts.begin(), route.rank_counts.end(), result.num_tokens_per_rank.as<std::int32_t>());
  std::copy(route.expert_counts.begin(), route.expert_counts.end(), result.num_tokens_per_expert.as<std::int32_t>());
  if (num_nodes == 1) return result;
  result.num_tokens_per_rdma_rank = make_host_tensor(DType::kInt32, {num_nodes});
  std::int32_t* tokens = result.num_tokens_per_rdma_rank.as<std::int32_t>();
  std::fill_n(tokens, num_nodes, 0);
  std::vector<std::int64_t> last(static_cast<std::size_t>(num_nodes), -1);  // token that went to each node
  for (std::int64_t at = 0; at < num_tokens * num_ranks; ++at) {
    const int node = topology.node_of(static_cast<int>(at % num_ranks));
    if (send_index[static_cast<std::size_t>(at)] < 0 || last[static_cast<std::size_t>(node)] == at / num_ranks)
      continue;
    last[static_cast<std::size_t>(node)] = at / num_ranks;
    ++tokens[node];
  }
  return result;
}

}  // namespace deep_moe::cpu
