#include "cpu/dispatch_handle.hpp"

#include <utility>

#include "layout/handle.hpp"
#include "layout/hash.hpp"

namespace deep_moe::cpu {

void DispatchHandleBuilder::allocate(std::int64_t num_tokens, const Topology& topology) {
  num_tokens_ = num_tokens;
  num_nodes_ = topology.num_nodes();
  num_local_ranks_ = topology.num_local_ranks();
  num_ranks_ = num_nodes_ * num_local_ranks_;
  const int num_ranks = num_ranks_;
  const std::int64_t matrix = static_cast<std::int64_t>(num_ranks) * num_ranks, cells = num_tokens * num_ranks;
  const std::int64_t words = layout::kDispatchMetaSize + (matrix + 1) / 2 + (cells + 1) / 2 + (cells + 7) / 8 + 1;
  const Tensor memory = make_host_tensor(DType::kInt64, {words});
  std::int64_t* next = memory.as<std::int64_t>();
  const auto take = [&](DType dtype, std::initializer_list<std::int64_t> shape, std::int64_t num_words) {
    Tensor tensor{TensorView::contiguous(next, dtype, shape), memory.owner};
    next += num_words;
    return tensor;
  };
  handle_.meta = take(DType::kInt64, {layout::kDispatchMetaSize}, layout::kDispatchMetaSize);
  handle_.rank_prefix_matrix = take(DType::kInt32, {num_ranks, num_ranks}, (matrix + 1) / 2);
  handle_.send_index = take(DType::kInt32, {num_tokens, num_ranks}, (cells + 1) / 2);
  handle_.is_token_in_rank = take(DType::kBool, {num_tokens, num_ranks}, 0);
  meta_ = handle_.meta.as<std::int64_t>();
  prefix_ = handle_.rank_prefix_matrix.as<std::int32_t>();
  send_index_ = handle_.send_index.as<std::int32_t>();
  is_token_in_rank_ = handle_.is_token_in_rank.as<bool>();
  if (num_nodes_ > 1) handle_.send_rdma_index = make_host_tensor(DType::kInt32, {num_tokens, num_nodes_});
}

std::int32_t* DispatchHandleBuilder::allocate_rows_in(const std::vector<std::int64_t>& rows_in) {
  handle_.recv_rdma_rank_prefix_sum = make_host_tensor(DType::kInt32, {num_nodes_});
  std::int64_t rows = 0;
  for (int node = 0; node < num_nodes_; ++node) {
    rows += rows_in[static_cast<std::size_t>(node)];
    handle_.recv_rdma_rank_prefix_sum.as<std::int32_t>()[node] = static_cast<std::int32_t>(rows);
  }
  handle_.send_nvl_index = make_host_tensor(DType::kInt32, {rows, num_local_ranks_});
  return handle_.send_nvl_index.as<std::int32_t>();
}

OwnedDispatchHandle DispatchHandleBuilder::finish(const Numbers& numbers, const std::vector<std::int64_t>& counts,
                                                  Tensor recv_src_idx) {
  // The call's epoch tells dispatches apart that have the same counts.
  std::uint64_t hash = layout::kFnvStart ^ static_cast<std::uint64_t>(numbers.num_experts);
  hash = layout::fnv_step(hash, numbers.epoch);
  for (std::int64_t at = 0; at < static_cast<std::int64_t>(counts.size()); ++at) {
    const std::int64_t count = counts[static_cast<std::size_t>(at)];
    prefix_[at] = static_cast<std::int32_t>((at >= num_ranks_ ? prefix_[at - num_ranks_] : 0) + count);
    hash = layout::fnv_step(hash, static_cast<std::uint64_t>(count));
  }
  meta_[layout::kMetaNumTokens] = num_tokens_;
  meta_[layout::kMetaNumRecv] = numbers.num_recv;
  meta_[layout::kMetaNumArrived] = numbers.num_arrived;
  meta_[layout::kMetaNumExperts] = numbers.num_experts;
  meta_[layout::kMetaTopk] = numbers.topk;
  meta_[layout::kMetaNumRanks] = num_ranks_;
  meta_[layout::kMetaHash] = static_cast<std::int64_t>(hash | 1);
  meta_[layout::kMetaNumNodes] = num_nodes_ > 1 ? num_nodes_ : 0;
  meta_[layout::kMetaNumExpertRows] = -1;
  handle_.recv_src_idx = std::move(recv_src_idx);
  return std::move(handle_);
}

}  // namespace deep_moe::cpu
