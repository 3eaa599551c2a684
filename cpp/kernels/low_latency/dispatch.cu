// Low-latency dispatch: rows to the experts' ranks and into packed blocks there, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/low_latency/dispatch_receive.cuh"
#include "kernels/low_latency/launch.hpp"
#include "kernels/ptx/barrier.cuh"

namespace deep_moe::kernels {
namespace {

constexpr int kMostThreads = 32 * (LowLatencyTuning::kDispatchCarriers + LowLatencyTuning::kDispatchOthers);
constexpr int kNarrowThreads = 32 * (LowLatencyTuning::kNarrowDispatch + LowLatencyTuning::kDispatchOthers);
constexpr int kMostCountBytes = 196 * 1024;

// Barriers of the warps that carry rows and the writer: the first for the writer alone, of what they have counted.
constexpr int kCountedBarrier = 1, kTableBarrier = 3;
__device__ __forceinline__ int num_counting(const LowLatencyDispatchParams& params) {
  return 32 * (params.num_carriers + 1);
}
// All of them. False: leave.
__device__ __forceinline__ bool meet(const LowLatencyDispatchParams& params, DispatchShared& shared, bool ok) {
  if (!ok) shared.failed = 1;
  __syncwarp();
  ptx::barrier_sync(kTableBarrier, num_counting(params));
  return shared.failed == 0;
}

__device__ __forceinline__ Receiver receiver_of(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                                const ExpertCounts& counts, const DispatchShared& shared) {
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  return {run,
          params,
          counts,
          shared,
          experts.first_expert(run.rank()),
          experts.num_local_experts(run.rank()),
          static_cast<std::int32_t>(run.call.max_tokens) * run.num_ranks()};
}

// Which of this rank's parts of tokens a warp of the block has, and which of those that come in.
template <LowLatencyHalf kHalf_>
struct DispatchTasks {
  const LowLatencyDispatchParams& params;
  const BlockShare& share;
  int warp, num_sent, rank;

  __device__ DispatchTasks(const LowLatencyDispatchParams& params_, const BlockShare& share_, int rank_)
      : params(params_),
        share(share_),
        warp(static_cast<int>(threadIdx.x / 32)),
        num_sent(kHalf_ == LowLatencyHalf::kReceive ? 0 : (share_.end - share_.begin) * params_.piece),
        rank(rank_) {}
  // False: there is none; one that has no part of a token gets a part that there is not.
  __device__ __forceinline__ bool find_sent(int number, int* token, int* part) const {
    int item;
    *part = share.part_of(params, number, &item);
    *token = share.begin + item;
    return number < num_sent;
  }
  // The first warps that send nothing are the first to receive.
  __device__ __forceinline__ int first_received() const {
    const int first = warp - num_sent % params.num_carriers;
    return first < 0 ? first + params.num_carriers : first;
  }
  template <class Part>
  __device__ __forceinline__ void find_received(int number, Part* part) const {
    int item;
    std::uint32_t source;
    part->part = share.part_of(params, number, &item);
    const int token = static_cast<int>(params.by_sources.divide(static_cast<std::uint32_t>(item), &source));
    part->src =
        static_cast<int>(source) + (kHalf_ == LowLatencyHalf::kBoth && static_cast<int>(source) >= rank ? 1 : 0);
    part->token = share.first_token + token * params.stride;
  }
};

// A warp that carries rows.
template <class Rows, class Width, LowLatencyHalf kHalf_>
__device__ __forceinline__ void carry(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                      const ExpertCounts& counts, DispatchShared& shared, TileBuffer* buffer) {
  constexpr bool kSends = kHalf_ != LowLatencyHalf::kReceive, kReceives = kHalf_ != LowLatencyHalf::kSend;
  const BlockShare share(params);
  const DispatchTasks<kHalf_> tasks(params, share, run.rank());
  SentPart<Rows, Width> sent;
  int number = tasks.warp, token, part;
  bool is_there = kSends && tasks.find_sent(number, &token, &part);
  TokenCounter<Width::kPlain> counter(params);
  ptx::griddepcontrol_wait();
  if (kSends) counter.load();
  if (is_there && part < params.num_row_tasks) sent.load(params, token, part);
  meet_block();
  if (params.early) ptx::griddepcontrol_launch_dependents();
  if (kSends) {
    counter.count(share, counts);
    __syncwarp();
    ptx::barrier_arrive(kCountedBarrier, num_counting(params));
  }
  bool ok = !run.state.failed;
#pragma unroll 1
  while (ok && is_there) {
    if (part < params.num_row_tasks) {
      if (number != tasks.warp) sent.load(params, token, part);
      sent.finish(params);
      sent.template send<!kReceives>(run, params, buffer);
    }
    number += params.num_carriers;
    is_there = tasks.find_sent(number, &token, &part);
  }
  if (!kReceives) return leave(run, ok);

  // What comes in first is asked for ahead.
  const Receiver at = receiver_of(run, params, counts, shared);
  ReceivedPart<Rows, Width> received;
  const int first = tasks.first_received();
  const bool has_sources = kHalf_ == LowLatencyHalf::kReceive || run.num_ranks() > 1;
  tasks.find_received(first, &received);
  if (ok && has_sources && received.token < params.args.num_tokens)
    received.load(at);
  else
    received.clear(run.tag());
  // From the last carrier on, which are the first ones that send nothing.
  const int thread = 32 * params.num_carriers - 1 - static_cast<int>(threadIdx.x), threads = 32 * params.num_carriers;
  if (ok) ok = await_headers(run, shared, thread, threads) && gather_counts<!kSends>(at, thread, threads);
  ok = meet(params, shared, ok);
  if (kSends && ok) {
    const bool is_only = tasks.warp + params.num_carriers >= tasks.num_sent;  // still in registers
#pragma unroll 1
    for (number = tasks.warp; tasks.find_sent(number, &token, &part); number += params.num_carriers) {
      if (part >= params.num_row_tasks) continue;
      if (!is_only) {
        sent.load(params, token, part);
        sent.finish(params);
      }
      place_own(at, share, buffer, sent);
    }
  }
#pragma unroll 1
  for (number = first; ok && has_sources; number += params.num_carriers) {
    if (number != first) tasks.find_received(number, &received);
    if (received.token >= shared.most_tokens) break;
    if (received.token >= static_cast<int>(shared.num_tokens[received.src]) || received.part >= params.num_row_tasks)
      continue;
    if (number != first) received.load(at);
    ok = received.receive(at, buffer);
  }
  leave(run, ok);
}

// The warp that finds out about the call, and sends entries and weights of this block's tokens, and counts.
template <bool kPlain, LowLatencyHalf kHalf_>
__device__ __forceinline__ void write_words(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                            const ExpertCounts& counts, DispatchShared& shared) {
  constexpr bool kSends = kHalf_ != LowLatencyHalf::kReceive, kReceives = kHalf_ != LowLatencyHalf::kSend;
  const BlockShare share(params);
  WordSender<kPlain, !kReceives> words(params, share);
  const bool has_words = kSends && share.first_part == 0 && share.begin < share.end;
  CallEntry entry;
  if (lane_id() == 0) shared.failed = shared.most_tokens = 0;
  ptx::griddepcontrol_wait();
  if (has_words) words.load();
  entry.begin(run);
  meet_block();
  entry.arrive(run);
  bool ok = !run.state.failed;
  if (kSends) {
    ptx::barrier_sync(kCountedBarrier, num_counting(params));
    if (ok) send_counts<!kReceives>(run, params, counts);
    if (ok && has_words) words.send(run, counts);
  }
  if (kReceives) {
    ok = meet(params, shared, ok);
    if (ok) count_rows(receiver_of(run, params, counts, shared));
  }
  entry.finish(run);
  leave(run, ok);
}

// The warp of the first block that tells the peers about the call and watches them.
template <LowLatencyHalf kHalf_>
__device__ __forceinline__ void guard(const LowLatencyRun& run, const LowLatencyDispatchParams& params) {
  constexpr bool kSends = kHalf_ != LowLatencyHalf::kReceive;
  ptx::griddepcontrol_wait();
  meet_block();
  bool ok = !run.state.failed;
  if (ok && kSends) send_header(run, params.args.num_tokens);
  if (ok) tell_peers(run, params.args.num_tokens);
  if (ok && run.receives())
    ok = watch_peers(run, [&](int peer, std::uint32_t tokens) {
      const std::int64_t end = peer * (run.call.max_tokens + 1) + run.call.max_tokens;
      params.args.recv_pos[end * params.args.ids.topk] = static_cast<std::int32_t>(tokens);
    });
  leave(run, ok);
}

template <class Rows, class Width, LowLatencyHalf kHalf_>
__global__ void __launch_bounds__(Width::kParts > 1 ? kNarrowThreads : kMostThreads, 1)
    dispatch_kernel(const __grid_constant__ DeviceDomain domain,
                    const __grid_constant__ LowLatencyDispatchParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  __shared__ DispatchShared shared;
  const int warp = static_cast<int>(threadIdx.x / 32);
  TileBuffer* buffer = nullptr;
  if constexpr (!kCasts<Rows>) {
    __shared__ TileBuffer buffers[LowLatencyTuning::kDispatchCarriers];
    buffer = &buffers[min(warp, LowLatencyTuning::kDispatchCarriers - 1)];
  }
  const layout::ExpertBlocks experts(params.args.call.num_experts, domain.num_ranks);
  const ExpertCounts counts(shared_memory, params, kHalf_ != LowLatencyHalf::kReceive, experts, domain.rank);
  // What is counted is added behind the block's meeting.
  if (kHalf_ != LowLatencyHalf::kReceive) counts.clear(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  const LowLatencyRun run{domain, params.args.call, params.hot, shared.call};
  const std::uint32_t touched = touch(&domain, domain.workspaces + domain.num_ranks) +
                                touch(&params, params.args.call.staging.bases + domain.num_ranks) +
                                touch(&params.args.call.staging.slot_bytes, &params + 1);
  ptx::keep(touched);
  if (warp < params.num_carriers) {
    carry<Rows, Width, kHalf_>(run, params, counts, shared, buffer);
  } else if (warp == params.num_carriers) {
    write_words<Width::kPlain, kHalf_>(run, params, counts, shared);
  } else if (blockIdx.x == 0) {
    guard<kHalf_>(run, params);
  } else {
    meet_block();
  }
}

template <typename Body>
void with_rows(const LowLatencyDispatchArgs& args, Body body) {
  if (!args.cast) return body(AsTheyAre{});
  switch (args.x_type) {
    case SumType::kBf16: return body(CastFrom<__nv_bfloat16>{});
    case SumType::kFp16: return body(CastFrom<__half>{});
    case SumType::kFp32: return body(CastFrom<float>{});
  }
}

// Calls body(kernel) for the kernel of a call. In the second half all casts are one.
template <class Width, typename Body>
void with_kernel(const LowLatencyDispatchArgs& args, LowLatencyHalf which, Body body) {
  using Half = LowLatencyHalf;
  if (which == Half::kReceive && args.cast)
    return body(dispatch_kernel<CastFrom<__nv_bfloat16>, Width, Half::kReceive>);
  with_rows(args, [&](auto rows) {
    using Rows = decltype(rows);
    if (which == Half::kBoth) return body(dispatch_kernel<Rows, Width, Half::kBoth>);
    if (which == Half::kSend) return body(dispatch_kernel<Rows, Width, Half::kSend>);
    if constexpr (!kCasts<Rows>) body(dispatch_kernel<Rows, Width, Half::kReceive>);
  });
}

// Blocks and warps for the tasks of a call, as if all ranks had as many tokens as this one; with more than that it
// takes longer.
struct DispatchGrid {
  int blocks, carriers;
  DispatchGrid(LowLatencyDispatchParams& params, int sources, int most_carriers) {
    const int num_blocks = params.args.call.num_blocks;
    // Where this rank has none, its peers may.
    const int tokens = params.args.num_tokens > 0 ? static_cast<int>(params.args.num_tokens)
                                                  : std::min(num_blocks, LowLatencyTuning::kFewestTokens);
    params.per_block = (tokens + num_blocks - 1) / num_blocks;
    params.stride = (tokens + params.per_block - 1) / params.per_block;
    const int most_pieces = std::min(num_blocks / params.stride, params.num_row_tasks);
    params.piece = (params.num_row_tasks + most_pieces - 1) / most_pieces;
    params.num_pieces = (params.num_row_tasks + params.piece - 1) / params.piece;
    blocks = params.stride * params.num_pieces;
    const std::int64_t tasks = std::int64_t{params.per_block} * params.piece * sources;
    carriers = static_cast<int>(std::clamp<std::int64_t>(tasks, LowLatencyTuning::kFewestCarriers, most_carriers));
  }
};

layout::LowLatencyDispatchSlot slot_of(int num_ranks, const LowLatencyDispatchArgs& args) {
  return layout::LowLatencyDispatchSlot(
      num_ranks, args.call.max_tokens, layout::ExpertBlocks(args.call.num_experts, num_ranks).max_local_experts(),
      args.ids.topk, args.row_bytes, args.scales.num_items * args.scales.item_bytes, args.with_weights);
}

}  // namespace

std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyDispatchArgs& args) {
  return static_cast<std::int64_t>(layout::align_up(slot_of(domain.num_ranks, args).total, 128));
}

void low_latency_dispatch(const DeviceDomain& domain, LowLatencyDispatchArgs args, Stream stream) {
  check_low_latency(domain, args.call, low_latency_slot_bytes(domain, args));
  check_ids(args.ids, args.call.num_experts, 0);
  check_range("num_tokens", args.num_tokens, 0, args.call.max_tokens);
  check_range("max_tokens", args.call.max_tokens, 1, layout::kMostLowLatencyTokens);
  check_range("row_bytes", args.row_bytes, 16, INT32_MAX);
  if (args.row_bytes % 16 != 0) throw ArgumentError("row_bytes must be a multiple of 16");
  if (args.cast && args.row_bytes % kCastBlock != 0) throw ArgumentError("rows to be cast come in 128 elements");
  args.call.hash = layout::signature_hash(args.call.signature);
  const layout::ExpertBlocks experts(args.call.num_experts, domain.num_ranks);
  LowLatencyDispatchParams params;
  params.args = args;
  params.hot = LowLatencyHot(domain, args.call);
  params.slot = slot_of(domain.num_ranks, args);
  params.num_vectors = static_cast<int>(args.row_bytes / 16);
  params.expert_ranks = ExpertRanks(experts);
  params.num_scales =
      static_cast<int>(args.cast ? args.row_bytes / kCastBlock / (args.ue8m0 ? 4 : 1) : args.scales.num_items);
  params.x_alignment = common_alignment(reinterpret_cast<std::uintptr_t>(args.x) |
                                        static_cast<std::uint64_t>(args.num_tokens > 1 ? args.row_stride : 0) | 16u);
  const bool whole = args.call.half == LowLatencyHalf::kBoth, sends = args.call.half != LowLatencyHalf::kReceive;
  // Of a token's parts: sent, as many received from each source.
  const int sources = args.call.half == LowLatencyHalf::kSend ? 1 : domain.num_ranks;
  const auto set_parts = [&](int parts_per_tile) {
    params.num_parts = params.slot.num_tiles * parts_per_tile;
    params.num_row_tasks = params.num_parts + params.slot.num_scale_tiles;
    check_range("tasks of a call", args.call.max_tokens * (domain.num_ranks + 1) * params.num_row_tasks, 0, INT32_MAX);
  };
  const bool plain = args.ids.topk <= kHalf && params.x_alignment == 16 && domain.num_ranks <= 32;
  set_parts(Narrow::kParts);
  const bool narrow = plain && is_narrow(args.call, args.num_tokens * sources * params.num_row_tasks,
                                         LowLatencyTuning::kNarrowDispatch);
  if (!narrow) set_parts(Wide::kParts);
  const DispatchGrid grid(params, sources,
                          narrow ? LowLatencyTuning::kNarrowDispatch : LowLatencyTuning::kDispatchCarriers);
  params.by_piece = Divisor(static_cast<std::uint32_t>(params.piece));
  params.by_num_pieces = Divisor(static_cast<std::uint32_t>(params.num_pieces));
  params.by_sources = Divisor(static_cast<std::uint32_t>(std::max(domain.num_ranks - (whole ? 1 : 0), 1)));
  params.by_count_units = Divisor(static_cast<std::uint32_t>(params.slot.num_count_units));
  params.num_carriers = grid.carriers;
  const int warps = grid.carriers + LowLatencyTuning::kDispatchOthers;
  const std::int64_t count_bytes =
      ExpertCounts::num_bytes(params, sends, domain.num_ranks, experts.num_local_experts(domain.rank));
  if (count_bytes > kMostCountBytes)
    throw ArgumentError("num_blocks is " + std::to_string(args.call.num_blocks) + "; allowed: more, for " +
                        std::to_string(args.num_tokens) + " tokens and " + std::to_string(args.call.num_experts) +
                        " experts");
  const auto start = [&](void (*kernel)(DeviceDomain, LowLatencyDispatchParams)) {
    params.early = args.call.early && fits_twice(kernel, warps);
    launch(kernel, grid.blocks, warps, static_cast<std::size_t>(count_bytes), stream, true,
           "launch of low_latency_dispatch", domain, params);
  };
  if (narrow)
    with_kernel<Narrow>(args, args.call.half, start);
  else if (plain)
    with_kernel<Wide>(args, args.call.half, start);
  else
    with_kernel<General>(args, args.call.half, start);
}

void prepare_low_latency_dispatch() {
  const auto load = [](auto* kernel) { load_kernel(kernel, kMostCountBytes); };
  LowLatencyDispatchArgs args;
  for (const bool cast : {false, true})
    for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
      for (const LowLatencyHalf which : {LowLatencyHalf::kBoth, LowLatencyHalf::kSend, LowLatencyHalf::kReceive}) {
        args.cast = cast, args.x_type = type;
        with_kernel<Narrow>(args, which, load);
        with_kernel<Wide>(args, which, load);
        with_kernel<General>(args, which, load);
      }
}

}  // namespace deep_moe::kernels
