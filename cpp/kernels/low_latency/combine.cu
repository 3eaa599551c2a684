// Low-latency combine: weighted sums back to the owners of the tokens, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/launch.hpp"
#include "kernels/low_latency/combine_own.cuh"
#include "kernels/low_latency/launch.hpp"

namespace deep_moe::kernels {
namespace {

__device__ void run_clerk(const LowLatencyRun& run, Arrival& arrival) {
  __shared__ std::uint32_t num_tokens[layout::kMaxKernelRanks];
  if (!__syncthreads_and(!run.failed)) return;
  arrival.make(run);
  if (run.receives()) watch_peers(run, num_tokens);
}

template <typename T, class Width, bool kByExpert>
__global__ void __launch_bounds__(LowLatencyTuning::kThreads, 1)
    combine_kernel(const __grid_constant__ DeviceDomain domain,
                   const __grid_constant__ LowLatencyCombineParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  __shared__ EntryBuffer entries[LowLatencyTuning::kThreads / 32];
  __shared__ TokenInfo infos[CombineChunk::kTokens];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const BlockMemory memory{CombineChunk(shared_memory), infos, entries[warp]};
  LowLatencyRun run = begin_call(domain, params.args.call);
  Arrival arrival;
  if (run.is_herald()) {
    run_herald(run, params.args.ids.num_tokens, arrival);
  } else if (run.is_clerk()) {
    run_clerk(run, arrival);
  } else {
    bool ok = true;
    if (run.sends()) {
      ok = send_weights(run, params);
      ok = send_held<T, Width, kByExpert>(run, params, memory) && ok;
      ok = __syncthreads_and(ok);
      arrival.make(run);
    }
    if (ok && run.receives()) receive_own<T, Width, kByExpert>(run, params, memory);
  }
  arrival.finish(run);
  ptx::griddepcontrol_launch_dependents();
}

template <typename Body>
void with_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
}

std::int64_t row_bytes_of(const LowLatencyCombineArgs& args) {
  return args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
}

layout::LowLatencyCombineSlot slot_of(int num_ranks, const LowLatencyCombineArgs& args) {
  return layout::LowLatencyCombineSlot(num_ranks, args.call.max_tokens, args.ids.topk, row_bytes_of(args),
                                       args.by_expert);
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
  args.call.hash = layout::signature_hash(args.call.signature);
  params.args = args;
  params.slot = slot_of(domain.num_ranks, args);
  const auto alignment = [](const void* base, std::int64_t strides) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(base) | static_cast<std::uint64_t>(strides) | 16u);
  };
  params.x_alignment = alignment(args.x, args.expert_stride | args.row_stride);
  params.out_alignment = alignment(args.out, args.ids.num_tokens > 1 ? args.out_stride : 0);
  // As if all ranks had as many tokens as this one; with more than that it takes longer.
  const std::int64_t sent =
      args.call.half == LowLatencyHalf::kReceive ? 0 : args.ids.num_tokens * (domain.num_ranks - (halves ? 0 : 1));
  const std::int64_t received = args.call.half == LowLatencyHalf::kSend ? 0 : args.ids.num_tokens;
  params.num_parts = params.slot.num_tiles * Narrow::kParts;
  const bool narrow = fits_one_round(args.call, (sent + received) * params.num_parts);
  if (!narrow) params.num_parts = params.slot.num_tiles;
  check_range("parts of a call", args.call.max_tokens * domain.num_ranks * params.num_parts, 0, INT32_MAX);
  const int num_blocks = num_low_latency_blocks(args.call, sent * params.num_parts, received * params.num_parts);
  with_type(args.type, [&](auto number) {
    using T = decltype(number);
    const auto kernel = narrow ? (args.by_expert ? combine_kernel<T, Narrow, true> : combine_kernel<T, Narrow, false>)
                               : (args.by_expert ? combine_kernel<T, Wide, true> : combine_kernel<T, Wide, false>);
    launch(kernel, num_blocks, LowLatencyTuning::kThreads / 32, CombineChunk::bytes(args.ids.topk), stream, true,
           "launch of low_latency_combine", domain, params);
  });
}

void prepare_low_latency_combine() {
  const int most = static_cast<int>(CombineChunk::bytes(layout::kMaxTopk));
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_type(type, [&](auto number) {
      using T = decltype(number);
      load_kernel(combine_kernel<T, Narrow, false>, most);
      load_kernel(combine_kernel<T, Narrow, true>, most);
      load_kernel(combine_kernel<T, Wide, false>, most);
      load_kernel(combine_kernel<T, Wide, true>, most);
    });
}

}  // namespace deep_moe::kernels
