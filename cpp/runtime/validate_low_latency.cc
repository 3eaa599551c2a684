#include "runtime/validate_low_latency.hpp"

#include <algorithm>
#include <cstring>

#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "layout/hash.hpp"
#include "layout/notify_words.hpp"
#include "layout/rows.hpp"
#include "runtime/validate.hpp"

namespace deep_moe {
namespace {

std::string num(std::int64_t value) { return std::to_string(value); }

void check_vector(const char* name, const TensorView& view, DType dtype, std::int64_t size) {
  if (!view.defined()) return;
  const std::string allowed = std::string(dtype_name(dtype)) + " [" + num(size) + "], contiguous";
  if (view.dtype != dtype) throw_type(name, view.describe(), allowed);
  if (view.num_dims != 1 || view.shape[0] != size || !view.is_contiguous()) throw_value(name, view.describe(), allowed);
}

void check_cap(std::int64_t max_tokens, std::int64_t num_tokens, std::int64_t max_local_experts, int num_ranks) {
  const char* const name = "num_max_dispatch_tokens_per_rank";
  if (max_tokens < 1 || max_tokens > layout::kMaxLowLatencyTokens)
    throw_value(name, num(max_tokens), "1 to " + num(layout::kMaxLowLatencyTokens));
  if (num_tokens > max_tokens) throw_value(name, num(max_tokens), "at least the " + num(num_tokens) + " tokens of x");
  const std::int64_t most = INT32_MAX / (max_local_experts * num_ranks);
  if (max_tokens > most)
    throw_value(
        name, num(max_tokens),
        "at most " + num(most) + " with " + num(max_local_experts) + " local experts and " + num(num_ranks) + " ranks");
}

void check_cast(const LowLatencyDispatchArgs& args) {
  const TensorView& data = args.x.data;
  if (args.x.scales.defined()) {
    if (args.use_ue8m0 || args.round_scale)
      throw_value("x", "data with scales together with round_scale or use_ue8m0", "a tensor without scales to be cast");
    return;
  }
  if (!is_sum_dtype(data.dtype))
    throw_type("x", data.describe(), "bfloat16, float16 or float32, or a tuple (data, scales) of any types");
  if (!args.use_fp8) {
    if (args.use_ue8m0 || args.round_scale)
      throw_value("use_fp8", "False together with round_scale or use_ue8m0", "True");
    return;
  }
  const std::int64_t multiple = args.use_ue8m0 ? 4 * kFp8Block : kFp8Block;
  if (data.shape[1] % multiple != 0)
    throw_value("x", "hidden=" + num(data.shape[1]),
                "a multiple of " + num(multiple) + (args.use_ue8m0 ? " with use_ue8m0" : " with use_fp8"));
}

void check_handle_tensor(const char* name, const TensorView& view, DType dtype,
                         std::initializer_list<std::int64_t> shape) {
  const TensorView expected = TensorView::contiguous(nullptr, dtype, shape);
  bool same = view.dtype == dtype && view.num_dims == expected.num_dims && view.is_contiguous();
  for (int i = 0; same && i < view.num_dims; ++i) same = view.shape[i] == expected.shape[i];
  if (!same)
    throw_value(std::string("handle.") + name, view.describe(),
                expected.describe() + ", as low_latency_dispatch made it");
}

void check_handle(const LowLatencyHandle& handle, int rank, int num_ranks, bool on_host) {
  check_handle_tensor("meta", handle.meta, DType::kInt64, {layout::kLowLatencyMetaSize});
  const std::int64_t* const meta = handle.meta.as<std::int64_t>();
  const std::int64_t ranks = meta[layout::kLowMetaNumRanks], tokens = meta[layout::kLowMetaMaxTokens];
  const std::int64_t topk = meta[layout::kLowMetaTopk];
  if (ranks != num_ranks)
    throw_value("handle", "a handle of " + num(ranks) + " ranks", "one of this Buffer's " + num(num_ranks));
  if (meta[layout::kLowMetaComplete] != 1)
    throw_value("handle", "one whose rows have not arrived", "the hook of low_latency_dispatch to be called first");
  const layout::ExpertBlocks blocks(static_cast<int>(meta[layout::kLowMetaNumExperts]), num_ranks);
  const std::int64_t local = blocks.num_local_experts(rank);
  check_handle_tensor("src_info", handle.src_info, DType::kInt32, {local, ranks * tokens});
  check_handle_tensor("layout_range", handle.layout_range, DType::kInt64, {local, ranks});
  check_handle_tensor("recv_pos", handle.recv_pos, DType::kInt32, {ranks, tokens + (on_host ? 0 : 1), topk});
  if (meta[layout::kLowMetaHasWeights] != 0)
    check_handle_tensor("recv_weights", handle.recv_weights, DType::kFloat32, {ranks, tokens, topk});
}

void check_combine_x(const LowLatencyCombineArgs& args, std::int64_t local, std::int64_t rows) {
  const TensorView& x = args.x;
  const std::string allowed =
      "bfloat16, float16 or float32 [" + num(local) + ", " + num(rows) + ", hidden]: the experts' outputs";
  if (!x.defined() || !is_sum_dtype(x.dtype)) throw_type("x", x.describe(), allowed);
  if (x.num_dims != 3 || x.shape[0] != local || x.shape[1] != rows) throw_value("x", x.describe(), allowed);
  const std::int64_t row_bytes = x.shape[2] * static_cast<std::int64_t>(dtype_bytes(x.dtype));
  if (row_bytes == 0 || row_bytes % kRowAlignment != 0)
    throw_value("x", "rows of " + num(row_bytes) + " bytes",
                "a multiple of " + num(kRowAlignment) + " bytes: pad hidden");
  if (x.shape[2] > 1 && x.stride[2] != 1)
    throw_value("x", "a tensor whose last dimension is strided", "one that is contiguous there: call .contiguous()");
  if (args.use_logfmt && x.shape[2] % kLogfmtBlock != 0)
    throw_value("x", "hidden=" + num(x.shape[2]), "a multiple of " + num(kLogfmtBlock) + " with use_logfmt");
}

std::int64_t meta_or_zero(const LowLatencyHandle& handle, int which) {
  const bool readable = handle.meta.dtype == DType::kInt64 && handle.meta.numel() == layout::kLowLatencyMetaSize &&
                        handle.meta.is_contiguous();
  return readable ? handle.meta.as<std::int64_t>()[which] : 0;
}

}  // namespace

void check_in_flight(int num_in_flight, const char* call) {
  if (num_in_flight < kMaxInFlight) return;
  throw Error(
      std::string(call) + ": " + num(kMaxInFlight) +
      " low-latency calls are in flight (their hooks have not been called), which is the most: call a hook first");
}

void validate(const LowLatencyDispatchArgs& args, int rank, int num_ranks, bool on_host) {
  check_topk_idx_shape(args.topk_idx, args.num_experts);
  check_topk_weights(args.topk_weights, args.topk_idx);
  check_payload(args.x, args.topk_idx.shape[0]);
  check_cast(args);
  const layout::ExpertBlocks blocks(static_cast<int>(args.num_experts), num_ranks);
  check_cap(args.num_max_dispatch_tokens_per_rank, args.topk_idx.shape[0], blocks.max_local_experts(), num_ranks);
  check_vector("cumulative_local_expert_recv_stats", args.cumulative_local_expert_recv_stats, DType::kInt32,
               blocks.num_local_experts(rank));
  check_vector("dispatch_wait_recv_cost_stats", args.wait_recv_cost_stats, DType::kInt64, num_ranks);
  if (on_host) check_topk_ids(args.topk_idx, args.num_experts);
}

void validate(const LowLatencyCombineArgs& args, int rank, int num_ranks, bool on_host) {
  check_handle(args.handle, rank, num_ranks, on_host);
  const std::int64_t* const meta = args.handle.meta.as<std::int64_t>();
  const std::int64_t num_experts = meta[layout::kLowMetaNumExperts], num_tokens = meta[layout::kLowMetaNumTokens];
  check_combine_x(args, args.handle.src_info.shape[0], args.handle.src_info.shape[1]);
  check_topk_idx_shape(args.topk_idx, num_experts);
  if (args.topk_idx.shape[0] != num_tokens || args.topk_idx.shape[1] != meta[layout::kLowMetaTopk])
    throw_value("topk_idx", args.topk_idx.describe(),
                "[" + num(num_tokens) + ", " + num(meta[layout::kLowMetaTopk]) + "], as given to low_latency_dispatch");
  if (on_host && hash_ids(args.topk_idx) != meta[layout::kLowMetaIdsHash])
    throw_value("topk_idx", "other expert ids", "those given to low_latency_dispatch");
  if (!args.topk_weights.defined())
    throw_value("topk_weights", "none", "float32 [" + num(num_tokens) + ", " + num(args.topk_idx.shape[1]) + "]");
  check_topk_weights(args.topk_weights, args.topk_idx);
  if (on_host && meta[layout::kLowMetaHasWeights] != 0 &&
      hash_weights(args.topk_weights) != meta[layout::kLowMetaWeightsHash])
    throw_value("topk_weights", "other weights", "those given to low_latency_dispatch, which the experts' ranks have");
  const TensorView& out = args.out;
  if (out.defined()) {
    const std::string allowed =
        std::string(dtype_name(args.x.dtype)) + " [" + num(num_tokens) + ", " + num(args.x.shape[2]) + "]";
    if (out.dtype != args.x.dtype) throw_type("out", out.describe(), allowed);
    if (out.num_dims != 2 || out.shape[0] != num_tokens || out.shape[1] != args.x.shape[2])
      throw_value("out", out.describe(), allowed);
    if (out.numel() > 0 && out.stride[1] != 1)
      throw_value("out", "a tensor whose last dimension is strided", "one that is contiguous there");
    check_output(out);
  }
  check_vector("combine_wait_recv_cost_stats", args.wait_recv_cost_stats, DType::kInt64, num_ranks);
}

layout::CallSignature signature(const LowLatencyDispatchArgs& args) {
  layout::CallSignature signature;
  signature.kind = static_cast<std::uint32_t>(layout::CallKind::kLowLatencyDispatch);
  const TensorView &data = args.x.data, &scales = args.x.scales;
  const std::int64_t hidden = data.num_dims == 2 ? data.shape[1] : 0;
  signature.x_dtype = static_cast<std::uint32_t>(data.dtype);
  signature.row_bytes = hidden * static_cast<std::int64_t>(dtype_bytes(data.dtype));
  signature.num_experts = args.num_experts;
  signature.topk = args.topk_idx.num_dims == 2 ? args.topk_idx.shape[1] : 0;
  signature.max_tokens = args.num_max_dispatch_tokens_per_rank;
  if (args.topk_weights.defined()) signature.flags |= kFlagWeights;
  if (scales.defined()) {
    const std::int64_t per_row = scales.num_dims == 2 ? scales.shape[1] : 1;
    signature.scale_bytes = per_row * static_cast<std::int64_t>(dtype_bytes(scales.dtype));
    signature.flags |= kFlagOpaque | static_cast<std::int64_t>(scales.dtype) << kFlagScaleTypeShift;
  } else if (args.use_fp8) {
    signature.row_bytes = hidden;
    signature.scale_bytes = hidden / kFp8Block * (args.use_ue8m0 ? 1 : static_cast<std::int64_t>(sizeof(float)));
    signature.flags |= kFlagFp8 | (args.use_ue8m0 ? kFlagUe8m0 | kFlagRoundScale : 0);
    if (args.round_scale) signature.flags |= kFlagRoundScale;
  }
  return signature;
}

layout::CallSignature signature(const LowLatencyCombineArgs& args) {
  layout::CallSignature signature;
  signature.kind = static_cast<std::uint32_t>(layout::CallKind::kLowLatencyCombine);
  const std::int64_t hidden = args.x.num_dims == 3 ? args.x.shape[2] : 0;
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  signature.x_dtype = static_cast<std::uint32_t>(args.x.dtype);
  signature.row_bytes = args.use_logfmt ? hidden / kLogfmtBlock * kLogfmtBlockBytes : hidden * item;
  signature.num_experts = meta_or_zero(args.handle, layout::kLowMetaNumExperts);
  signature.topk = meta_or_zero(args.handle, layout::kLowMetaTopk);
  signature.max_tokens = meta_or_zero(args.handle, layout::kLowMetaMaxTokens);
  signature.handle_hash = static_cast<std::uint64_t>(meta_or_zero(args.handle, layout::kLowMetaHash));
  const bool has_weights = meta_or_zero(args.handle, layout::kLowMetaHasWeights) != 0;
  if (has_weights) signature.flags |= kFlagWeights;
  if (!has_weights && args.return_recv_hook) signature.flags |= kFlagByExpert;
  if (args.use_logfmt) signature.flags |= kFlagLogfmt;
  return signature;
}

LowLatencyHandle low_latency_handle(const TensorView& words, const TensorView& meta, int rank) {
  check_handle_tensor("meta", meta, DType::kInt64, {layout::kLowLatencyMetaSize});
  const std::int64_t* const values = meta.as<std::int64_t>();
  const std::int64_t ranks = values[layout::kLowMetaNumRanks], tokens = values[layout::kLowMetaMaxTokens];
  const std::int64_t topk = values[layout::kLowMetaTopk], experts = values[layout::kLowMetaNumExperts];
  const bool has_weights = values[layout::kLowMetaHasWeights] != 0;
  if (ranks <= rank || ranks > layout::kMaxKernelRanks || tokens < 1 || tokens > layout::kMaxLowLatencyTokens ||
      topk < 1 || topk > layout::kMaxTopk || experts < 1 || experts > layout::kMaxExperts)
    throw_value("handle.meta", "numbers that no call has", "what low_latency_dispatch returned");
  const std::int64_t local =
      layout::ExpertBlocks(static_cast<int>(experts), static_cast<int>(ranks)).num_local_experts(rank);
  const layout::LowLatencyHandleWords at(local, ranks, tokens, topk, has_weights);
  check_handle_tensor("words", words, DType::kUInt8, {static_cast<std::int64_t>(at.total)});
  const auto part = [&](std::size_t offset, DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view = TensorView::contiguous(words.as<char>() + offset, dtype, shape);
    view.device = words.device;
    return view;
  };
  LowLatencyHandle handle;
  handle.src_info = part(at.src_info, DType::kInt32, {local, ranks * tokens});
  handle.layout_range = part(at.layout_range, DType::kInt64, {local, ranks});
  handle.recv_pos = part(at.recv_pos, DType::kInt32, {ranks, tokens + 1, topk});
  handle.recv_weights = has_weights ? part(at.recv_weights, DType::kFloat32, {ranks, tokens, topk})
                                    : part(at.total, DType::kFloat32, {0});
  handle.meta = meta;
  return handle;
}

std::int64_t hash_ids(const TensorView& topk_idx) {
  std::uint64_t hash = layout::kFnvStart;
  for (std::int64_t token = 0; token < topk_idx.shape[0]; ++token) {
    for (std::int64_t k = 0; k < topk_idx.shape[1]; ++k) {
      const std::int64_t at = token * topk_idx.stride[0] + k;
      const std::int64_t id =
          topk_idx.dtype == DType::kInt64 ? topk_idx.as<std::int64_t>()[at] : topk_idx.as<std::int32_t>()[at];
      hash = layout::fnv_step(hash, static_cast<std::uint64_t>(id));
    }
  }
  return static_cast<std::int64_t>(hash);
}

std::int64_t hash_weights(const TensorView& topk_weights) {
  std::uint64_t hash = layout::kFnvStart;
  for (std::int64_t token = 0; token < topk_weights.shape[0]; ++token) {
    for (std::int64_t k = 0; k < topk_weights.shape[1]; ++k) {
      std::uint32_t bits;
      std::memcpy(&bits, topk_weights.as<float>() + token * topk_weights.stride[0] + k, sizeof bits);
      hash = layout::fnv_step(hash, bits);
    }
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace deep_moe
