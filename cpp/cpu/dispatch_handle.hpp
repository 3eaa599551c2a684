// The small tensors of a dispatch handle, in one allocation.
#pragma once

#include <cstdint>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "runtime/topology.hpp"

namespace deep_moe::cpu {

class DispatchHandleBuilder {
 public:
  void allocate(std::int64_t num_tokens, const Topology& topology);
  std::int32_t* send_index() const { return send_index_; }                                      // [T, R]
  bool* is_token_in_rank() const { return is_token_in_rank_; }                                  // [T, R]
  std::int32_t* send_rdma_index() const { return handle_.send_rdma_index.as<std::int32_t>(); }  // [T, N], N > 1
  // Between nodes, once the counts are known: rows_in [N] from each peer. Gives send_nvl_index [F, L].
  std::int32_t* allocate_rows_in(const std::vector<std::int64_t>& rows_in);

  struct Numbers {
    std::int64_t num_recv, num_arrived, num_experts, topk;
    std::uint64_t epoch;
  };
  // `counts` [R, R] by (source, destination).
  OwnedDispatchHandle finish(const Numbers& numbers, const std::vector<std::int64_t>& counts, Tensor recv_src_idx);

 private:
  OwnedDispatchHandle handle_;
  std::int64_t num_tokens_ = 0;
  int num_ranks_ = 0, num_nodes_ = 1, num_local_ranks_ = 1;
  std::int64_t* meta_ = nullptr;
  std::int32_t* prefix_ = nullptr;
  std::int32_t* send_index_ = nullptr;
  bool* is_token_in_rank_ = nullptr;
};

}  // namespace deep_moe::cpu
