// The kernels of a low-latency combine between nodes, and their launches.
#pragma once

#include "kernels/internode/direct_combine.cuh"
#include "kernels/internode/direct_launch.cuh"

namespace deep_moe::kernels::internode {

template <typename T, class Width, bool kByExpert, class Network>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_combine_send_kernel(const __grid_constant__ DirectDomain domain, const __grid_constant__ Network network,
                               const __grid_constant__ DirectCombineParams params) {
  __shared__ DirectHeld held;
  const LowLatencyRun run{domain.group, params.rows.args.call, params.rows.hot, held.direct.call};
  if (!begin_call(run, held.direct)) return;
  const DirectRun<Network> direct{run, domain, network, held.direct};
  keep_entries(run, params);
  bool ok = answer_owed(direct, params.teams);
  if (ok)
    for_each_destination(domain, run, params.teams,
                         [&](int owner) { return ok = send_sums<T, Width, kByExpert>(direct, params, held, owner); });
  leave(run, ok);
}

template <typename T, class Width, bool kByExpert, class Network>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_combine_receive_kernel(const __grid_constant__ DirectDomain domain, const __grid_constant__ Network network,
                                  const __grid_constant__ DirectCombineParams params) {
  __shared__ DirectHolders holders;
  const LowLatencyRun run{domain.group, params.rows.args.call, params.rows.hot, holders.direct.call};
  if (!begin_call(run, holders.direct)) return;
  const DirectRun<Network> direct{run, domain, network, holders.direct};
  bool ok = true;
  if (static_cast<int>(threadIdx.x) < run.num_ranks()) {
    std::uint32_t tokens, rows;
    ok = await_message(direct, static_cast<int>(threadIdx.x), &tokens, &rows);
    holders.num_rows[threadIdx.x] = min(rows, static_cast<std::uint32_t>(params.part_room));
  }
  if (__syncthreads_and(ok)) {
    const std::int64_t end = params.rows.args.ids.num_tokens * params.rows.num_parts;
#pragma unroll 1
    for (std::int64_t task =
             static_cast<int>(threadIdx.x / 32) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
         task < end; task += static_cast<int>(gridDim.x) * kDirectWarps) {
      const std::int64_t token = task / params.rows.num_parts;
      sum_token<T, Width, kByExpert>(direct, params, holders, token,
                                     static_cast<int>(task - token * params.rows.num_parts));
    }
  }
  end_receive(direct, ok);
}

// Calls body(send, receive) with the kernels of a call.
template <typename T, class Width, class Network, typename Body>
void with_direct_combine(bool by_expert, Body body) {
  if (by_expert)
    body(direct_combine_send_kernel<T, Width, true, Network>, direct_combine_receive_kernel<T, Width, true, Network>);
  else
    body(direct_combine_send_kernel<T, Width, false, Network>, direct_combine_receive_kernel<T, Width, false, Network>);
}
template <class Network, typename Body>
void with_direct_combine(SumType type, bool logfmt, bool by_expert, Body body) {
  const auto with = [&](auto number) {
    using T = decltype(number);
    if (logfmt)
      with_direct_combine<T, DirectLogfmt<T>, Network>(by_expert, body);
    else
      with_direct_combine<T, General, Network>(by_expert, body);
  };
  switch (type) {
    case SumType::kBf16: return with(__nv_bfloat16{});
    case SumType::kFp16: return with(__half{});
    case SumType::kFp32: return with(float{});
  }
}

// The most rows that a rank holds for another.
inline std::int64_t most_rows(int num_ranks, const LowLatencyCombineArgs& args, bool by_expert) {
  const int max_local = layout::ExpertBlocks(args.call.num_experts, num_ranks).max_local_experts();
  return args.call.max_tokens * (by_expert ? std::min(args.ids.topk, max_local) : 1);
}
inline std::int64_t direct_row_bytes(const LowLatencyCombineArgs& args) {
  return args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
}
inline layout::DirectMessage direct_message(const LowLatencyCombineArgs& args) {
  const std::int64_t bytes = args.logfmt ? args.hidden / kLogfmtBlock * kLogfmtBlockBytes : direct_row_bytes(args);
  return layout::DirectMessage(args.call.max_tokens,
                               args.logfmt ? static_cast<std::int64_t>(layout::align_up(bytes, 16)) : bytes);
}

template <class Network>
void launch_direct_combine(const DirectDomain& domain, const Network& network, LowLatencyCombineArgs args,
                           Stream stream) {
  const int num_ranks = domain.group.num_ranks;
  check_direct(domain, args.call, args.ids);
  check_range("ids.num_tokens", args.ids.num_tokens, 0, args.call.max_tokens);
  if (args.ids.num_tokens > 0 && (args.kept_ids == nullptr || args.kept_weights == nullptr))
    throw ArgumentError("kept_ids or kept_weights is null");
  DirectCombineParams params;
  params.by_expert = direct_by_expert(args);
  params.rounds_by_holder = params.by_expert && !args.by_expert && !args.logfmt;
  params.message = direct_message(args);
  params.part_room = room_for_rows(domain, params.message, most_rows(num_ranks, args, params.by_expert));
  params.rows.row_bytes = direct_row_bytes(args);
  check_range("row bytes", params.rows.row_bytes, 16, INT32_MAX);
  if (params.rows.row_bytes % 16 != 0) throw ArgumentError("rows must be a multiple of 16 bytes");
  if (args.logfmt && args.hidden % kLogfmtBlock != 0)
    throw ArgumentError("hidden must be a multiple of " + std::to_string(kLogfmtBlock) + " with logfmt");
  args.call.hash = layout::signature_hash(args.call.signature);
  params.rows.num_vectors = static_cast<int>(params.rows.row_bytes / 16);
  params.rows.num_parts = args.logfmt ? static_cast<int>((args.hidden + kLogfmtTile - 1) / kLogfmtTile)
                                      : (params.rows.num_vectors + layout::kTileVectors - 1) / layout::kTileVectors;
  params.rows.expert_ranks = ExpertRanks(layout::ExpertBlocks(args.call.num_experts, num_ranks));
  const auto alignment = [](const void* base, std::int64_t strides) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(base) | static_cast<std::uint64_t>(strides) | 16u);
  };
  params.rows.x_alignment = alignment(args.x, args.expert_stride | args.row_stride);
  params.rows.out_alignment = alignment(args.out, args.ids.num_tokens > 1 ? args.out_stride : 0);
  params.rows.is_dense = args.expert_stride == args.call.max_tokens * num_ranks * args.row_stride;
  params.teams = DirectTeams(num_ranks, args.call.num_blocks);
  with_direct_combine<Network>(args.type, args.logfmt, params.by_expert, [&](auto* send, auto* receive) {
    const auto start = [&](auto* kernel, LowLatencyHalf which, int blocks) {
      params.rows.args = args;
      params.rows.args.call.half = which;
      params.rows.hot = LowLatencyHot(domain.group, params.rows.args.call);
      launch(kernel, blocks, kDirectWarps, 0, stream, false, "launch of low_latency_combine between nodes", domain,
             network, params);
    };
    if (args.call.half != LowLatencyHalf::kReceive) start(send, LowLatencyHalf::kSend, params.teams.num_blocks());
    if (args.call.half != LowLatencyHalf::kSend) start(receive, LowLatencyHalf::kReceive, args.call.num_blocks);
  });
}

// ---- Refusals.

template <class Network>
__global__ void __launch_bounds__(kDirectThreads, 1)
    direct_refusal_kernel(const __grid_constant__ DirectDomain domain, const __grid_constant__ Network network,
                          const __grid_constant__ DirectRefusal refusal, const __grid_constant__ LowLatencyHot hot) {
  __shared__ DirectShared shared;
  const LowLatencyRun run{domain.group, refusal.call, hot, shared.call};
  if (!begin_call(run, shared)) return;
  const DirectRun<Network> direct{run, domain, network, shared};
  const DirectTeams alone;
  bool ok = answer_owed(direct, alone);
  for_each_destination(domain, run, alone, [&](int dst) {
    ok = ok && await_slot(direct, dst);
    if (!ok) return false;
    char* const message = direct.outgoing(dst);
    if (threadIdx.x == 0) {
      fill_header(run, message, 0, 0);
      auto& header = *reinterpret_cast<layout::DirectHeader*>(message);
      header.status = static_cast<std::uint32_t>(layout::CallStatus::kRefused);
      header.num_reason_bytes = refusal.num_reason_bytes;
      for (std::uint32_t i = 0; i < refusal.num_reason_bytes; ++i)
        message[sizeof(layout::DirectHeader) + i] = refusal.reason[i];
      ptx::fence_acq_rel_sys();
    }
    __syncthreads();
    direct.send(dst, layout::kDirectRefusalBytes);
    return true;
  });
  leave(run, ok);
}

template <class Network>
void launch_direct_refusal(const DirectDomain& domain, const Network& network, DirectRefusal args, Stream stream) {
  check_direct(domain, args.call);
  args.call.half = LowLatencyHalf::kSend;
  args.call.hash = layout::signature_hash(args.call.signature);
  launch(direct_refusal_kernel<Network>, 1, kDirectWarps, 0, stream, false, "launch of low_latency_refuse", domain,
         network, args, LowLatencyHot(domain.group, args.call));
}

template <class Network>
void load_direct_combine() {
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    for (const bool logfmt : {false, true})
      for (const bool by_expert : {false, true})
        with_direct_combine<Network>(type, logfmt, by_expert, [](auto* send, auto* receive) {
          load_kernel(send, 0);
          load_kernel(receive, 0);
        });
  load_kernel(direct_refusal_kernel<Network>, 0);
}

}  // namespace deep_moe::kernels::internode
