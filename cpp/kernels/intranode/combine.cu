// Combine: announce, pull, sum, tell the holders, wait for the pullers.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/combine.cuh"
#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels {
namespace {

// C4 with the copy engine: all chunks of one token. False: the block must leave.
template <typename T>
__device__ __forceinline__ bool sum_by_pipe(const CombineParams& params, PullPipe& pipe, const TokenRows& current,
                                            const TokenRows& next, std::int64_t token) {
  const bool is_pair = params.args.bias[0] == nullptr && params.args.bias[1] == nullptr && current.count == 2;
  for (int chunk = 0; chunk < params.num_chunks; ++chunk) {
    if (!pipe.wait(current.count)) return false;
    if (is_pair && params.bytes_of(chunk) == CombineTuning::kChunkBytes) {
      sum_full_pair<T>(params, pipe, token, chunk);
    } else {
      sum_chunk<T>(params, pipe, current, token, chunk);
    }
    pipe.release(current.count);
    pipe.load_ahead(current, next);
  }
  return true;
}

// C3 to C5: this warp's tokens. False: the block must leave.
template <typename T, bool kTma>
__device__ bool sum_tokens(const WaitScope& scope, const CombineParams& params, const Holder* holders,
                           const TokenPositions& first_words, char* ring, std::uint64_t* barriers, const char** rows) {
  const CombineArgs& args = params.args;
  const int num_ranks = scope.domain.num_ranks;
  PullPipe pipe(scope, params, ring, barriers);
  Tickets tickets(scope, args.num_tokens);
  std::int64_t token = tickets.first();
  tickets.ask();
  const float** weights = reinterpret_cast<const float**>(rows + 2 * num_ranks);
  TokenRows current{rows, weights}, next{rows + num_ranks, weights + num_ranks};
  list_rows(params, holders, first_words, &current);
  if constexpr (kTma) pipe.load_ahead(current, next);
  std::int64_t next_token = tickets.receive();
  tickets.ask();
  TokenPositions next_words(args, num_ranks, next_token);
  WeightSums current_weights, next_weights;
  current_weights.load(current, args.topk);

  while (token < args.num_tokens) {
    list_rows(params, holders, next_words, &next);
    next_weights.load(next, args.topk);
    const std::int64_t after = tickets.receive();
    tickets.ask();
    const TokenPositions after_words(args, num_ranks, after);
    if (args.topk > 0) current_weights.store(current, args, token);

    if constexpr (kTma) {
      pipe.load_ahead(current, next);
      if (pipe.holds(current)) {
        if (!sum_by_pipe<T>(params, pipe, current, next, token)) return false;
      } else {
        sum_by_loads<T, 1>(params, current, token);
      }
      pipe.advance(current);
    } else {
      sum_by_loads<T, CombineTuning::kVectorsInFlight>(params, current, token);
    }

    __syncwarp();
    const TokenRows done = current;
    current = next, next = done;
    token = next_token, next_token = after;
    next_words = after_words;
    current_weights = next_weights;
  }
  return true;
}

template <typename T, bool kTma>
__device__ void combine_block(const DeviceDomain& domain, const CombineParams& params, char* shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;
  __shared__ bool is_last;
  const CombineArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, rank = domain.rank,
            num_ranks = domain.num_ranks;
  const CombineShared parts(kTma, static_cast<int>(blockDim.x / 32), num_ranks);
  std::uint64_t* barriers =
      reinterpret_cast<std::uint64_t*>(shared + parts.barriers) + warp * CombineTuning::kMaxStages;
  Holder* holders = reinterpret_cast<Holder*>(shared + parts.holders);
  const char** rows = reinterpret_cast<const char**>(shared + parts.rows) + 4 * warp * num_ranks;
  if constexpr (kTma) {
    if (thread % 32 == 0) {
      for (int i = 0; i < 1 << params.stage_shift; ++i) ptx::mbarrier_init(barriers + i, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // C1. Each warp's first positions come meanwhile.
  const TokenPositions first_words(args, num_ranks, Tickets::first_of_warp());
  layout::NotifyState& state = domain.words.state(domain.workspaces[rank]);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&state.epoch) + 1};
  const NotifyOutcome outcome = open_call(scope, args.start, args.num_tokens, &trouble);
  if (outcome == NotifyOutcome::kFailed) {
    if (thread == 0)
      tell_host(args.start.sequence, &domain.host_words.outcome(domain.host), static_cast<std::uint32_t>(outcome));
    return;
  }
  if (outcome == NotifyOutcome::kRowsFit) {
    // C2.
    const bool found = thread >= num_ranks || find_holder(scope, args, thread, holders + thread);
    if (!__syncthreads_and(found)) return;
    if constexpr (kTma) ptx::fence_proxy_async();  // peers' rows, acquired above, before the loads of the copy engine

    char* ring = shared + static_cast<std::size_t>(warp) * CombineTuning::kRingBytes;
    if (!__syncthreads_and(sum_tokens<T, kTma>(scope, params, holders, first_words, ring, barriers, rows))) return;
  }

  // C6: the last block tells every holder, and waits for all pullers.
  if (!last_to_finish(scope, &is_last)) return;
  bool ok = true;
  if (outcome == NotifyOutcome::kRowsFit && thread < num_ranks) {
    ptx::st_release_sys(domain.words.pull_done(domain.workspaces[thread], rank), scope.epoch);
    const std::uint64_t* word = domain.words.pull_done(scope.mine(), thread);
    std::uint64_t seen;
    ok = wait_until(
        scope, layout::WaitPhase::kPullDone, thread, scope.epoch, [&] { return ptx::ld_acquire_sys(word); },
        [&](std::uint64_t epoch) { return epoch >= scope.epoch; }, &seen);
  }
  ok = __syncthreads_and(ok);
  if (thread == 0) finish(scope, args.start.sequence, ok ? outcome : NotifyOutcome::kFailed);
}

template <typename T, bool kTma>
__global__ void __launch_bounds__(32 * CombineTuning::kMaxWarps, 1)
    combine_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  if constexpr (!kTma || ptx::kHasTma) combine_block<T, kTma>(domain, params, dynamic_shared);
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

CombineParams derive(const CombineArgs& args, int num_ranks) {
  CombineParams params;
  params.args = args;
  params.args.start.hash = layout::signature_hash(args.start.signature);
  params.row_bytes = args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
  params.stage_shift = CombineTuning::stage_shift(num_ranks);
  const std::int64_t vectors = params.row_bytes / 16;
  const std::int64_t most = (CombineTuning::kRingBytes >> params.stage_shift) / 16;
  const std::int64_t chunks = (vectors + most - 1) / most, per_chunk = (vectors + chunks - 1) / chunks;
  params.chunk_bytes = static_cast<int>(16 * per_chunk);
  params.num_chunks = static_cast<int>((vectors + per_chunk - 1) / per_chunk);
  params.last_bytes = static_cast<int>(params.row_bytes - (params.num_chunks - 1) * 16 * per_chunk);
  const auto alignment = [](const void* data, std::int64_t stride) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(stride));
  };
  params.out_alignment = alignment(args.out, args.out_stride);
  for (int b = 0; b < 2; ++b) params.bias_alignment[b] = alignment(args.bias[b], args.bias_stride[b]);
  return params;
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
  const bool aligned = (params.out_alignment & params.bias_alignment[0] & params.bias_alignment[1]) == 16;
  const int num_warps = CombineTuning::num_warps(domain.num_ranks);
  const bool tma = aligned && !args.use_vector_path && has_copy_engine();
  with_sum_type(args.type, [&](auto number) {
    using T = decltype(number);
    launch(tma ? combine_kernel<T, true> : combine_kernel<T, false>, args.num_sms, num_warps,
           CombineShared(tma, num_warps, domain.num_ranks).total, stream, false, "launch of combine", domain, params);
  });
}

void prepare_combine() {
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
    with_sum_type(type, [](auto number) {
      using T = decltype(number);
      std::size_t most = 0;
      for (int num_ranks = 1; num_ranks <= layout::kMaxKernelRanks; ++num_ranks)
        most = std::max(most, CombineShared(true, CombineTuning::num_warps(num_ranks), num_ranks).total);
      load_kernel(combine_kernel<T, true>, static_cast<int>(most));
      load_kernel(combine_kernel<T, false>, static_cast<int>(most));
    });
  }
}

}  // namespace deep_moe::kernels
