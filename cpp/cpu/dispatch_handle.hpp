// The small tensors of a dispatch handle, in one allocation.
#pragma once

#include <cstdint>
#include <vector>

#include <deep_moe/buffer.hpp>

namespace deep_moe::cpu {

class DispatchHandleBuilder {
 public:
  void allocate(std::int64_t num_tokens, int num_ranks);
  std::int32_t* send_index() const { return send_index_; }      // [T, R]
  bool* is_token_in_rank() const { return is_token_in_rank_; }  // [T, R]

  struct Numbers {
    std::int64_t num_recv, num_arrived, num_experts, topk;
    std::uint64_t epoch;
  };
  // `counts` [R, R] by (source, destination).
  OwnedDispatchHandle finish(const Numbers& numbers, const std::vector<std::int64_t>& counts, Tensor recv_src_idx);

 private:
  OwnedDispatchHandle handle_;
  std::int64_t num_tokens_ = 0;
  int num_ranks_ = 0;
  std::int64_t* meta_ = nullptr;
  std::int32_t* prefix_ = nullptr;
  std::int32_t* send_index_ = nullptr;
  bool* is_token_in_rank_ = nullptr;
};

}  // namespace deep_moe::cpu
