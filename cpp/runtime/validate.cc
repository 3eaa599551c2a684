#include "runtime/validate.hpp"

#include <algorithm>

#include "layout/handle.hpp"

namespace deep_moe {
namespace {

std::string num(std::int64_t value) { return std::to_string(value); }

// Bits of CallSignature::flags for high-throughput calls.
constexpr std::int64_t kHasWeights = 1, kWideIds = 2, kFromMatrix = 4;

void check_matrix(const char* name, const TensorView& view, DType dtype, std::int64_t rows, std::int64_t columns) {
  const std::string allowed = std::string(dtype_name(dtype)) + " [" + num(rows) + ", " + num(columns) + "], contiguous";
  if (view.dtype != dtype) throw_type(name, view.describe(), allowed);
  if (view.num_dims != 2 || view.shape[0] != rows || view.shape[1] != columns)
    throw_value(name, view.describe(), allowed);
}

bool readable_meta(const TensorView& meta) {
  return meta.dtype == DType::kInt64 && meta.num_dims == 1 && meta.shape[0] >= layout::kDispatchMetaSize &&
         meta.stride[0] == 1;
}

bool has_dense_rows(const TensorView& view) { return view.numel() == 0 || view.shape[1] == 1 || view.stride[1] == 1; }

// The parts that a handle between nodes has more.
void check_rail_parts(const DispatchHandle& handle, std::int64_t num_tokens, int num_ranks, int num_nodes) {
  check_matrix("handle.send_rdma_index", handle.send_rdma_index, DType::kInt32, num_tokens, num_nodes);
  const TensorView& prefix = handle.recv_rdma_rank_prefix_sum;
  const int num_local_ranks = num_ranks / num_nodes;
  if (handle.send_index.device >= 0) {  // the host does not see what is in them
    check_matrix("handle.recv_rdma_rank_prefix_sum", prefix, DType::kInt32, 2, num_nodes);
    const std::int64_t rows_in = handle.meta.as<std::int64_t>()[handle.meta.shape[0] - 1];
    check_matrix("handle.send_nvl_index", handle.send_nvl_index, DType::kInt32, rows_in, num_local_ranks);
    if (!prefix.is_contiguous() || !handle.send_nvl_index.is_contiguous() || !has_dense_rows(handle.send_rdma_index))
      throw_value("handle", "tensors that are not contiguous", "the handle that dispatch returned");
    return;
  }
  if (prefix.dtype != DType::kInt32 || prefix.num_dims != 1 || prefix.shape[0] != num_nodes)
    throw_value("handle.recv_rdma_rank_prefix_sum", prefix.describe(), "int32 [" + num(num_nodes) + "]");
  const bool contiguous =
      handle.send_rdma_index.is_contiguous() && prefix.is_contiguous() && handle.send_nvl_index.is_contiguous();
  if (!contiguous) throw_value("handle", "tensors that are not contiguous", "the handle that dispatch returned");
  check_matrix("handle.send_nvl_index", handle.send_nvl_index, DType::kInt32, prefix.as<std::int32_t>()[num_nodes - 1],
               num_local_ranks);
}

// The parts that the handle of an expert-major dispatch has more.
void check_expert_parts(const DispatchHandle& handle) {
  const std::int64_t* meta = handle.meta.as<std::int64_t>();
  const std::string allowed = "the handle that dispatch returned, unchanged";
  if (meta[layout::kMetaNumExpertRows] < 0) throw_value("handle", "expert parts of another handle", allowed);
  check_matrix("handle.expert_rows", handle.expert_rows, DType::kInt32, meta[layout::kMetaNumRecv],
               meta[layout::kMetaTopk]);
  const TensorView& offsets = handle.expert_offsets;
  const TensorView& counts = handle.expert_counts;
  if (counts.dtype != DType::kInt32 || counts.num_dims != 1)
    throw_value("handle.expert_counts", counts.describe(), "int32 [num_local_experts]");
  if (offsets.dtype != DType::kInt32 || offsets.num_dims != 1 || offsets.shape[0] != counts.shape[0] + 1)
    throw_value("handle.expert_offsets", offsets.describe(), "int32 [" + num(counts.shape[0] + 1) + "]");
  if (!handle.expert_rows.is_contiguous() || !offsets.is_contiguous() || !counts.is_contiguous())
    throw_value("handle", "tensors that are not contiguous", allowed);
}

void check_handle(const DispatchHandle& handle, int num_ranks, int num_nodes) {
  const std::string allowed = "the handle that dispatch returned, unchanged";
  if (!readable_meta(handle.meta)) throw_value("handle", "meta " + handle.meta.describe(), allowed);
  const std::int64_t* meta = handle.meta.as<std::int64_t>();
  if (meta[layout::kMetaNumRanks] != num_ranks)
    throw_value("handle", "a handle of " + num(meta[layout::kMetaNumRanks]) + " ranks",
                "one of this Buffer's " + num(num_ranks) + " ranks");
  const std::int64_t nodes = std::max<std::int64_t>(1, meta[layout::kMetaNumNodes]);
  if (nodes != num_nodes)
    throw_value("handle", "a handle of " + num(nodes) + " nodes", "one of this Buffer's " + num(num_nodes) + " nodes");
  check_matrix("handle.rank_prefix_matrix", handle.rank_prefix_matrix, DType::kInt32, num_ranks, num_ranks);
  check_matrix("handle.send_index", handle.send_index, DType::kInt32, meta[layout::kMetaNumTokens], num_ranks);
  check_matrix("handle.is_token_in_rank", handle.is_token_in_rank, DType::kBool, meta[layout::kMetaNumTokens],
               num_ranks);
  // On GPUs between nodes, positions for ranks and nodes lie in one matrix.
  const bool strided = num_nodes > 1 && handle.send_index.device >= 0;
  const auto lies_well = [&](const TensorView& view) { return strided ? has_dense_rows(view) : view.is_contiguous(); };
  if (!handle.rank_prefix_matrix.is_contiguous() || !lies_well(handle.send_index) || !handle.meta.is_contiguous() ||
      !lies_well(handle.is_token_in_rank))
    throw_value("handle", "tensors that are not contiguous", allowed);
  if (handle.recv_src_idx.dtype != DType::kInt32 || handle.recv_src_idx.numel() != meta[layout::kMetaNumRecv])
    throw_value("handle.recv_src_idx", handle.recv_src_idx.describe(),
                "int32 [" + num(meta[layout::kMetaNumRecv]) + "]");
  if (num_nodes > 1) check_rail_parts(handle, meta[layout::kMetaNumTokens], num_ranks, num_nodes);
  if (is_expert_major(handle)) check_expert_parts(handle);
}

// [P] f32, contiguous.
void check_row_weights(const char* name, const TensorView& view, std::int64_t num_rows) {
  if (!view.defined()) return;
  const std::string allowed = "float32 [" + num(num_rows) + "], one for each expert-major row";
  if (view.dtype != DType::kFloat32) throw_type(name, view.describe(), allowed);
  if (view.num_dims != 1 || view.shape[0] != num_rows || (num_rows > 1 && view.stride[0] != 1))
    throw_value(name, view.describe(), allowed + ", contiguous");
}

void check_num_tokens(const char* name, std::int64_t num_tokens) {
  if (num_tokens > kMaxRows) throw_value(name, num(num_tokens) + " tokens", "at most " + num(kMaxRows));
}

void check_token_rows(const char* name, const TensorView& view, DType dtype, std::int64_t num_tokens,
                      std::int64_t hidden) {
  if (!view.defined()) return;
  check_matrix(name, view, dtype, num_tokens, hidden);
  if (view.numel() > 0 && hidden > 1 && view.stride[1] != 1)
    throw_value(name, "a tensor whose last dimension is strided", "one that is contiguous there: call .contiguous()");
}

}  // namespace

void throw_value(const std::string& argument, const std::string& came, const std::string& allowed) {
  throw ArgumentError(argument + ": got " + came + ", expected " + allowed);
}
void throw_type(const std::string& argument, const std::string& came, const std::string& allowed) {
  throw ArgumentTypeError(argument + ": got " + came + ", expected " + allowed);
}

void check_output(const TensorView& out) {
  if (!out.defined() || out.shape[0] < 2 || out.stride[0] >= out.shape[1]) return;
  throw_value("out", "rows " + num(out.stride[0]) + " elements apart that overlap", "rows that do not share memory");
}

void check_no_overlap(const char* name, const TensorView& view, const TensorView& out, bool same_allowed) {
  if (!view.defined() || !out.defined() || view.numel() == 0 || out.numel() == 0) return;
  if (same_allowed && view.data == out.data && view.stride[0] == out.stride[0]) return;
  const auto item = static_cast<std::int64_t>(dtype_bytes(out.dtype));
  const auto begin = [](const TensorView& of) { return reinterpret_cast<std::intptr_t>(of.data); };
  const auto end = [&](const TensorView& of) {
    return begin(of) + ((of.shape[0] - 1) * of.stride[0] + of.shape[1]) * item;
  };
  if (end(view) <= begin(out) || end(out) <= begin(view)) return;
  if (view.stride[0] == out.stride[0] && view.stride[0] > 0) {  // two column ranges of one matrix may be disjoint
    const std::int64_t step = view.stride[0] * item;
    const std::int64_t shift = ((begin(out) - begin(view)) % step + step) % step;
    if (shift >= view.shape[1] * item && shift + out.shape[1] * item <= step) return;
  }
  throw_value("out", std::string("a tensor that overlaps ") + name, "memory of its own");
}

bool is_expert_major(const DispatchHandle& handle) { return handle.expert_rows.defined(); }

std::int64_t most_expert_rows(const DispatchArgs& args, std::int64_t num_local_experts) {
  const std::int64_t alignment = args.expert_alignment, entries = args.num_worst_tokens * args.topk_idx.shape[1];
  return (entries + num_local_experts * (alignment - 1) + alignment - 1) / alignment * alignment;
}

bool is_sum_dtype(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
}

void check_num_experts(std::int64_t num_experts) {
  if (num_experts < 1 || num_experts > layout::kMaxExperts)
    throw_value("num_experts", num(num_experts), "1 to " + num(layout::kMaxExperts));
}

void check_topk_idx_shape(const TensorView& topk_idx, std::int64_t num_experts) {
  if (topk_idx.dtype != DType::kInt64 && topk_idx.dtype != DType::kInt32)
    throw_type("topk_idx", topk_idx.describe(), "int64 or int32 [num_tokens, num_topk]");
  if (topk_idx.num_dims != 2) throw_value("topk_idx", topk_idx.describe(), "two dimensions [num_tokens, num_topk]");
  check_num_tokens("topk_idx", topk_idx.shape[0]);
  if (topk_idx.shape[1] < 1 || topk_idx.shape[1] > layout::kMaxTopk)
    throw_value("topk_idx", "num_topk=" + num(topk_idx.shape[1]), "1 to " + num(layout::kMaxTopk));
  if (topk_idx.numel() > 0 && topk_idx.shape[1] > 1 && topk_idx.stride[1] != 1)
    throw_value("topk_idx", "a tensor whose last dimension is strided",
                "one that is contiguous there: call .contiguous()");
  check_num_experts(num_experts);
}

void check_topk_ids(const TensorView& topk_idx, std::int64_t num_experts) {
  const auto check = [&](const auto* ids) {
    for (std::int64_t token = 0; token < topk_idx.shape[0]; ++token, ids += topk_idx.stride[0]) {
      for (std::int64_t k = 0; k < topk_idx.shape[1]; ++k) {
        if (ids[k] >= -1 && ids[k] < num_experts) continue;
        throw_value("topk_idx", "expert id " + num(ids[k]) + " in row " + num(token) + ", column " + num(k),
                    "-1 (none) or 0 to num_experts-1=" + num(num_experts - 1));
      }
    }
  };
  if (topk_idx.dtype == DType::kInt64) {
    check(topk_idx.as<std::int64_t>());
  } else {
    check(topk_idx.as<std::int32_t>());
  }
}

void check_topk_weights(const TensorView& topk_weights, const TensorView& topk_idx) {
  if (!topk_weights.defined()) return;
  check_token_rows("topk_weights", topk_weights, DType::kFloat32, topk_idx.shape[0], topk_idx.shape[1]);
}

void check_payload(const Payload& x, std::int64_t num_tokens) {
  const TensorView& data = x.data;
  if (!data.defined() || data.num_dims != 2) throw_value("x", data.describe(), "two dimensions [num_tokens, hidden]");
  if (data.shape[0] != num_tokens)
    throw_value("x", num(data.shape[0]) + " rows", num(num_tokens) + ", as topk_idx or the handle has");
  const std::int64_t row_bytes = data.shape[1] * static_cast<std::int64_t>(dtype_bytes(data.dtype));
  if (row_bytes == 0 || row_bytes % kRowAlignment != 0)
    throw_value(
        "x", "rows of " + num(row_bytes) + " bytes (hidden=" + num(data.shape[1]) + ", " + dtype_name(data.dtype) + ")",
        "a multiple of " + num(kRowAlignment) + " bytes: pad hidden");
  if (data.shape[0] > 0 && data.shape[1] > 1 && data.stride[1] != 1)
    throw_value("x", "a tensor whose last dimension is strided", "one that is contiguous there: call .contiguous()");
  const TensorView& scales = x.scales;
  if (!scales.defined()) return;
  if (scales.num_dims < 1 || scales.num_dims > 2 || scales.shape[0] != num_tokens)
    throw_value("x[1] (scales)", scales.describe(), "[num_tokens=" + num(num_tokens) + ", num_scales]");
  if (scales.num_dims == 2 && scales.shape[1] < 1)
    throw_value("x[1] (scales)", scales.describe(), "at least one scale a row");
  const bool block_scaled = data.dtype == DType::kFloat8E4M3 && scales.num_dims == 2;
  const std::int64_t blocks = (data.shape[1] + 127) / 128;
  if (block_scaled && scales.dtype == DType::kFloat32 && scales.shape[1] != blocks && scales.shape[1] != 1)
    throw_value("x[1] (scales)", scales.describe(),
                "float32 [" + num(num_tokens) + ", " + num(blocks) + "], one scale for each 128 elements");
  if (block_scaled && scales.dtype == DType::kInt32 && scales.shape[1] != (blocks + 3) / 4)
    throw_value("x[1] (scales)", scales.describe(),
                "int32 [" + num(num_tokens) + ", " + num((blocks + 3) / 4) + "], four packed scales each");
}

void validate(const DispatchArgs& args, int num_ranks, bool read_ids, int num_nodes) {
  std::int64_t num_tokens = 0;
  if (args.expert_alignment < 1 || args.expert_alignment > kMaxRows)
    throw_value("expert_alignment", num(args.expert_alignment), "1 to " + num(kMaxRows));
  if (args.num_worst_tokens < 0 || args.num_worst_tokens > kMaxRows)
    throw_value("num_worst_tokens", num(args.num_worst_tokens), "0 to " + num(kMaxRows));
  if (args.expert_major && args.handle == nullptr && !args.topk_idx.defined())
    throw_value("expert_major", "True without topk_idx", "topk_idx as well: rows are grouped by their ids");
  if (args.handle != nullptr) {
    if (args.topk_idx.defined() || args.topk_weights.defined())
      throw_value("topk_idx", "top-k tensors together with a handle", "none of them in cached mode");
    check_handle(*args.handle, num_ranks, num_nodes);
    num_tokens = args.handle->meta.as<std::int64_t>()[layout::kMetaNumTokens];
    const std::int64_t num_recv = args.handle->meta.as<std::int64_t>()[layout::kMetaNumRecv];
    if (args.expert_major && !is_expert_major(*args.handle))
      throw_value("expert_major", "True with the handle of a dispatch that was not expert-major",
                  "the handle of one that was: the order of rows is the handle's");
    if (args.num_worst_tokens > 0 && args.num_worst_tokens != num_recv)
      throw_value("num_worst_tokens", num(args.num_worst_tokens), "0 or the handle's " + num(num_recv));
  } else if (args.topk_idx.defined()) {
    check_topk_idx_shape(args.topk_idx, args.num_experts);
    check_topk_weights(args.topk_weights, args.topk_idx);
    num_tokens = args.topk_idx.shape[0];
    if (args.expert_major && args.num_worst_tokens > 0) {
      const std::int64_t rows = most_expert_rows(args, (args.num_experts + num_ranks - 1) / num_ranks);
      if (rows > kMaxRows)
        throw_value("num_worst_tokens", num(args.num_worst_tokens) + ", with expert_major " + num(rows) + " rows",
                    "at most " + num(kMaxRows) + " rows");
    }
  } else {
    const TensorView& matrix = args.is_token_in_rank;
    if (!matrix.defined())
      throw_value("topk_idx", "none", "topk_idx with num_experts, or is_token_in_rank with num_tokens_per_expert");
    if (args.topk_weights.defined()) throw_value("topk_weights", "weights without topk_idx", "both or none");
    if (matrix.dtype != DType::kBool) throw_type("is_token_in_rank", matrix.describe(), "bool [num_tokens, num_ranks]");
    if (matrix.num_dims != 2 || matrix.shape[1] != num_ranks ||
        (matrix.numel() > 0 && num_ranks > 1 && matrix.stride[1] != 1))
      throw_value("is_token_in_rank", matrix.describe(), "bool [num_tokens, " + num(num_ranks) + "], contiguous");
    const TensorView& counts = args.num_tokens_per_expert;
    if (counts.dtype != DType::kInt32) throw_type("num_tokens_per_expert", counts.describe(), "int32 [num_experts]");
    if (counts.num_dims != 1 || !counts.is_contiguous())
      throw_value("num_tokens_per_expert", counts.describe(), "int32 [num_experts], contiguous");
    check_num_experts(counts.shape[0]);
    for (std::int64_t expert = 0; read_ids && expert < counts.shape[0]; ++expert) {
      if (counts.as<std::int32_t>()[expert] < 0)
        throw_value("num_tokens_per_expert", num(counts.as<std::int32_t>()[expert]) + " for expert " + num(expert),
                    ">= 0");
    }
    check_num_tokens("is_token_in_rank", matrix.shape[0]);
    num_tokens = matrix.shape[0];
  }
  check_payload(args.x, num_tokens);
  // Last, for it reads every id.
  if (read_ids && args.topk_idx.defined()) check_topk_ids(args.topk_idx, args.num_experts);
}

void validate(const CombineArgs& args, int num_ranks, int num_nodes) {
  if (!args.x.defined() || !is_sum_dtype(args.x.dtype))
    throw_type("x", args.x.describe(), "bfloat16, float16 or float32 [num_recv_tokens, hidden]");
  check_handle(args.handle, num_ranks, num_nodes);
  const std::int64_t* meta = args.handle.meta.as<std::int64_t>();
  Payload x{args.x, {}};
  const bool expert_major = is_expert_major(args.handle);
  const std::int64_t num_rows = meta[expert_major ? layout::kMetaNumExpertRows : layout::kMetaNumRecv];
  if (args.x.num_dims != 2 || args.x.shape[0] != num_rows)
    throw_value("x", args.x.describe(), "[" + num(num_rows) + ", hidden]: the rows that dispatch gave");
  check_payload(x, num_rows);
  if (args.row_weights.defined() && !expert_major)
    throw_value("row_weights", args.row_weights.describe(), "none but with the handle of an expert-major dispatch");
  check_row_weights("row_weights", args.row_weights, num_rows);
  if (expert_major) {
    check_row_weights("topk_weights", args.topk_weights, num_rows);
  } else if (args.topk_weights.defined()) {
    const TensorView& weights = args.topk_weights;
    if (weights.dtype != DType::kFloat32)
      throw_type("topk_weights", weights.describe(), "float32 [num_recv_tokens, num_topk]");
    if (weights.num_dims != 2 || weights.shape[1] < 1 || weights.shape[1] > layout::kMaxTopk)
      throw_value("topk_weights", weights.describe(), "float32 [num_recv_tokens, 1 to " + num(layout::kMaxTopk) + "]");
    check_token_rows("topk_weights", weights, DType::kFloat32, meta[layout::kMetaNumRecv], weights.shape[1]);
  }
  const std::int64_t num_tokens = meta[layout::kMetaNumTokens], hidden = args.x.shape[1];
  check_token_rows("bias", args.bias0, args.x.dtype, num_tokens, hidden);
  check_token_rows("bias", args.bias1, args.x.dtype, num_tokens, hidden);
  check_token_rows("out", args.out, args.x.dtype, num_tokens, hidden);
  check_output(args.out);
  check_no_overlap("x", args.x, args.out, false);
  check_no_overlap("bias", args.bias0, args.out, true);
  check_no_overlap("bias", args.bias1, args.out, true);
}

layout::CallSignature signature(const DispatchArgs& args) {
  layout::CallSignature signature;
  const bool cached = args.handle != nullptr;
  signature.kind = static_cast<std::uint32_t>(cached ? layout::CallKind::kCachedDispatch : layout::CallKind::kDispatch);
  signature.x_dtype = static_cast<std::uint32_t>(args.x.data.dtype);
  signature.row_bytes = args.x.data.shape[1] * static_cast<std::int64_t>(dtype_bytes(args.x.data.dtype));
  const TensorView& scales = args.x.scales;
  if (scales.defined()) {
    const std::int64_t per_row = scales.num_dims == 2 ? scales.shape[1] : 1;
    signature.scale_bytes = per_row * static_cast<std::int64_t>(dtype_bytes(scales.dtype));
  }
  if (cached) {
    if (readable_meta(args.handle->meta))
      signature.handle_hash = static_cast<std::uint64_t>(args.handle->meta.as<std::int64_t>()[layout::kMetaHash]);
    return signature;
  }
  signature.num_experts = args.topk_idx.defined() ? args.num_experts : args.num_tokens_per_expert.numel();
  signature.topk = args.topk_idx.defined() ? args.topk_idx.shape[1] : 0;
  signature.flags = (args.topk_weights.defined() ? kHasWeights : 0) |
                    (args.topk_idx.dtype == DType::kInt64 ? kWideIds : 0) | (args.topk_idx.defined() ? 0 : kFromMatrix);
  return signature;
}

layout::CallSignature signature(const CombineArgs& args) {
  layout::CallSignature signature;
  signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCombine);
  signature.x_dtype = static_cast<std::uint32_t>(args.x.dtype);
  signature.row_bytes = args.x.shape[1] * static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  if (args.topk_weights.defined())
    signature.topk = (is_expert_major(args.handle) ? args.handle.expert_rows : args.topk_weights).shape[1];
  signature.flags = args.topk_weights.defined() ? kHasWeights : 0;
  if (readable_meta(args.handle.meta))
    signature.handle_hash = static_cast<std::uint64_t>(args.handle.meta.as<std::int64_t>()[layout::kMetaHash]);
  return signature;
}

}  // namespace deep_moe
