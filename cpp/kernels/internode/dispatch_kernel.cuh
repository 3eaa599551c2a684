// The kernel of dispatch between nodes, for any network.
#pragma once

#include "kernels/internode/call.cuh"
#include "kernels/internode/dispatch.cuh"
#include "kernels/internode/launch.cuh"
#include "kernels/internode/tuning.hpp"

namespace deep_moe::kernels::internode {

// Dynamic shared memory; with the copy engine the warps' stages follow.
struct DispatchShared {
  WarpLists lists[RailTuning::kCopyWarps];
  Target targets[layout::kMaxKernelRanks];
  RingCalls rings;
};
inline constexpr std::size_t kStagesAt = (sizeof(DispatchShared) + 127) / 128 * 128;
inline constexpr std::size_t kStagesEnd = kStagesAt + sizeof(CopyStages) * RailTuning::kCopyWarps;

template <typename Network>
__global__ void __launch_bounds__(32 * RailTuning::kCopyWarps, 1)
    dispatch_kernel(const __grid_constant__ RailDomain domain, const __grid_constant__ Network network,
                    const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  DispatchShared& shared = *reinterpret_cast<DispatchShared*>(dynamic_shared);
  const Routes& routes = params.args.routes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const WaitScope scope{domain.node,
                        ptx::ld_relaxed_gpu(&domain.node.words.state(domain.node.workspaces[domain.node.rank]).epoch)};
  if (!rows_may_move(scope)) return;
  if (params.args.send_nvl_index != nullptr && routes.rows_in_prefix[domain.num_nodes - 1] > params.args.map_rows)
    return;
  bool ok = thread >= domain.num_local_ranks() || aim(scope, domain, params, thread, shared.targets + thread);
  find_ring_calls(
      domain, params.rail_row.stride, [&](int node) { return routes.rows_out[node]; },
      [&](int node) { return rows_in(routes, node); }, shared.rings);
  if (!__syncthreads_and(ok)) return;

  WarpLists& lists = shared.lists[warp];
  RowCopier copier(params.copy_engine ? reinterpret_cast<CopyStages*>(dynamic_shared + kStagesAt) + warp : nullptr);
  // Every other warp sends tokens, and forwards rows when there are no more.
  if (warp % 2 == 0) {
    Tokens tokens(domain, params.args.num_tokens);
    std::int64_t last = -1;
    for (std::int64_t token; ok && tokens.next(&token);)
      ok = send_token(scope, domain, network, params, shared.targets, shared.rings, token, &last, lists, copier);
    if (ok) finish_token(domain, network, params, shared.rings, &last, copier);
  }
  RingRows rows(domain, ring_warp(), shared.rings.in);
  std::int64_t row;
  for (int node; ok && rows.next(&node, &row);)
    ok = forward_row(scope, domain, network, params, shared.targets, shared.rings, node, row, lists, copier);
  copier.complete();
  fill_tail(params, shared.targets[domain.node.rank]);
  if (!__syncthreads_and(ok)) return;
  end_rows(scope, domain, WaitPhase::kRowsDone, shared.rings);
}

inline DispatchParams derive(const RailDomain& domain, const DispatchArgs& args) {
  DispatchParams params{args, {}, {}, has_copy_engine()};
  params.format.row_bytes = args.row_bytes;
  params.format.scale_bytes = args.scales.num_items * args.scales.item_bytes;
  params.format.topk = args.ids.topk;
  params.format.idx_bytes = args.ids.topk > 0 ? args.ids.id_bytes : 0;
  params.format.weight_bytes = args.has_weights || args.topk_weights != nullptr ? 4 : 0;
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  params.rail_row = layout::RailRow(bytes(args.row_bytes), bytes(params.format.scale_bytes),
                                    bytes(params.format.topk * params.format.idx_bytes),
                                    bytes(params.format.topk * params.format.weight_bytes), domain.num_local_ranks());
  return params;
}

inline void check(const RailDomain& domain, const DispatchArgs& args) {
  internode::check_domain(domain);
  check_range("num_sms", args.routes.num_sms, 1, layout::kMaxRowBlocks);
  check_range("num_tokens", args.num_tokens, 0, INT32_MAX);
  check_range("row_bytes", args.row_bytes, 16, INT32_MAX);
  const auto address = reinterpret_cast<std::uintptr_t>(args.x) | static_cast<std::uint64_t>(args.row_stride);
  if (args.row_bytes % 16 != 0 || address % 16 != 0)
    throw ArgumentError("x, row_bytes and row_stride have to be multiples of 16 bytes");
  if (args.ids.topk > 0) check_ids(args.ids, args.num_experts, 0);
}

template <typename Network>
void launch_dispatch(const RailDomain& domain, const Network& network, const DispatchArgs& args, Stream stream) {
  check(domain, args);
  const DispatchParams params = derive(domain, args);
  check_row(domain, params.rail_row.stride);
  launch(dispatch_kernel<Network>, num_blocks(domain, args.routes.num_sms, RailTuning::kCopyWarps),
         RailTuning::kCopyWarps, params.copy_engine ? kStagesEnd : sizeof(DispatchShared), stream, false,
         "launch of dispatch between nodes", domain, network, params);
}

template <typename Network>
void load_dispatch() {
  load_kernel(dispatch_kernel<Network>, static_cast<int>(has_copy_engine() ? kStagesEnd : sizeof(DispatchShared)));
}

}  // namespace deep_moe::kernels::internode
