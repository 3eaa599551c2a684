// Combine: announce, pull, sum, tell the holders, wait for the pullers.
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "kernels/intranode/combine.cuh"
#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels {
namespace {

// C1 to C4 of a warp that sums rows. kRows: the most rows of a sum that come by the copy engine; 0 without it.
// kRowsFit: the call has gone well so far. kNone: leave. Else as from wait_for_peers().
template <typename T, int kRows>
__device__ __forceinline__ layout::NotifyOutcome sum_units(const WaitScope& scope, const CombineParams& params,
                                                           char* shared, std::uint32_t* trouble) {
  using layout::NotifyOutcome;
  constexpr bool kFewRows = kRows == 2 || kRows == 4;  // a set has room for all that there can be
  constexpr int kPerLane = kFewRows ? 1 : 2;
  constexpr int kVectors = kRows == 2 ? CombineTuning::kVectors2 : kRows == 4 ? CombineTuning::kVectors4 : 0;
  const CombineArgs& args = params.args;
  const Units& units = params.units;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, num_ranks = scope.domain.num_ranks;
  const CombineShared parts(params.ring, num_ranks);
  Holder* holders = reinterpret_cast<Holder*>(shared + parts.holders);
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(shared + parts.barriers) + warp * CombineRing::kSets;
  if constexpr (kRows > 0) {
    if (thread % 32 == 0) {
      for (int i = 0; i < CombineRing::kSets; ++i) ptx::mbarrier_init(barriers + i, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // C1. Each warp's first positions come meanwhile.
  Tickets tickets(scope, units.count, params.ring.num_warps);
  const Unit first(units, tickets.first());
  Unit next_unit(units, tickets.second());
  const TokenPositions<kPerLane> first_words(args, num_ranks, first.token);
  TokenPositions<kPerLane> next_words(args, num_ranks, next_unit.token);
  tickets.ask();
  const NotifyOutcome outcome = wait_for_peers(scope, args.start, trouble);
  if (outcome != NotifyOutcome::kRowsFit) {
    tickets.receive();  // the counter is cleared when all have come
    return outcome;
  }
  // C2.
  const bool found = thread >= num_ranks || find_holder(scope, args, thread, holders + thread);
  if (!__syncthreads_and(found)) return NotifyOutcome::kNone;
  if constexpr (kRows > 0)
    ptx::fence_proxy_async();  // peers' rows, acquired above, before the loads of the copy engine
  __syncwarp();

  PullPipe<kPerLane, kVectors> pipe(params, shared + warp * params.ring.bytes(), barriers);
  RowList<kPerLane> current(params, holders, first_words, first), next(first);
  if constexpr (kRows > 0) pipe.load_ahead(current, next);
#pragma unroll 1
  while (current.unit.token < args.num_tokens) {
    next = RowList<kPerLane>(params, holders, next_words, next_unit);
    next_unit = Unit(units, tickets.receive());
    tickets.ask();
    next_words = TokenPositions<kPerLane>(args, num_ranks, next_unit.token);
    if (kFewRows || (kRows > 0 && pipe.holds(current))) {
      if constexpr (!kFewRows) pipe.load_ahead(current, next);  // the unit before may not have come here
      char* out = static_cast<char*>(args.out) + current.unit.token * args.out_stride;
#pragma unroll 1
      for (int chunk = current.unit.first_chunk; chunk < current.unit.end_chunk; ++chunk) {
        if (current.count > 0 && !pipe.wait(scope)) return NotifyOutcome::kNone;
        sum_set<T, kRows>(pipe.set(), current.count, params.ring.vectors, out + params.chunk_begin(chunk),
                          params.bytes_of(chunk), [&] {
                            if (current.count > 0) pipe.release();
                            pipe.load_ahead(current, next);
                          });
      }
    } else {
      sum_by_loads<T, kRows == 0 ? CombineTuning::kVectorsInFlight : 1>(params, current);
    }
    pipe.advance(current);
    current = next;
  }
  return NotifyOutcome::kRowsFit;
}

// The same for the warps that sum top-k weights.
__device__ __forceinline__ layout::NotifyOutcome sum_weights(const WaitScope& scope, const CombineParams& params,
                                                             char* shared, std::uint32_t* trouble) {
  using layout::NotifyOutcome;
  const NotifyOutcome outcome = wait_for_peers(scope, params.args.start, trouble);
  if (outcome != NotifyOutcome::kRowsFit) return outcome;
  if (!__syncthreads_and(true)) return NotifyOutcome::kNone;
  const CombineShared parts(params.ring, scope.domain.num_ranks);
  add_weights(params.args, scope.domain.num_ranks, reinterpret_cast<const Holder*>(shared + parts.holders),
              (static_cast<int>(threadIdx.x / 32) - params.ring.num_warps) * static_cast<int>(gridDim.x) +
                  static_cast<int>(blockIdx.x),
              CombineTuning::kWeightWarps * static_cast<int>(gridDim.x));
  return NotifyOutcome::kRowsFit;
}

template <typename T, int kRows>
__device__ void combine_block(const DeviceDomain& domain, const CombineParams& params, char* shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;
  const CombineArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&domain.words.state(domain.workspaces[domain.rank]).epoch) + 1};
  announce_call(scope, args.start, args.num_tokens);
  const NotifyOutcome outcome = thread / 32 < params.ring.num_warps
                                    ? sum_units<T, kRows>(scope, params, shared, &trouble)
                                    : sum_weights(scope, params, shared, &trouble);
  if (outcome == NotifyOutcome::kFailed) {  // in all threads
    if (thread == 0)
      tell_host(args.start.sequence, &domain.host_words.outcome(domain.host), static_cast<std::uint32_t>(outcome));
    return;
  }
  if (!__syncthreads_and(outcome != NotifyOutcome::kNone)) return;

  // C6: every block tells every holder; the first one waits for all pullers.
  const bool rows_move = outcome == NotifyOutcome::kRowsFit;
  post_block_done(scope, !rows_move);
  if (blockIdx.x != 0) return;
  const bool ok = wait_for_blocks(scope, layout::WaitPhase::kPullDone, !rows_move);
  if (thread == 0) finish(scope, args.start.sequence, ok ? outcome : NotifyOutcome::kFailed);
}

template <typename T, int kRows>
__global__ void __launch_bounds__(32 * (CombineTuning::kMaxWarps + CombineTuning::kWeightWarps), 1)
    combine_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  if constexpr (kRows == 0 || ptx::kHasTma) combine_block<T, kRows>(domain, params, dynamic_shared);
}

// Calls `body` with a value of the type of numbers.
template <typename Body>
void with_sum_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
  throw ArgumentError("type is " + std::to_string(static_cast<int>(type)) + "; allowed: kBf16, kFp16, kFp32");
}

int num_blocks(const CombineArgs& args) { return std::min(args.num_sms, layout::kMaxRowBlocks); }

CombineParams derive(const CombineArgs& args, int num_ranks) {
  CombineParams params;
  params.args = args;
  params.args.start.hash = layout::signature_hash(args.start.signature);
  params.row_bytes = args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
  if (params.args.bias[0] == nullptr) {
    std::swap(params.args.bias[0], params.args.bias[1]);
    std::swap(params.args.bias_stride[0], params.args.bias_stride[1]);
  }
  while (params.num_biases < 2 && params.args.bias[params.num_biases] != nullptr) ++params.num_biases;
  const auto alignment = [](const void* data, std::int64_t stride) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(stride));
  };
  params.out_alignment = alignment(args.out, args.out_stride);
  for (int b = 0; b < 2; ++b)
    params.bias_alignment[b] = alignment(params.args.bias[b], params.args.bias[b] ? params.args.bias_stride[b] : 0);
  const bool aligned = (params.out_alignment & params.bias_alignment[0] & params.bias_alignment[1]) == 16;

  // Chunks of whole vectors for all lanes, but for the last.
  CombineRing ring = CombineTuning::ring(num_ranks + params.num_biases);
  const std::int64_t steps = (params.row_bytes + 511) / 512;
  const std::int64_t chunks = (steps + ring.vectors - 1) / ring.vectors,
                     chunk_bytes = (steps + chunks - 1) / chunks * 512;
  const std::int64_t num_chunks = (params.row_bytes + chunk_bytes - 1) / chunk_bytes;
  params.chunk_bytes = static_cast<int>(chunk_bytes);
  params.last_bytes = static_cast<int>(params.row_bytes - (num_chunks - 1) * chunk_bytes);
  if (!aligned || args.use_vector_path || !has_copy_engine()) ring.max_rows = 0;
  params.ring = ring;
  params.units = Units(args.num_tokens, static_cast<int>(num_chunks), ring.num_warps * num_blocks(args));
  return params;
}

// The kernel for rows of a type, as many as a set of the ring takes.
template <typename T>
auto kernel_for(const CombineRing& ring) {
  return ring.max_rows == 0   ? combine_kernel<T, 0>
         : ring.max_rows <= 2 ? combine_kernel<T, 2>
         : ring.max_rows <= 4 ? combine_kernel<T, 4>
                              : combine_kernel<T, 16>;
}

void check(const DeviceDomain& domain, const CombineArgs& args) {
  check_domain(domain);
  check_range("num_sms", args.num_sms, 1, INT32_MAX);
  check_range("num_tokens", args.num_tokens, 0, INT32_MAX);
  check_range("topk", args.topk, 0, layout::kMaxTopk);
  const std::int64_t per_vector = args.type == SumType::kFp32 ? 4 : 8;
  check_range("hidden", args.hidden, per_vector, INT64_MAX / 8);
  if (args.hidden % per_vector != 0)
    throw ArgumentError("hidden is " + std::to_string(args.hidden) + "; allowed: multiples of " +
                        std::to_string(per_vector) + " (rows of 16-byte pieces)");
  if (args.start.place.offset % 16 != 0)
    throw ArgumentError("start.place.offset is " + std::to_string(args.start.place.offset) +
                        "; allowed: multiples of 16");
  if (args.rank_prefix_matrix == nullptr || args.segment_bases == nullptr)
    throw ArgumentError("rank_prefix_matrix and segment_bases must not be null");
  if (args.num_tokens > 0 && (args.out == nullptr || args.send_position == nullptr))
    throw ArgumentError("out and send_position must not be null where there are tokens");
  if (args.num_tokens > 0 && args.topk > 0 && args.combined_topk_weights == nullptr)
    throw ArgumentError("combined_topk_weights must not be null where there are tokens and weights");
}

}  // namespace

void combine(const DeviceDomain& domain, CombineArgs args, Stream stream) {
  check(domain, args);
  const CombineParams params = derive(args, domain.num_ranks);
  const int num_warps = params.ring.num_warps + (args.topk > 0 ? CombineTuning::kWeightWarps : 0);
  with_sum_type(args.type, [&](auto number) {
    launch(kernel_for<decltype(number)>(params.ring), num_blocks(args), num_warps,
           CombineShared(params.ring, domain.num_ranks).total, stream, false, "launch of combine", domain, params);
  });
}

void prepare_combine() {
  std::size_t most = 0;
  for (int num_rows = 1; num_rows <= layout::kMaxKernelRanks + 2; ++num_rows)
    most = std::max(most, CombineShared(CombineTuning::ring(num_rows), layout::kMaxKernelRanks).total);
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
    with_sum_type(type, [&](auto number) {
      using T = decltype(number);
      for (const auto kernel :
           {combine_kernel<T, 0>, combine_kernel<T, 2>, combine_kernel<T, 4>, combine_kernel<T, 16>})
        load_kernel(kernel, static_cast<int>(most));
    });
  }
}

}  // namespace deep_moe::kernels
