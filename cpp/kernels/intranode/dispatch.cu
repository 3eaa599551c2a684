// Dispatch: rows to their final place, flags, the wait for everybody's.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/dispatch.cuh"
#include "kernels/intranode/launch.hpp"
#include "kernels/ptx/launch.cuh"

namespace deep_moe::kernels {
namespace {

// R2, R3: this warp's tokens. False: the block must leave.
template <bool kTma>
__device__ bool send_tokens(const WaitScope& scope, const DispatchParams& params, const Target* targets,
                            bool any_columns, TokenWords words, RowPipe& pipe, char** destinations) {
  const DispatchArgs& args = params.args;
  const int lane = threadIdx.x % 32, num_ranks = scope.domain.num_ranks;
  const ScaleItems scales(params, any_columns);
  Tickets tickets(scope, args.num_tokens);
  std::int64_t token = tickets.first();
  tickets.ask();
  words.load_scales(args, scales, token);
  bool ok = true;
  while (ok && token < args.num_tokens) {
    const std::int64_t next = tickets.receive();
    tickets.ask();
    TokenWords next_words;
    next_words.load_positions(args, num_ranks, next);
    next_words.load_inputs(args, next);
    next_words.load_scales(args, scales, next);

    words.place_rows(targets);
    const std::uint64_t mask = words.mask();
#pragma unroll
    for (int i = 0; i < TokenWords::kPerLane; ++i) {
      const int dst = lane + 32 * i;
      if (words.position[i] < 0) continue;
      const int place = __popcll(mask & ((std::uint64_t{1} << dst) - 1));
      destinations[place] = targets[dst].x + words.position[i] * args.row_bytes;
    }
    __syncwarp();
    for (std::uint64_t rest = mask; rest != 0; rest &= rest - 1) {
      const int dst = __ffsll(static_cast<long long>(rest)) - 1;
      store_words(params, scales, targets[dst], words, token, words.position_at(dst));
    }
    if constexpr (kTma) {
      if (lane == 0) ok = pipe.send(scope, token, next, destinations, __popcll(mask));
      ok = __shfl_sync(0xffffffffu, ok, 0);
    } else {
      copy_row(params, token, destinations, __popcll(mask));
      __syncwarp();
    }
    token = next;
    words = next_words;
  }
  return ok;
}

template <bool kTma>
__device__ void dispatch_block(const DeviceDomain& domain, const DispatchParams& params, char* shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;
  __shared__ bool is_last;
  const DispatchArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), rank = domain.rank, num_ranks = domain.num_ranks;
  const int warp = thread / 32, num_warps = static_cast<int>(blockDim.x / 32);
  const DispatchShared parts(kTma, num_warps, num_ranks);
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(shared + parts.barriers) + warp * DispatchTuning::kStages;
  Target* targets = reinterpret_cast<Target*>(shared + parts.targets);
  char** destinations = reinterpret_cast<char**>(shared + parts.destinations) + warp * num_ranks;
  RowPipe pipe(params, shared + static_cast<std::size_t>(warp) * DispatchTuning::kStages * DispatchTuning::kChunkBytes,
               barriers);

  // R0: behind notify this launch starts early. Rows are there since before notify started; all else waits for its end.
  if constexpr (kTma) {
    if (thread % 32 == 0) {
      for (int i = 0; i < DispatchTuning::kStages; ++i) ptx::mbarrier_init(barriers + i, 1);
      ptx::fence_mbarrier_init();
      pipe.load_ahead(Tickets::first_of_warp(), args.num_tokens);
    }
  }
  TokenWords words;
  words.load_inputs(args, Tickets::first_of_warp());
  if (!args.cached) ptx::griddepcontrol_wait();
  words.load_positions(args, num_ranks, Tickets::first_of_warp());
  layout::NotifyState& state = domain.words.state(domain.workspaces[rank]);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&state.epoch) + (args.cached ? 1 : 0)};
  const auto leave =
      [&] {  // not before what was loaded has come: the copy engine would write to another block's memory
        if constexpr (kTma) {
          if (thread % 32 == 0) pipe.drain(scope);
        }
      };
  NotifyOutcome outcome;
  if (args.cached) {
    outcome = open_call(scope, args.start, args.num_tokens, &trouble);
    if (outcome == NotifyOutcome::kRowsFit) outcome = check_places(scope, args.rank_prefix_matrix);
  } else {
    const std::uint64_t word = ptx::ld_relaxed_gpu(&state.outcome);
    outcome = static_cast<NotifyOutcome>(layout::tagged_count(word));
    const bool stale = !layout::has_tag(word, scope.epoch) || ptx::ld_relaxed_gpu(&state.failed) != 0;
    if (__syncthreads_or(stale || outcome != NotifyOutcome::kRowsFit)) return leave();
  }
  if (outcome == NotifyOutcome::kFailed) {
    if (args.cached && thread == 0)
      tell_host(args.start.sequence, &domain.host_words.outcome(domain.host), static_cast<std::uint32_t>(outcome));
    return leave();
  }

  if (outcome == NotifyOutcome::kRowsFit) {
    // R1.
    bool ok = true, columns = false;
    if (thread < num_ranks) {
      ok = aim(scope, params, thread, targets + thread);
      columns = targets[thread].column_scales != 0;
    }
    if (!__syncthreads_and(ok)) return leave();
    const bool any_columns = __syncthreads_or(columns);

    ok = send_tokens<kTma>(scope, params, targets, any_columns, words, pipe, destinations);
    fill_tail(params, targets[rank]);
    if constexpr (kTma) ptx::bulk_wait_group<0>();  // R5: each issuing lane's rows are written
    if (!__syncthreads_and(ok)) return leave();
  } else {
    leave();
  }

  // R5: the last block tells every peer, and waits for all of them.
  if (!last_to_finish(scope, &is_last)) return;
  bool ok = true;
  if (outcome == NotifyOutcome::kRowsFit && thread < num_ranks) {
    ptx::st_release_sys(domain.words.rows_done(domain.workspaces[thread], rank), layout::pack_count(scope.epoch, 1));
    const std::uint64_t* word = domain.words.rows_done(scope.mine(), thread);
    std::uint64_t seen;
    ok = wait_until(
        scope, layout::WaitPhase::kRowsDone, thread, layout::pack_count(scope.epoch, 1),
        [&] { return ptx::ld_acquire_sys(word); },
        [&](std::uint64_t value) { return layout::unpack_count(value, scope.epoch) >= 1; }, &seen);
  }
  ok = __syncthreads_and(ok);
  if (args.cached && thread == 0) finish(scope, args.start.sequence, ok ? outcome : NotifyOutcome::kFailed);
}

template <bool kTma>
__global__ void __launch_bounds__(32 * DispatchTuning::num_warps(kTma), 1)
    dispatch_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  if constexpr (!kTma || ptx::kHasTma) dispatch_block<kTma>(domain, params, dynamic_shared);
}

DispatchParams derive(const DispatchArgs& args) {
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
  params.num_chunks = static_cast<int>((vectors + per_chunk - 1) / per_chunk);
  params.x_alignment =
      common_alignment(reinterpret_cast<std::uintptr_t>(args.x) | static_cast<std::uint64_t>(args.row_stride));
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
  const DispatchParams params = derive(args);
  const bool tma = params.x_alignment == 16 && !args.use_vector_path && has_copy_engine();
  const int num_warps = DispatchTuning::num_warps(tma);
  // Behind notify: may start while notify still waits for its peers, which needs no room of this launch.
  launch(tma ? dispatch_kernel<true> : dispatch_kernel<false>, args.num_sms, num_warps,
         DispatchShared(tma, num_warps, domain.num_ranks).total, stream, !args.cached, "launch of dispatch", domain,
         params);
}

void prepare_dispatch() {
  const auto most = [](bool tma) {
    return static_cast<int>(DispatchShared(tma, DispatchTuning::num_warps(tma), layout::kMaxKernelRanks).total);
  };
  load_kernel(dispatch_kernel<true>, most(true));
  load_kernel(dispatch_kernel<false>, most(false));
}

// The code of this build for the chip at hand, which may be of an older kind than the chip.
int loaded_code_version() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, dispatch_kernel<true>), "loading a kernel");
  return std::min(attributes.ptxVersion, attributes.binaryVersion);
}

}  // namespace deep_moe::kernels
