// Dispatch: rows to their final place, flags, the wait for everybody's.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/dispatch.cuh"
#include "kernels/intranode/launch.hpp"
#include "kernels/ptx/launch.cuh"

namespace deep_moe::kernels {
namespace {

// R0: what notify says, or what peers announce for a call that none precedes. The same result in all threads.
// kRowsFit: rows move; `route` says where, in the first threads, one a destination. kFailed: leave. Anything else: no
// rows, but end the call.
__device__ __forceinline__ layout::NotifyOutcome begin_call(const DispatchArgs& args, const WaitScope& scope,
                                                            std::uint32_t* trouble, layout::Route* route) {
  using layout::NotifyOutcome;
  const int thread = static_cast<int>(threadIdx.x), num_ranks = scope.domain.num_ranks;
  if (args.cached) {
    const NotifyOutcome outcome = wait_for_peers(scope, args.start, trouble);
    if (outcome != NotifyOutcome::kRowsFit) return outcome;
    if (thread < num_ranks) *route = find_route(scope, args.rank_prefix_matrix, thread);
    return check_places(num_ranks, *route);
  }
  // Notify has deadlines of its own, and always says how it has ended.
  const layout::NotifyState& state = scope.state();
  const auto notified = [&](auto load) {
    for (;;) {
      const std::uint64_t word = load();
      if (layout::has_tag(word, scope.epoch)) return word;
      if (ptx::ld_relaxed_gpu(&state.failed) != 0) return std::uint64_t{0};
    }
  };
  bool ok = true;
  if (thread < layout::kMaxNotifyBlocks) {
    const std::uint64_t* words = scope.domain.words.position_words(scope.mine());
    ok = notified([&] {
           const std::uint64_t first = ptx::ld_relaxed_gpu(words), own = ptx::ld_acquire_gpu(words + thread);
           const bool is_none =
               layout::has_tag(first, scope.epoch) && layout::tagged_count(first) <= static_cast<std::uint32_t>(thread);
           return is_none ? first : own;
         }) != 0;
  } else if (thread == layout::kMaxNotifyBlocks) {
    const std::uint64_t word = notified([&] { return ptx::ld_acquire_gpu(&state.outcome); });
    *trouble = word == 0 ? static_cast<std::uint32_t>(NotifyOutcome::kFailed) : layout::tagged_count(word);
  }
  if (!__syncthreads_and(ok)) return NotifyOutcome::kFailed;
  const auto outcome = static_cast<NotifyOutcome>(*trouble);
  if (outcome == NotifyOutcome::kRowsFit && thread < num_ranks) *route = scope.domain.words.route(scope.mine(), thread);
  return outcome;
}

// R2, R3: this warp's units, the first two of which are given. False: the block must leave.
template <bool kTma, int kPerLane>
__device__ __forceinline__ bool send_units(const WaitScope& scope, const DispatchParams& params, const Target* targets,
                                           const ScaleItems& scales, Tickets& tickets, Unit unit, Unit next,
                                           TokenWords<kPerLane> words, RowPipe& pipe, char** destinations) {
  const DispatchArgs& args = params.args;
  const int lane = threadIdx.x % 32, num_ranks = scope.domain.num_ranks;
  words.load_scales(args, scales, unit);
  bool ok = true;
#pragma unroll 1
  while (ok && unit.token < args.num_tokens) {
    tickets.ask();
    TokenWords<kPerLane> next_words;
    next_words.load_positions(args, num_ranks, next.token);
    next_words.load_inputs(args, next);
    next_words.load_scales(args, scales, next);

    words.place_rows(targets);
    const std::uint64_t mask = words.mask();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int dst = lane + 32 * i;
      if (words.position[i] < 0) continue;
      const int place = __popcll(mask & ((std::uint64_t{1} << dst) - 1));
      destinations[place] = targets[dst].x + words.position[i] * args.row_bytes;
    }
    __syncwarp();
    if constexpr (kTma) {
      if (lane == 0) ok = pipe.send(scope, unit, next, destinations, __popcll(mask));
      ok = __shfl_sync(0xffffffffu, ok, 0);
    } else {
      copy_unit(params, unit, destinations, __popcll(mask));
    }
    for (std::uint64_t rest = unit.is_first_part() ? mask : 0; rest != 0; rest &= rest - 1) {
      const int dst = __ffsll(static_cast<long long>(rest)) - 1;
      store_words(params, scales, targets[dst], words, unit.token, words.position_at(dst));
    }
    __syncwarp();
    unit = next;
    next = Unit(params.units, tickets.receive());
    words = next_words;
  }
  return ok;
}

template <bool kTma, int kPerLane>
__device__ void dispatch_block(const DeviceDomain& domain, const DispatchParams& params, char* shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;
  const DispatchArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), rank = domain.rank, num_ranks = domain.num_ranks;
  const int warp = thread / 32, num_warps = static_cast<int>(blockDim.x / 32);
  const DispatchShared parts(kTma, num_warps, num_ranks);
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(shared + parts.barriers) + warp * DispatchTuning::kStages;
  Target* targets = reinterpret_cast<Target*>(shared + parts.targets);
  char** destinations = reinterpret_cast<char**>(shared + parts.destinations) + warp * num_ranks;
  RowPipe pipe(params, shared + static_cast<std::size_t>(warp) * DispatchTuning::kStages * DispatchTuning::kChunkBytes,
               barriers);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&domain.words.state(domain.workspaces[domain.rank]).epoch) + 1};
  if (args.cached) announce_call(scope, args.start, args.num_tokens);

  // R0: behind notify this launch starts early. Rows are there since before notify started; all else waits for what
  // notify says, which is before its end.
  Tickets tickets(scope, params.units.count, num_warps);
  const Unit first(params.units, tickets.first()), second(params.units, tickets.second());
  if constexpr (kTma) {
    if (thread % 32 == 0) {
      for (int i = 0; i < DispatchTuning::kStages; ++i) ptx::mbarrier_init(barriers + i, 1);
      ptx::fence_mbarrier_init();
      pipe.load_ahead(first, second);
    }
  }
  TokenWords<kPerLane> words;
  words.load_inputs(args, first);
  layout::Route route;
  const NotifyOutcome outcome = begin_call(args, scope, &trouble, &route);
  const auto leave =
      [&] {  // not before what was loaded has come: the copy engine would write to another block's memory
        if constexpr (kTma) {
          if (thread % 32 == 0) pipe.drain(scope);
        }
      };

  const bool rows_move = outcome == NotifyOutcome::kRowsFit;
  if (rows_move) {
    words.load_positions(args, num_ranks, first.token);
    // R1.
    bool ok = true, columns = false;
    if (thread < num_ranks) {
      ok = aim(scope, params, thread, route, targets + thread);
      columns = targets[thread].column_scales != 0;
    }
    const bool any_columns = __syncthreads_or(columns);
    if (!__syncthreads_and(ok)) return leave();

    const ScaleItems scales(params, any_columns);
    ok = send_units<kTma>(scope, params, targets, scales, tickets, first, second, words, pipe, destinations);
    fill_tail(params, targets[rank]);
    if constexpr (kTma) ptx::bulk_wait_group<0>();  // R5: each issuing lane's rows are written
    if (!__syncthreads_and(ok)) return leave();
  } else {
    leave();
    if (args.cached && outcome == NotifyOutcome::kFailed && thread == 0)
      tell_host(args.start.sequence, &domain.host_words.outcome(domain.host), static_cast<std::uint32_t>(outcome));
    if (outcome == NotifyOutcome::kFailed) return;
  }

  // R5: every block tells every peer; the first one waits for all of theirs.
  post_block_done(scope, !rows_move);
  if (blockIdx.x != 0) return;
  const bool ok = wait_for_blocks(scope, layout::WaitPhase::kRowsDone, !rows_move);
  if (thread == 0) finish(scope, args.cached ? args.start.sequence : 0, ok ? outcome : NotifyOutcome::kFailed);
}

template <bool kTma, int kPerLane>
__global__ void __launch_bounds__(32 * DispatchTuning::num_warps(kTma), 1)
    dispatch_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  if constexpr (!kTma || ptx::kHasTma) dispatch_block<kTma, kPerLane>(domain, params, dynamic_shared);
  // What comes behind this launch comes behind notify as well.
  if (!params.args.cached) ptx::griddepcontrol_wait();
}

DispatchParams derive(const DispatchArgs& args, int num_warps) {
  DispatchParams params;
  params.args = args;
  params.args.start.hash = layout::signature_hash(args.start.signature);
  params.format.row_bytes = args.row_bytes;
  params.format.scale_bytes = args.scales.num_items * args.scales.item_bytes;
  params.format.topk = args.ids.topk;
  params.format.idx_bytes = args.ids.topk > 0 ? args.ids.id_bytes : 0;
  params.format.weight_bytes = args.has_weights || args.topk_weights != nullptr ? 4 : 0;
  // Chunks of equal length, as near as 16 bytes allow.
  const std::int64_t vectors = args.row_bytes / 16, most = DispatchTuning::kChunkBytes / 16;
  const std::int64_t chunks = std::max<std::int64_t>(1, (vectors + most - 1) / most);
  const std::int64_t per_chunk = std::max<std::int64_t>(1, (vectors + chunks - 1) / chunks);
  params.chunk_bytes = static_cast<int>(16 * per_chunk);
  params.units = Units(args.num_tokens, static_cast<int>((vectors + per_chunk - 1) / per_chunk), num_warps);
  const ScaleRows& scales = args.scales;
  if (scales.num_items == 1 || scales.item_stride == scales.item_bytes) {
    params.wide_item_bytes =
        std::min(8, common_alignment(reinterpret_cast<std::uintptr_t>(scales.data) |
                                     static_cast<std::uint64_t>(scales.row_stride | params.format.scale_bytes)));
  }
  return params;
}

void check(const DeviceDomain& domain, const DispatchArgs& args) {
  check_domain(domain);
  check_range("num_sms", args.num_sms, 1, INT32_MAX);
  check_range("num_tokens", args.num_tokens, 0, INT32_MAX);
  check_range("row_bytes", args.row_bytes, 16, INT64_MAX);
  if (args.row_bytes % 16 != 0)
    throw ArgumentError("row_bytes is " + std::to_string(args.row_bytes) + "; allowed: multiples of 16");
  check_range("scales.num_items", args.scales.num_items, 0, INT32_MAX);
  if (args.scales.num_items > 0) {
    const int bytes = args.scales.item_bytes;
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8)
      throw ArgumentError("scales.item_bytes is " + std::to_string(bytes) + "; allowed: 1, 2, 4, 8");
  }
  if (args.ids.topk > 0) {
    check_ids(args.ids, args.num_experts, 0);
    check_range("ids.num_tokens", args.ids.num_tokens, args.num_tokens, args.num_tokens);
    with_id_type(args.ids.id_bytes, [](auto) {});
  }
  if (args.rank_prefix_matrix == nullptr || args.segment_bases == nullptr)
    throw ArgumentError("rank_prefix_matrix and segment_bases must not be null");
  if (args.num_tokens > 0 && (args.x == nullptr || args.send_position == nullptr))
    throw ArgumentError("x and send_position must not be null where there are tokens");
}

}  // namespace

void dispatch(const DeviceDomain& domain, DispatchArgs args, Stream stream) {
  check(domain, args);
  const int x_alignment =
      common_alignment(reinterpret_cast<std::uintptr_t>(args.x) | static_cast<std::uint64_t>(args.row_stride));
  const bool tma = x_alignment == 16 && !args.use_vector_path && has_copy_engine();
  const int num_warps = DispatchTuning::num_warps(tma), num_blocks = std::min(args.num_sms, layout::kMaxRowBlocks);
  DispatchParams params = derive(args, num_warps * num_blocks);
  params.x_alignment = x_alignment;
  // Behind notify: may start while notify still waits for its peers, which needs no room of this launch.
  const bool one_a_lane = domain.num_ranks <= 32 && args.ids.topk <= 32 && params.num_scale_items() <= 32;
  const auto kernel = tma          ? one_a_lane ? dispatch_kernel<true, 1> : dispatch_kernel<true, 2>
                      : one_a_lane ? dispatch_kernel<false, 1>
                                   : dispatch_kernel<false, 2>;
  launch(kernel, num_blocks, num_warps, DispatchShared(tma, num_warps, domain.num_ranks).total, stream, !args.cached,
         "launch of dispatch", domain, params);
}

void prepare_dispatch() {
  const auto most = [](bool tma) {
    return static_cast<int>(DispatchShared(tma, DispatchTuning::num_warps(tma), layout::kMaxKernelRanks).total);
  };
  load_kernel(dispatch_kernel<true, 1>, most(true));
  load_kernel(dispatch_kernel<true, 2>, most(true));
  load_kernel(dispatch_kernel<false, 1>, most(false));
  load_kernel(dispatch_kernel<false, 2>, most(false));
}

// The code of this build for the chip at hand, which may be of an older kind than the chip.
int loaded_code_version() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, dispatch_kernel<true, 1>), "loading a kernel");
  return std::min(attributes.ptxVersion, attributes.binaryVersion);
}

}  // namespace deep_moe::kernels
