// The kernels of a low-latency dispatch between nodes, and their launches.
#pragma once

#include <algorithm>

#include "kernels/internode/direct_dispatch.cuh"
#include "kernels/internode/direct_launch.cuh"

namespace deep_moe::kernels::internode {

template <class Rows, class Network>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_dispatch_send_kernel(const __grid_constant__ DirectDomain domain, const __grid_constant__ Network network,
                                const __grid_constant__ DirectDispatchParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ DirectShared shared;
  TileBuffer* buffer = nullptr;
  if constexpr (!kCasts<Rows>) {
    __shared__ TileBuffer buffers[kDirectWarps];
    buffer = &buffers[threadIdx.x / 32];
  }
  const LowLatencyRun run{domain.group, params.rows.args.call, params.rows.hot, shared.call};
  if (!begin_call(run, shared)) return;
  const DirectRun<Network> direct{run, domain, network, shared};
  bool ok = answer_owed(direct, params.teams);
  if (ok)
    for_each_destination(domain, run, params.teams,
                         [&](int dst) { return ok = send_message<Rows>(direct, params, dynamic_shared, buffer, dst); });
  leave(run, ok);
}

template <class Rows, class Network>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_dispatch_receive_kernel(const __grid_constant__ DirectDomain domain, const __grid_constant__ Network network,
                                   const __grid_constant__ DirectDispatchParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ DirectSources sources;
  TileBuffer* buffer = nullptr;
  if constexpr (!kCasts<Rows>) {
    __shared__ TileBuffer buffers[kDirectWarps];
    buffer = &buffers[threadIdx.x / 32];
  }
  const LowLatencyRun run{domain.group, params.rows.args.call, params.rows.hot, sources.direct.call};
  if (!begin_call(run, sources.direct)) return;
  const DirectRun<Network> direct{run, domain, network, sources.direct};
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int num_local = experts.num_local_experts(run.rank());
  const ExpertCounts counts(dynamic_shared, params.rows, false, experts, run.rank());
  bool ok = true;
  if (await_sources(direct, params, counts, sources, num_local, &ok)) {
    const Receiver at{run,
                      params.rows,
                      counts,
                      sources.unused,
                      experts.first_expert(run.rank()),
                      num_local,
                      static_cast<std::int32_t>(run.call.max_tokens) * run.num_ranks()};
    write_places(direct, params, sources);
    if (threadIdx.x < 32) count_rows(at);
    const int num_tasks = params.rows.num_row_tasks, warps = static_cast<int>(gridDim.x) * kDirectWarps;
    const std::int64_t end = std::int64_t{sources.rows_before[run.num_ranks()]} * num_tasks;
    int src = 0;
#pragma unroll 1
    for (std::int64_t task =
             static_cast<int>(threadIdx.x / 32) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
         task < end; task += warps) {
      const auto number = static_cast<std::uint32_t>(task / num_tasks);
      const int part = static_cast<int>(task - std::int64_t{number} * num_tasks);
      src = source_of(sources.rows_before, number, src);
      const char* row = direct.incoming(src) + params.message.rows +
                        std::size_t{number - sources.rows_before[src]} * params.message.row_stride;
      place_tile<Rows>(at, params, row, src, sources.num_tokens[src], part, buffer);
    }
  }
  end_receive(direct, ok);
}

// Calls body(send, receive) with the kernels of a call; in the second half all casts are one.
template <class Network, typename Body>
void with_direct_dispatch(const LowLatencyDispatchArgs& args, Body body) {
  if (!args.cast)
    return body(direct_dispatch_send_kernel<AsTheyAre, Network>, direct_dispatch_receive_kernel<AsTheyAre, Network>);
  auto* const receive = direct_dispatch_receive_kernel<CastFrom<__nv_bfloat16>, Network>;
  switch (args.x_type) {
    case SumType::kBf16: return body(direct_dispatch_send_kernel<CastFrom<__nv_bfloat16>, Network>, receive);
    case SumType::kFp16: return body(direct_dispatch_send_kernel<CastFrom<__half>, Network>, receive);
    case SumType::kFp32: return body(direct_dispatch_send_kernel<CastFrom<float>, Network>, receive);
  }
}

inline layout::DirectMessage direct_message(int num_ranks, const LowLatencyDispatchArgs& args) {
  const std::int64_t scale_bytes =
      args.cast ? args.row_bytes / kCastBlock * 4 : args.scales.num_items * args.scales.item_bytes;
  return layout::DirectMessage(args.call.max_tokens,
                               layout::ExpertBlocks(args.call.num_experts, num_ranks).max_local_experts(),
                               args.ids.topk, args.row_bytes, scale_bytes, args.with_weights);
}

template <class Network>
void launch_direct_dispatch(const DirectDomain& domain, const Network& network, LowLatencyDispatchArgs args,
                            Stream stream) {
  const int num_ranks = domain.group.num_ranks;
  check_direct(domain, args.call, args.ids);
  check_range("num_tokens", args.num_tokens, 0, args.call.max_tokens);
  check_range("row_bytes", args.row_bytes, 16, INT32_MAX);
  if (args.row_bytes % 16 != 0) throw ArgumentError("row_bytes must be a multiple of 16");
  if (args.cast && args.row_bytes % kCastBlock != 0) throw ArgumentError("rows to be cast come in 128 elements");
  args.call.hash = layout::signature_hash(args.call.signature);
  const layout::ExpertBlocks experts(args.call.num_experts, num_ranks);
  DirectDispatchParams params;
  params.message = direct_message(num_ranks, args);
  params.part_room = room_for_rows(domain, params.message, args.call.max_tokens);
  params.rows.num_vectors = static_cast<int>(args.row_bytes / 16);
  params.rows.num_parts = (params.rows.num_vectors + layout::kTileVectors - 1) / layout::kTileVectors;
  params.rows.num_row_tasks =
      params.rows.num_parts +
      (args.cast ? 0 : layout::units_for(args.scales.num_items * args.scales.item_bytes, layout::kTilePayload));
  params.rows.num_scales =
      static_cast<int>(args.cast ? args.row_bytes / kCastBlock / (args.ue8m0 ? 4 : 1) : args.scales.num_items);
  params.rows.x_alignment =
      common_alignment(reinterpret_cast<std::uintptr_t>(args.x) |
                       static_cast<std::uint64_t>(args.num_tokens > 1 ? args.row_stride : 0) | 16u);
  const int max_local = experts.max_local_experts();
  params.chunk = direct_chunk(max_local);
  with_direct_dispatch<Network>(args, [&](auto* send, auto* receive) {
    const auto start = [&](auto* kernel, LowLatencyHalf which, int blocks, std::int64_t shared_bytes) {
      params.rows.args = args;
      params.rows.args.call.half = which;
      params.rows.hot = LowLatencyHot(domain.group, params.rows.args.call);
      launch(kernel, blocks, kDirectWarps, static_cast<std::size_t>(shared_bytes), stream, false,
             "launch of low_latency_dispatch between nodes", domain, network, params);
    };
    if (args.call.half != LowLatencyHalf::kReceive) {
      params.teams = DirectTeams(num_ranks, args.call.num_blocks);
      start(send, LowLatencyHalf::kSend, params.teams.num_blocks(), DirectRows::num_bytes(max_local, params.chunk));
    }
    if (args.call.half != LowLatencyHalf::kSend)
      start(receive, LowLatencyHalf::kReceive, args.call.num_blocks,
            4 * std::int64_t{num_ranks} * experts.num_local_experts(domain.group.rank));
  });
}

template <class Network>
void load_direct_dispatch() {
  LowLatencyDispatchArgs args;
  for (const bool cast : {false, true})
    for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
      args.cast = cast, args.x_type = type;
      with_direct_dispatch<Network>(args, [](auto* send, auto* receive) {
        load_kernel(send, kMostDirectShared);
        load_kernel(receive, kMostDirectShared);
      });
    }
}

}  // namespace deep_moe::kernels::internode
