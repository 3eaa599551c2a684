// Low-latency dispatch and combine on a GPU: what the kernels are told, and what is handed out.
#include <algorithm>
#include <utility>

#include "cuda/cuda_low_latency_call.hpp"
#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "layout/low_latency_words.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/text.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cuda {

using kernels::LowLatencyHalf;

namespace {

kernels::SumType sum_type(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::SumType::kBf16
         : dtype == DType::kFloat16 ? kernels::SumType::kFp16
                                    : kernels::SumType::kFp32;
}

kernels::TopkIds ids_of(const TensorView& topk_idx) {
  kernels::TopkIds ids;
  ids.data = topk_idx.data;
  ids.id_bytes = static_cast<int>(dtype_bytes(topk_idx.dtype));
  ids.topk = static_cast<int>(topk_idx.shape[1]);
  ids.num_tokens = topk_idx.shape[0];
  ids.row_stride = topk_idx.shape[0] > 1 ? topk_idx.stride[0] : topk_idx.shape[1];
  return ids;
}

std::int64_t row_stride(const TensorView& rows) { return rows.shape[0] > 1 ? rows.stride[0] : rows.shape[1]; }

kernels::ScaleRows scale_rows(const TensorView& scales) {
  kernels::ScaleRows rows;
  if (!scales.defined()) return rows;
  rows.data = scales.data;
  rows.item_bytes = static_cast<int>(dtype_bytes(scales.dtype));
  rows.num_items = scales.num_dims == 2 ? scales.shape[1] : 1;
  rows.row_stride = scales.stride[0] * rows.item_bytes;
  rows.item_stride = scales.num_dims == 2 ? scales.stride[1] * rows.item_bytes : rows.item_bytes;
  return rows;
}

kernels::LowLatencyDispatchArgs kernel_arguments(const LowLatencyDispatchArgs& args,
                                                 const layout::CallSignature& signature) {
  const TensorView& data = args.x.data;
  kernels::LowLatencyDispatchArgs out;
  out.cast = (signature.flags & kFlagFp8) != 0;
  out.x = data.data;
  out.num_tokens = data.shape[0];
  out.row_bytes = signature.row_bytes;
  out.row_stride = row_stride(data) * static_cast<std::int64_t>(dtype_bytes(data.dtype));
  out.x_type = sum_type(data.dtype);
  out.round_scale = (signature.flags & kFlagRoundScale) != 0;
  out.ue8m0 = (signature.flags & kFlagUe8m0) != 0;
  out.scales = scale_rows(args.x.scales);
  out.ids = ids_of(args.topk_idx);
  out.with_weights = args.topk_weights.defined();
  out.topk_weights = out.with_weights ? args.topk_weights.as<float>() : nullptr;
  out.weight_stride = out.with_weights ? row_stride(args.topk_weights) : 0;
  return out;
}

// The combine of rows of the same width, so that it need not make the staging larger.
kernels::LowLatencyCombineArgs way_back(const kernels::LowLatencyDispatchArgs& there, const TensorView& data,
                                        int num_ranks) {
  kernels::LowLatencyCombineArgs back;
  back.call = there.call;
  back.ids = there.ids;
  back.type = dtype_bytes(data.dtype) > 2 ? kernels::SumType::kFp32 : kernels::SumType::kBf16;
  back.hidden = data.shape[1];
  back.by_expert = there.ids.topk > num_ranks;
  return back;
}

std::int64_t num_scales_of(const kernels::LowLatencyDispatchArgs& args, std::int64_t hidden) {
  return args.cast ? hidden / kFp8Block / (args.ue8m0 ? 4 : 1) : args.scales.num_items;
}

// As the caller gets them: [L, rows], or [L, rows, scales] of which the last two dimensions are column-major.
void shape_scales(TensorView* view, bool one_a_row, std::int64_t num_local, std::int64_t rows,
                  std::int64_t num_scales) {
  const int device = view->device;
  if (one_a_row) {
    *view = TensorView::contiguous(view->data, view->dtype, {num_local, rows});
  } else {
    *view = TensorView::contiguous(view->data, view->dtype, {num_local, rows, num_scales});
    view->stride[1] = 1;
    view->stride[2] = rows;
  }
  view->device = device;
}

}  // namespace

void LowLatency::ensure_room(const kernels::LowLatencyDispatchArgs& args, const TensorView& data,
                             const layout::CallSignature& signature, std::uint64_t number,
                             const LowLatencyStreams& streams) {
  const kernels::LowLatencyCombineArgs back = way_back(args, data, world_.num_ranks());
  if (is_direct())
    return check_part(std::max(kernels::internode::direct_part_bytes(world_.num_ranks(), args),
                               kernels::internode::direct_part_bytes(world_.num_ranks(), back, !args.with_weights)),
                      signature);
  ensure_staging(std::max(kernels::low_latency_slot_bytes(world_.domain(), args),
                          kernels::low_latency_slot_bytes(world_.domain(), back)),
                 signature, number, streams);
}

void LowLatency::ensure_room(const kernels::LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                             std::uint64_t number, const LowLatencyStreams& streams) {
  if (is_direct())
    return check_part(
        kernels::internode::direct_part_bytes(world_.num_ranks(), args, kernels::internode::direct_by_expert(args)),
        signature);
  ensure_staging(kernels::low_latency_slot_bytes(world_.domain(), args), signature, number, streams);
}

// The network's memory does not grow.
void LowLatency::check_part(std::int64_t bytes, const layout::CallSignature& signature) const {
  const auto of_parts = [&](std::size_t part) {
    return std::to_string(layout::align_up(part, layout::kAlign) *
                          static_cast<std::size_t>(layout::kLowLatencySlots * world_.num_ranks()));
  };
  const std::size_t there = direct_->direct_layout().part_bytes();
  if (bytes <= static_cast<std::int64_t>(there)) return;
  const std::string reason = std::string(call_name(signature.kind)) + ": " + of_parts(static_cast<std::size_t>(bytes)) +
                             " bytes of low-latency memory of the network needed, and " + of_parts(there) +
                             " are there; they cannot grow: make the Buffer with low_latency_mode=True and "
                             "num_rdma_bytes as get_low_latency_rdma_size_hint says";
  refuse_(signature, reason);
  throw BufferTooSmallError(reason);
}

void LowLatency::launch(const kernels::LowLatencyDispatchArgs& args, Stream stream) const {
  if (is_direct()) return direct_->low_latency_dispatch(direct_->direct_domain(world_.domain()), args, stream);
  kernels::low_latency_dispatch(world_.domain(), args, stream);
}

void LowLatency::launch(const kernels::LowLatencyCombineArgs& args, Stream stream) const {
  if (is_direct()) return direct_->low_latency_combine(direct_->direct_domain(world_.domain()), args, stream);
  kernels::low_latency_combine(world_.domain(), args, stream);
}

LowLatencyDispatchResult LowLatency::dispatch(const LowLatencyDispatchArgs& args,
                                              const layout::CallSignature& signature, std::uint64_t number,
                                              LowLatencyStreams streams, const Enter& enter) {
  const TensorView &data = args.x.data, &scales = args.x.scales;
  const int num_ranks = world_.num_ranks();
  const layout::ExpertBlocks experts(static_cast<int>(args.num_experts), num_ranks);
  const std::int64_t num_local = experts.num_local_experts(world_.rank()), hidden = data.shape[1];
  const std::int64_t max_tokens = signature.max_tokens, topk = signature.topk, rows = num_ranks * max_tokens;
  kernels::LowLatencyDispatchArgs out = kernel_arguments(args, signature);
  out.call = kernel_call(signature);
  go_behind(streams.work);
  settle(streams);
  ensure_room(out, data, signature, number, streams);
  out.call = kernel_call(signature);

  LowLatencyDispatchResult result;
  OwnedLowLatencyHandle& handle = result.handle;
  Tensor epoch;
  const bool has_epoch = args.return_recv_hook || is_direct();
  std::vector<char*> blocks;
  const std::int64_t num_scales = num_scales_of(out, hidden);
  const DType scale_type = scales.defined() ? scales.dtype : out.ue8m0 ? DType::kInt32 : DType::kFloat32;
  // Rows and scales die together, and so does what is small.
  make_parts({{&result.recv_x.data, out.cast ? DType::kFloat8E4M3 : data.dtype, {num_local, rows, hidden}},
              {&result.recv_x.scales, scale_type, {num_local, num_scales, rows}}},
             streams, signature, &blocks);
  const layout::LowLatencyHandleWords words(num_local, num_ranks, max_tokens, topk, out.with_weights);
  make_parts({{&result.recv_count, DType::kInt32, {num_local}},
              {&handle.words, DType::kUInt8, {static_cast<std::int64_t>(words.total)}},
              {&epoch, DType::kInt64, {has_epoch ? 1 : 0}}},
             streams, signature, &blocks);
  if (num_scales > 0)
    shape_scales(&result.recv_x.scales.view, scales.defined() && scales.num_dims == 1, num_local, rows, num_scales);
  else
    result.recv_x.scales = {};
  handle.meta = make_host_tensor(DType::kInt64, {layout::kLowLatencyMetaSize});
  std::int64_t* const meta = handle.meta.as<std::int64_t>();
  std::fill(meta, meta + layout::kLowLatencyMetaSize, 0);
  meta[layout::kLowMetaMaxTokens] = max_tokens;
  meta[layout::kLowMetaHidden] = hidden;
  meta[layout::kLowMetaNumExperts] = args.num_experts;
  meta[layout::kLowMetaTopk] = topk;
  meta[layout::kLowMetaNumRanks] = num_ranks;
  meta[layout::kLowMetaNumTokens] = data.shape[0];
  meta[layout::kLowMetaHasWeights] = out.with_weights ? 1 : 0;
  meta[layout::kLowMetaXDtype] = static_cast<std::int64_t>(data.dtype);
  // Not which dispatch it is: one that a graph replays goes together with a call of today on another rank.
  meta[layout::kLowMetaHash] = static_cast<std::int64_t>(layout::signature_hash(signature) | 1);
  const LowLatencyHandle views = low_latency_handle(handle.words.view, handle.meta.view, world_.rank());
  for (const auto& [tensor, view] :
       {std::pair(&handle.src_info, &views.src_info), std::pair(&handle.layout_range, &views.layout_range),
        std::pair(&handle.recv_pos, &views.recv_pos), std::pair(&handle.recv_weights, &views.recv_weights)}) {
    tensor->view = *view;
    tensor->owner = handle.words.owner;
  }

  out.recv_x = result.recv_x.data.view.data;
  out.recv_scales = num_scales > 0 ? result.recv_x.scales.view.data : nullptr;
  out.recv_count = result.recv_count.as<std::int32_t>();
  out.src_info = handle.src_info.as<std::int32_t>();
  out.layout_range = handle.layout_range.as<std::int64_t>();
  out.recv_pos = handle.recv_pos.as<std::int32_t>();
  out.recv_weights = out.with_weights ? handle.recv_weights.as<float>() : nullptr;
  out.call.epoch = has_epoch ? epoch.as<std::uint64_t>() : nullptr;
  auto launch_half = [this, out, stats = args.cumulative_local_expert_recv_stats.as<std::int32_t>(),
                      waited = args.wait_recv_cost_stats.as<std::int64_t>()](LowLatencyHalf half, bool with_stats,
                                                                             Stream on) mutable {
    out.call.half = half;
    out.recv_stats = with_stats ? stats : nullptr;
    out.call.wait_stats = with_stats ? waited : nullptr;
    launch(out, on);
  };
  const std::uint64_t sequence = sequence_++;
  launch_half(args.return_recv_hook ? LowLatencyHalf::kSend : LowLatencyHalf::kBoth, true, streams.work);
  if (!args.return_recv_hook) {
    meta[layout::kLowMetaComplete] = 1;
    return result;
  }
  struct Keep {
    OwnedPayload recv_x;
    Tensor recv_count, epoch;
    OwnedLowLatencyHandle handle;
  };
  auto call = std::make_shared<InFlight>();
  call->name = "low_latency_dispatch";
  call->launch = std::move(launch_half);
  call->keep = std::make_shared<Keep>(Keep{result.recv_x, result.recv_count, epoch, handle});
  call->blocks = std::move(blocks);
  call->streams = streams;
  call->complete = meta + layout::kLowMetaComplete;
  result.hook = make_hook(std::move(call), sequence, enter);
  return result;
}

LowLatencyCombineResult LowLatency::combine(const LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                                            std::uint64_t number, LowLatencyStreams streams, const Enter& enter) {
  const std::int64_t num_tokens = args.topk_idx.shape[0], topk = signature.topk, hidden = args.x.shape[2];
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  const bool halves = args.return_recv_hook, keeps = halves || is_direct();
  kernels::LowLatencyCombineArgs in;
  in.call = kernel_call(signature);
  in.by_expert = (signature.flags & kFlagByExpert) != 0;
  in.logfmt = args.use_logfmt;
  in.type = sum_type(args.x.dtype);
  in.x = args.x.data;
  in.hidden = hidden;
  in.row_stride = (args.x.shape[1] > 1 ? args.x.stride[1] : hidden) * item;
  in.expert_stride = (args.x.shape[0] > 1 ? args.x.stride[0] : 0) * item;
  in.recv_pos = args.handle.recv_pos.as<std::int32_t>();
  in.recv_weights = (signature.flags & kFlagWeights) != 0 ? args.handle.recv_weights.as<float>() : nullptr;
  in.ids = ids_of(args.topk_idx);
  in.topk_weights = args.topk_weights.as<float>();
  in.weight_stride = row_stride(args.topk_weights);
  go_behind(streams.work);
  settle(streams);
  ensure_room(in, signature, number, streams);
  in.call = kernel_call(signature);

  LowLatencyCombineResult result;
  Tensor none, epoch, kept_ids, kept_weights;
  std::vector<char*> blocks;
  const bool has_out = args.out.defined();
  make_parts({{has_out ? &none : &result.combined_x, args.x.dtype, {has_out ? 0 : num_tokens, hidden}},
              {&epoch, DType::kInt64, {keeps ? 1 : 0}},
              {&kept_ids, DType::kInt32, {keeps ? num_tokens : 0, topk}},
              {&kept_weights, DType::kFloat32, {keeps ? num_tokens : 0, topk}}},
             streams, signature, &blocks);
  if (has_out) result.combined_x.view = args.out;
  in.out = result.combined_x.view.data;
  in.out_stride = row_stride(result.combined_x.view) * item;
  if (keeps) {
    in.call.epoch = epoch.as<std::uint64_t>();
    in.kept_ids = kept_ids.as<std::int32_t>();
    in.kept_weights = kept_weights.as<float>();
  }
  auto launch_half = [this, in, waited = args.wait_recv_cost_stats.as<std::int64_t>()](
                         LowLatencyHalf half, bool with_stats, Stream on) mutable {
    in.call.half = half;
    in.call.wait_stats = with_stats ? waited : nullptr;
    launch(in, on);
  };
  const std::uint64_t sequence = sequence_++;
  launch_half(halves ? LowLatencyHalf::kSend : LowLatencyHalf::kBoth, true, streams.work);
  if (!halves) return result;
  struct Keep {
    Tensor combined_x, epoch, kept_ids, kept_weights;
  };
  auto call = std::make_shared<InFlight>();
  call->name = "low_latency_combine";
  call->launch = std::move(launch_half);
  call->keep = std::make_shared<Keep>(Keep{result.combined_x, epoch, kept_ids, kept_weights});
  call->blocks = std::move(blocks);
  call->streams = streams;
  result.hook = make_hook(std::move(call), sequence, enter);
  return result;
}

}  // namespace deep_moe::cuda
