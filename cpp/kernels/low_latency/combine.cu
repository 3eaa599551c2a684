// Low-latency combine: weighted sums back to the owners of the tokens, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/low_latency/combine_kernel.cuh"
#include "kernels/low_latency/logfmt.cuh"

namespace deep_moe::kernels {
namespace {

std::int64_t row_bytes_of(const LowLatencyCombineArgs& args) {
  return args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
}

layout::LowLatencyCombineSlot slot_of(int num_ranks, const LowLatencyCombineArgs& args) {
  const std::int64_t row_bytes = args.logfmt ? args.hidden / kLogfmtBlock * kLogfmtBlockBytes : row_bytes_of(args);
  return layout::LowLatencyCombineSlot(num_ranks, args.call.max_tokens, args.ids.topk, row_bytes, args.by_expert);
}

}  // namespace

std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyCombineArgs& args) {
  return static_cast<std::int64_t>(layout::align_up(slot_of(domain.num_ranks, args).total, 128));
}

void low_latency_combine(const DeviceDomain& domain, LowLatencyCombineArgs args, Stream stream) {
  check_low_latency(domain, args.call, low_latency_slot_bytes(domain, args));
  check_ids(args.ids, args.call.num_experts, 0);
  check_range("ids.num_tokens", args.ids.num_tokens, 0, args.call.max_tokens);
  const bool halves = args.call.half != LowLatencyHalf::kBoth;
  if (args.by_expert && !halves) throw ArgumentError("by_expert is true; allowed: with halves alone");
  if (halves && !args.by_expert && args.recv_weights == nullptr)
    throw ArgumentError("recv_weights is null; allowed: null only in one launch or by expert");
  LowLatencyCombineParams params;
  params.row_bytes = row_bytes_of(args);
  check_range("row bytes", params.row_bytes, 16, INT32_MAX);
  if (params.row_bytes % 16 != 0) throw ArgumentError("rows must be a multiple of 16 bytes");
  if (args.logfmt && args.hidden % kLogfmtBlock != 0)
    throw ArgumentError("hidden must be a multiple of " + std::to_string(kLogfmtBlock) + " with logfmt");
  args.call.hash = layout::signature_hash(args.call.signature);
  params.args = args;
  params.hot = LowLatencyHot(domain, args.call);
  params.num_vectors = static_cast<int>(params.row_bytes / 16);
  params.slot = slot_of(domain.num_ranks, args);
  params.expert_ranks = ExpertRanks(layout::ExpertBlocks(args.call.num_experts, domain.num_ranks));
  const auto alignment = [](const void* base, std::int64_t strides) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(base) | static_cast<std::uint64_t>(strides) | 16u);
  };
  params.x_alignment = alignment(args.x, args.expert_stride | args.row_stride);
  params.out_alignment = alignment(args.out, args.ids.num_tokens > 1 ? args.out_stride : 0);
  params.is_dense = args.expert_stride == args.call.max_tokens * domain.num_ranks * args.row_stride;
  // As if all ranks had as many tokens as this one; with more than that it takes longer.
  const std::int64_t sent =
      args.call.half == LowLatencyHalf::kReceive ? 0 : args.ids.num_tokens * (domain.num_ranks - (halves ? 0 : 1));
  const std::int64_t items = sent + (args.call.half == LowLatencyHalf::kSend ? 0 : args.ids.num_tokens);
  const bool plain = args.ids.topk <= kHalf && params.x_alignment == 16 && params.out_alignment == 16 &&
                     params.is_dense && domain.num_ranks <= 32;
  params.num_parts = params.slot.num_tiles * Narrow::kParts;
  const bool narrow =
      plain && !args.logfmt && is_narrow(args.call, items * params.num_parts, LowLatencyTuning::kNarrowCombine);
  if (args.logfmt)
    params.num_parts = static_cast<int>((args.hidden + kLogfmtTile - 1) / kLogfmtTile);
  else if (!narrow)
    params.num_parts = params.slot.num_tiles;
  check_range("parts of a call", args.call.max_tokens * (domain.num_ranks + 1) * params.num_parts, 0, INT32_MAX);
  const LowLatencyGrid grid(args.call, items * params.num_parts,
                            narrow ? LowLatencyTuning::kNarrowCombine : LowLatencyTuning::kCombineCarriers);
  params.by_parts = Divisor(static_cast<std::uint32_t>(params.num_parts));
  params.by_owners = Divisor(static_cast<std::uint32_t>(std::max(domain.num_ranks - (halves ? 0 : 1), 1)));
  params.num_carriers = grid.carriers;
  const int warps = grid.carriers + LowLatencyTuning::kCombineOthers;
  const auto start = [&](CombineKernel* kernel) {
    params.early = args.call.early && fits_twice(kernel, warps);
    launch(kernel, grid.blocks, warps, 0, stream, true, "launch of low_latency_combine", domain, params);
  };
  if (args.logfmt) return start(logfmt_combine_kernel(args, plain));
  with_type(args.type, [&](auto number) {
    using T = decltype(number);
    if (narrow)
      with_half<T, Narrow>(args, false, start);
    else if (plain)
      with_half<T, Wide>(args, false, start);
    else
      with_half<T, General>(args, false, start);
  });
}

void prepare_low_latency_combine() {
  const auto load = [](auto* kernel) { load_kernel(kernel, 0); };
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_type(type, [&](auto number) {
      using T = decltype(number);
      with_half<T, Narrow>({}, true, load);
      with_half<T, Wide>({}, true, load);
      with_half<T, General>({}, true, load);
    });
  prepare_logfmt_combine();
}

}  // namespace deep_moe::kernels
