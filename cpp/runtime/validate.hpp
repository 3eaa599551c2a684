// Checks of what users pass. Each throws ArgumentError (Python: ValueError) or ArgumentTypeError (TypeError) that names
// the argument, what came and what is allowed, before anything is exchanged.
#pragma once

#include <cstdint>
#include <string>

#include <deep_moe/buffer.hpp>

#include "layout/words.hpp"

namespace deep_moe {

inline constexpr std::int64_t kRowAlignment = 16;  // bytes
inline constexpr std::int64_t kMaxRowBytes = std::int64_t{1} << 28;
inline constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;  // their indices are 32-bit

[[noreturn]] void throw_value(const std::string& argument, const std::string& came, const std::string& allowed);
[[noreturn]] void throw_type(const std::string& argument, const std::string& came, const std::string& allowed);

// [T, K] i32 or i64, contiguous inside a row, K <= 64.
void check_topk_idx_shape(const TensorView& topk_idx, std::int64_t num_experts);
// Every id is -1 or in [0, num_experts): names the first other one and its row.
void check_topk_ids(const TensorView& topk_idx, std::int64_t num_experts);
void check_num_experts(std::int64_t num_experts);
// [T, K] f32 like topk_idx.
void check_topk_weights(const TensorView& topk_weights, const TensorView& topk_idx);
// [T, H], rows of a multiple of 16 bytes, contiguous inside a row; scales [T] or [T, S].
void check_payload(const Payload& x, std::int64_t num_tokens);
// out [T, H]: its rows must not share memory with each other, nor with other rows but those of the very same tensor.
void check_output(const TensorView& out);
void check_no_overlap(const char* name, const TensorView& view, const TensorView& out, bool same_allowed);
bool is_sum_dtype(DType dtype);  // bf16, fp16, fp32
bool is_expert_major(const DispatchHandle& handle);
// Rows by expert of an expert-major dispatch with num_worst_tokens, whatever arrives: each entry of each row has one,
// and each group its padding.
std::int64_t most_expert_rows(const DispatchArgs& args, std::int64_t num_local_experts);

// `read_ids`: also check every id, which reads topk_idx on the host.
void validate(const DispatchArgs& args, int num_ranks, bool read_ids = true, int num_nodes = 1);
void validate(const CombineArgs& args, int num_ranks, int num_nodes = 1);
layout::CallSignature signature(const DispatchArgs& args);
layout::CallSignature signature(const CombineArgs& args);

}  // namespace deep_moe
