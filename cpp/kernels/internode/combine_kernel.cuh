// The kernel of combine between nodes, for any network.
#pragma once

#include "kernels/internode/call.cuh"
#include "kernels/internode/combine.cuh"
#include "kernels/internode/launch.cuh"
#include "kernels/internode/tuning.hpp"

namespace deep_moe::kernels::internode {

// Dynamic shared memory.
struct CombineShared {
  SumList lists[RailTuning::kSumWarps];
  Holder holders[layout::kMaxKernelRanks];
  RingCalls rings;
};

template <typename Network, typename T>
__global__ void __launch_bounds__(32 * RailTuning::kSumWarps, 1)
    combine_kernel(const __grid_constant__ RailDomain domain, const __grid_constant__ Network network,
                   const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];  // as dispatch has it: one file may have both
  CombineShared& shared = *reinterpret_cast<CombineShared*>(dynamic_shared);
  const CombineArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const WaitScope scope{domain.node,
                        ptx::ld_relaxed_gpu(&domain.node.words.state(domain.node.workspaces[domain.node.rank]).epoch)};
  if (!rows_may_move(scope)) return;
  bool ok = thread >= domain.num_local_ranks() || find_holder(scope, domain, args, thread, shared.holders + thread);
  find_ring_calls(
      domain, params.rail_row.stride, [&](int node) { return rows_in(args.routes, node); },
      [&](int node) { return args.routes.rows_out[node]; }, shared.rings);
  if (!__syncthreads_and(ok)) return;

  SumList& list = shared.lists[warp];
  // Every other warp collects rows for the rings; then it sums tokens, as the others do from the start.
  if (warp % 2 != 0) {
    RingRows rows(domain, ring_warp(), shared.rings.out);
    std::int64_t row;
    for (int node; ok && rows.next(&node, &row);)
      ok = collect_row<T>(scope, domain, network, params, shared.holders, shared.rings, node, row, list);
  }
  Tokens tokens(domain, args.num_tokens);
  for (std::int64_t token; ok && tokens.next(&token);)
    ok = sum_token<T>(scope, domain, network, params, shared.holders, shared.rings, token, list);
  if (!__syncthreads_and(ok)) return;
  end_rows(scope, domain, WaitPhase::kPullDone, shared.rings);
}

inline void check(const RailDomain& domain, const CombineArgs& args) {
  internode::check_domain(domain);
  check_range("num_sms", args.routes.num_sms, 1, layout::kMaxRowBlocks);
  check_range("num_tokens", args.num_tokens, 0, INT32_MAX);
  check_range("topk", args.topk, 0, layout::kMaxTopk);
  auto bits = reinterpret_cast<std::uintptr_t>(args.out) | static_cast<std::uint64_t>(args.out_stride);
  for (int b = 0; b < 2; ++b)
    if (args.bias[b] != nullptr)
      bits |= reinterpret_cast<std::uintptr_t>(args.bias[b]) | static_cast<std::uint64_t>(args.bias_stride[b]);
  if (bits % 16 != 0) throw ArgumentError("out, biases and their strides have to be multiples of 16 bytes");
}

// Calls `body` with a value of the type of numbers.
template <typename Body>
void with_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
  throw ArgumentError("type is " + std::to_string(static_cast<int>(type)) + "; allowed: kBf16, kFp16, kFp32");
}

template <typename Network>
void launch_combine(const RailDomain& domain, const Network& network, const CombineArgs& args, Stream stream) {
  check(domain, args);
  CombineParams params{args, {}, args.hidden * (args.type == SumType::kFp32 ? 4 : 2)};
  if (params.row_bytes < 16 || params.row_bytes % 16 != 0)
    throw ArgumentError("rows of " + std::to_string(params.row_bytes) + " bytes; allowed: multiples of 16");
  params.rail_row =
      layout::RailRow(static_cast<std::size_t>(params.row_bytes), 0, 0, 4 * static_cast<std::size_t>(args.topk), 0);
  check_row(domain, params.rail_row.stride);
  with_type(args.type, [&](auto number) {
    launch(combine_kernel<Network, decltype(number)>, num_blocks(domain, args.routes.num_sms, RailTuning::kSumWarps),
           RailTuning::kSumWarps, sizeof(CombineShared), stream, false, "launch of combine between nodes", domain,
           network, params);
  });
}

template <typename Network>
void load_combine() {
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_type(type, [](auto number) {
      load_kernel(combine_kernel<Network, decltype(number)>, static_cast<int>(sizeof(CombineShared)));
    });
}

}  // namespace deep_moe::kernels::internode
