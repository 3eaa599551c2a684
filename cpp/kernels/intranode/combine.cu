// Combine: announce, pull, sum, tell the holders, wait for the pullers.
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "kernels/intranode/combine.cuh"
#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels {
namespace {

// Whether a set has room for all rows that there can be. kRows: the most rows of a sum that come by the copy engine; 0
// without it.
template <int kRows>
constexpr bool kHoldsAll = kRows > 0 && kRows < 16;

// C4 with the copy engine: all chunks of one unit. False: the block must leave.
template <typename T, int kPerLane, int kRows>
__device__ __forceinline__ bool sum_by_pipe(const WaitScope& scope, const CombineParams& params,
                                            PullPipe<kPerLane, kRows>& pipe, const RowList<kPerLane>& current,
                                            const RowList<kPerLane>& next) {
  char* out = static_cast<char*>(params.args.out) + current.unit.token * params.args.out_stride;
#pragma unroll 1
  for (int chunk = current.unit.first_chunk; chunk < current.unit.end_chunk; ++chunk) {
    if (current.count > 0 && !pipe.wait(scope)) return false;
    sum_set<T, kRows>(pipe.set(), current.count, out + params.chunk_begin(chunk), params.bytes_of(chunk), [&] {
      if (current.count > 0) pipe.release();
      pipe.load_ahead(current, next);
    });
  }
  return true;
}

// C3, C4: the units of a warp that sums rows, the first two of which are given. False: the block must leave.
template <typename T, int kRows, int kPerLane>
__device__ __forceinline__ bool sum_units(const WaitScope& scope, const CombineParams& params, const Holder* holders,
                                          Tickets& tickets, const Unit& first, Unit next_unit,
                                          const TokenPositions<kPerLane>& first_words,
                                          TokenPositions<kPerLane> next_words, char* sets, std::uint64_t* barriers) {
  const CombineArgs& args = params.args;
  PullPipe<kPerLane, kRows> pipe(params, sets, barriers);
  RowList<kPerLane> current(params, holders, first_words, first), next(first);
  if constexpr (kRows > 0) pipe.load_ahead(current, next);
#pragma unroll 1
  while (current.unit.token < args.num_tokens) {
    next = RowList<kPerLane>(params, holders, next_words, next_unit);
    next_unit = Unit(params.units, tickets.receive());
    tickets.ask();
    next_words = TokenPositions<kPerLane>(args, scope.domain.num_ranks, next_unit.token);
    bool by_pipe = false;
    if constexpr (kRows > 0) {
      by_pipe = kHoldsAll<kRows> || pipe.holds(current);
      if constexpr (!kHoldsAll<kRows>) pipe.load_ahead(current, next);  // the unit before may not have come this way
      if (by_pipe && !sum_by_pipe<T>(scope, params, pipe, current, next)) return false;
    }
    if constexpr (!kHoldsAll<kRows>) {
      if (!by_pipe) sum_by_loads<T, kRows == 0 ? CombineTuning::kVectorsInFlight : 1>(params, current);
    }
    pipe.advance(current);
    current = next;
  }
  return true;
}

template <typename T, int kRows>
__device__ void combine_block(const DeviceDomain& domain, const CombineParams& params, char* shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;
  constexpr int kPerLane = kHoldsAll<kRows> ? 1 : 2;
  const CombineArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, num_ranks = domain.num_ranks;
  const bool sums_rows = warp < params.ring.num_warps;  // the others sum weights
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&domain.words.state(domain.workspaces[domain.rank]).epoch) + 1};
  announce_call(scope, args.start, args.num_tokens);
  const CombineShared parts(params.ring, num_ranks);
  Holder* holders = reinterpret_cast<Holder*>(shared + parts.holders);
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(shared + parts.barriers) + warp * CombineRing::kSets;
  if constexpr (kRows > 0) {
    if (thread % 32 == 0 && sums_rows) {
      for (int i = 0; i < CombineRing::kSets; ++i) ptx::mbarrier_init(barriers + i, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // C1. Each warp's first positions come meanwhile.
  Tickets tickets(scope, sums_rows ? params.units.count : 0, params.ring.num_warps);
  const Unit first(params.units, tickets.first()), second(params.units, tickets.second());
  const TokenPositions<kPerLane> first_words(args, num_ranks, first.token), second_words(args, num_ranks, second.token);
  tickets.ask();
  const NotifyOutcome outcome = wait_for_peers(scope, args.start, &trouble);
  if (outcome == NotifyOutcome::kFailed) {
    if (thread == 0)
      tell_host(args.start.sequence, &domain.host_words.outcome(domain.host), static_cast<std::uint32_t>(outcome));
    return;
  }
  const bool rows_move = outcome == NotifyOutcome::kRowsFit;
  if (rows_move) {
    // C2.
    const bool found = thread >= num_ranks || find_holder(scope, args, thread, holders + thread);
    if (!__syncthreads_and(found)) return;
    if constexpr (kRows > 0)
      ptx::fence_proxy_async();  // peers' rows, acquired above, before the loads of the copy engine
    bool ok = true;
    if (sums_rows) {
      ok = sum_units<T, kRows>(scope, params, holders, tickets, first, second, first_words, second_words,
                               shared + warp * params.ring.bytes(), barriers);
    } else {
      const int num_blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
      add_weights(args, num_ranks, holders, (warp - params.ring.num_warps) * num_blocks + block,
                  CombineTuning::kWeightWarps * num_blocks);
    }
    if (!__syncthreads_and(ok)) return;
  } else {
    tickets.receive();  // the counter is cleared when all have come
  }

  // C6: every block tells every holder; the first one waits for all pullers.
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
auto kernel_for(int max_rows) {
  switch (max_rows) {
    case 0: return combine_kernel<T, 0>;
    case 2: return combine_kernel<T, 2>;
    case 3: return combine_kernel<T, 3>;
    case 4: return combine_kernel<T, 4>;
    case 8: return combine_kernel<T, 8>;
    default: return combine_kernel<T, 16>;
  }
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
  if (reinterpret_cast<std::uintptr_t>(args.own_rows) % 16 != 0)
    throw ArgumentError("own_rows must be 16-byte aligned");
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
    launch(kernel_for<decltype(number)>(params.ring.max_rows), num_blocks(args), num_warps,
           CombineShared(params.ring, domain.num_ranks).total, stream, false, "launch of combine", domain, params);
  });
}

void prepare_combine() {
  std::size_t most = 0;
  for (int num_rows = 1; num_rows <= layout::kMaxKernelRanks + 2; ++num_rows)
    most = std::max(most, CombineShared(CombineTuning::ring(num_rows), layout::kMaxKernelRanks).total);
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
    with_sum_type(type, [&](auto number) {
      for (const int max_rows : {0, 2, 3, 4, 8, 16})
        load_kernel(kernel_for<decltype(number)>(max_rows), static_cast<int>(most));
    });
  }
}

}  // namespace deep_moe::kernels
