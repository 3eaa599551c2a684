// Low-latency dispatch: rows to the experts' ranks and into packed blocks there, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/low_latency/dispatch_receive.cuh"
#include "kernels/low_latency/launch.hpp"
#include "kernels/ptx/barrier.cuh"

namespace deep_moe::kernels {
namespace {

constexpr int kMostThreads = 32 * (LowLatencyTuning::kDispatchCarriers + LowLatencyTuning::kDispatchOthers);

// All carriers of the block and its writer.
__device__ __forceinline__ void meet(const LowLatencyDispatchParams& params) {
  __syncwarp();
  ptx::barrier_sync(1, 32 * (params.num_carriers + 1));
}

template <bool kPlain>
__device__ __forceinline__ Receiver<kPlain> receiver_of(const LowLatencyRun& run,
                                                        const LowLatencyDispatchParams& params,
                                                        const BitTable<kPlain>& table, const DispatchShared& shared) {
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  return {run,
          params,
          table,
          shared,
          experts.first_expert(run.rank()),
          experts.num_local_experts(run.rank()),
          {0, params.chunk_words},
          static_cast<std::int32_t>(run.call.max_tokens) * run.num_ranks()};
}

// R2, for the chunk of `at`: what a carrier, or with `gathers` false the writer, does until all bits are set; `ok` is
// how it has fared so far. False, in all of them: leave.
template <bool kPlain>
__device__ __forceinline__ bool fill_table(const Receiver<kPlain>& at, DispatchShared& shared, bool gathers, bool ok) {
  const LowLatencyDispatchParams& params = at.params;
  int first = 0, end = static_cast<int>(params.args.num_tokens);  // as if all sources had as many
#pragma unroll 1
  for (int i = 0;; ++i) {
    if (ok && gathers)
      // From the last carrier on, which are the first ones that send nothing.
      ok = gather_ids(at, first, end, 32 * params.num_carriers - 1 - static_cast<int>(threadIdx.x),
                      32 * params.num_carriers);
    if (!ok) shared.failed[i] = 1;
    meet(params);
    if (shared.failed[i] != 0) return false;
    if (shared.most_tokens <= end) return true;
    first = end, end = shared.most_tokens;
  }
}

// To the next chunk, if there is one.
template <bool kPlain>
__device__ __forceinline__ bool next_chunk(Receiver<kPlain>& at, int thread, int threads) {
  const LowLatencyDispatchParams& params = at.params;
  if (kPlain || at.chunk.end >= params.num_words) return false;
  meet(params);
  at.table.fold(thread, threads);
  meet(params);
  at.table.clear(thread, threads);
  meet(params);
  at.chunk = {at.chunk.end, min(at.chunk.end + params.chunk_words, params.num_words)};
  return true;
}

// A warp that carries rows.
template <class Rows, class Width>
__device__ __forceinline__ void carry(const DeviceDomain& domain, const LowLatencyDispatchParams& params,
                                      const BitTable<Width::kPlain>& table, DispatchShared& shared, int num_arrivals,
                                      TileBuffer* buffer) {
  const Carriers carriers(params.num_carriers);
  const bool sends = params.args.call.half != LowLatencyHalf::kReceive;
  const int num_sends = sends ? static_cast<int>(params.args.num_tokens) * params.num_row_tasks : 0;
  const int first_task = carriers.task_from(num_sends);
  SentPart<Rows, Width> sent;
  ptx::griddepcontrol_wait();
  if (carriers.mine < num_sends) sent.load(params, carriers.mine);
  LowLatencyRun run = begin_call(domain, params.args.call, params.hot, &shared.failure);
  if (params.early) ptx::griddepcontrol_launch_dependents();
  bool ok = carriers.mine < num_sends ? await_slot(run) : !run.failed;
#pragma unroll 1
  for (int task = carriers.mine; ok && task < num_sends; task += carriers.count) {
    if (task != carriers.mine) sent.load(params, task);
    sent.send(run, params, buffer);
  }
  Arrival arrival(&shared.arrived, num_arrivals);
  arrival.make(run);
  if (!run.receives()) return arrival.finish(run, ok);

  auto at = receiver_of(run, params, table, shared);
  ReceivedPart<Rows, Width> part;
  const auto set = [&](int task) {
    std::uint32_t part_of_row, source;
    const std::uint32_t item = params.by_row_tasks.divide(static_cast<std::uint32_t>(task), &part_of_row);
    const int token = static_cast<int>(params.by_ranks.divide(item, &source));
    part.set(at, static_cast<int>(source), token, static_cast<int>(part_of_row));
  };
  set(first_task);
  if (ok && part.token < params.args.num_tokens) part.load(at);
  int round = 0;
  do {
    ok = fill_table(at, shared, true, ok);
    if (!ok) break;
#pragma unroll 1
    for (int task = first_task; ok; task += carriers.count) {
      if (task != first_task || round > 0) set(task);
      if (part.token >= shared.most_tokens) break;
      if (part.token >= static_cast<int>(shared.num_tokens[part.src]) || !at.in_chunk(part.src, part.token)) continue;
      if (task != first_task || round > 0) part.load(at);
      ok = part.receive(at, buffer);
    }
    ++round;
  } while (next_chunk(at, static_cast<int>(threadIdx.x), 32 * (params.num_carriers + 1)));
  arrival.finish(run, ok);
}

// The warp that sends ids and weights of this block's share of the tokens, ahead of all rows, and counts.
template <bool kPlain>
__device__ __forceinline__ void write_words(const DeviceDomain& domain, const LowLatencyDispatchParams& params,
                                            const BitTable<kPlain>& table, DispatchShared& shared, int num_arrivals,
                                            ManyEntries& entries) {
  const LowLatencyDispatchArgs& args = params.args;
  const bool is_many = !kPlain && args.ids.topk > 32, sends = args.call.half != LowLatencyHalf::kReceive;
  WordSender words(params);
  const int per_group = is_many ? 1 : words.tokens_at_a_time();
  const int num_groups = sends ? (static_cast<int>(args.num_tokens) + per_group - 1) / per_group : 0;
  // From the last block on: the first one has more to do.
  const int blocks = static_cast<int>(gridDim.x), block = blocks - 1 - static_cast<int>(blockIdx.x);
  ptx::griddepcontrol_wait();
  if (!is_many && block < num_groups) words.load(block);
  LowLatencyRun run = begin_call(domain, args.call, params.hot, &shared.failure);
  bool ok = sends ? await_slot(run) : !run.failed;
  if (ok && sends && blockIdx.x == 0) send_header(run, args.num_tokens);
#pragma unroll 1
  for (int group = block; ok && group < num_groups; group += blocks) {
    if (is_many) {
      send_many_words(run, params, group, entries);
    } else {
      if (group != block) words.load(group);
      words.send(run);
    }
  }
  Arrival arrival(&shared.arrived, num_arrivals);
  arrival.make(run);
  if (!run.receives()) return arrival.finish(run, ok);
  // R1.
  std::uint32_t most = 0;
#pragma unroll 1
  for (int src = lane_id(); ok && src < run.num_ranks(); src += 32) {
    std::uint32_t tokens = 0;
    if (run.is_live(src)) ok = await_header(run, src, false, &tokens);
    shared.num_tokens[src] = tokens;
    most = max(most, tokens);
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (lane_id() == 0) shared.most_tokens = static_cast<int>(most);
  auto at = receiver_of(run, params, table, shared);
  do {
    ok = fill_table(at, shared, false, ok);
    if (!ok) break;
    count_rows(at);
  } while (next_chunk(at, static_cast<int>(threadIdx.x), 32 * (params.num_carriers + 1)));
  arrival.finish(run, ok);
}

// The warp of the first block that tells the peers about the call and watches them.
__device__ __forceinline__ void guard(const DeviceDomain& domain, const LowLatencyDispatchParams& params,
                                      DispatchShared& shared, int num_arrivals) {
  ptx::griddepcontrol_wait();
  LowLatencyRun run = begin_call(domain, params.args.call, params.hot, &shared.failure);
  Arrival arrival(&shared.arrived, num_arrivals);
  bool ok = run.sends() ? await_slot(run) : !run.failed;
  arrival.make(run);
  if (ok) tell_peers(run, params.args.num_tokens);
  if (ok && run.receives())
    ok = watch_peers(run, [&](int peer, std::uint32_t tokens) {
      const std::int64_t end = peer * (run.call.max_tokens + 1) + run.call.max_tokens;
      params.args.recv_pos[end * params.args.ids.topk] = static_cast<std::int32_t>(tokens);
    });
  arrival.finish(run, ok);
}

template <class Rows, class Width>
__global__ void __launch_bounds__(kMostThreads, 1)
    dispatch_kernel(const __grid_constant__ DeviceDomain domain,
                    const __grid_constant__ LowLatencyDispatchParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  __shared__ DispatchShared shared;
  __shared__ ManyEntries entries;
  const int warp = static_cast<int>(threadIdx.x / 32);
  TileBuffer* buffer = nullptr;
  if constexpr (!kCasts<Rows>) {
    __shared__ TileBuffer buffers[LowLatencyTuning::kDispatchCarriers];
    buffer = &buffers[min(warp, LowLatencyTuning::kDispatchCarriers - 1)];
  }
  const layout::ExpertBlocks experts(params.args.call.num_experts, domain.num_ranks);
  const BitTable<Width::kPlain> table(shared_memory, params, experts.num_local_experts(domain.rank));
  table.clear(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  table.clear_before(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  if (threadIdx.x == 0) shared.arrived = shared.failed[0] = shared.failed[1] = shared.failure.claimed = 0;
  const std::uint32_t touched = touch(&domain, domain.workspaces + domain.num_ranks) +
                                touch(&params, params.args.call.staging.bases + domain.num_ranks) +
                                touch(&params.args.call.staging.slot_bytes, &params + 1);
  ptx::keep(touched);
  __syncthreads();
  const int num_arrivals = params.num_carriers + (blockIdx.x == 0 ? 2 : 1);
  if (warp < params.num_carriers)
    carry<Rows, Width>(domain, params, table, shared, num_arrivals, buffer);
  else if (warp == params.num_carriers)
    write_words(domain, params, table, shared, num_arrivals, entries);
  else if (blockIdx.x == 0)
    guard(domain, params, shared, num_arrivals);
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

constexpr std::size_t kMostTableBytes = 128 * 1024;

// As much of the bit table as fits.
void cut_table(LowLatencyDispatchParams& params, int num_ranks) {
  const layout::ExpertBlocks experts_of(params.args.call.num_experts, num_ranks);
  params.words_per_source = static_cast<int>((params.args.call.max_tokens + 31) / 32);
  const std::int64_t words = static_cast<std::int64_t>(params.words_per_source) * num_ranks;
  check_range("words of the bit table", words, 1, 1 << 28);
  params.num_words = static_cast<int>((words + 3) / 4 * 4);
  const std::size_t experts = layout::align_up(static_cast<std::size_t>(experts_of.max_local_experts()), 4);
  const int most = static_cast<int>(kMostTableBytes / 4 / experts) - 1;  // one is for what was before
  params.chunk_words = params.num_words <= most ? params.num_words : most >= 4 ? most / 4 * 4 : most >= 2 ? 2 : 1;
}

layout::LowLatencyDispatchSlot slot_of(int num_ranks, const LowLatencyDispatchArgs& args) {
  return layout::LowLatencyDispatchSlot(num_ranks, args.call.max_tokens, args.ids.topk, args.row_bytes,
                                        args.scales.num_items * args.scales.item_bytes, args.cast, args.with_weights);
}

}  // namespace

std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyDispatchArgs& args) {
  return static_cast<std::int64_t>(layout::align_up(slot_of(domain.num_ranks, args).total, 128));
}

void low_latency_dispatch(const DeviceDomain& domain, LowLatencyDispatchArgs args, Stream stream) {
  check_low_latency(domain, args.call, low_latency_slot_bytes(domain, args));
  check_ids(args.ids, args.call.num_experts, 0);
  check_range("num_tokens", args.num_tokens, 0, args.call.max_tokens);
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
  cut_table(params, domain.num_ranks);
  // As if all ranks had as many tokens as this one; with more than that it takes longer.
  const std::int64_t items = (args.call.half == LowLatencyHalf::kReceive ? 0 : args.num_tokens) +
                             (args.call.half == LowLatencyHalf::kSend ? 0 : args.num_tokens * domain.num_ranks);
  const auto set_parts = [&](int parts_per_tile) {
    params.num_parts = params.slot.num_tiles * parts_per_tile;
    params.num_row_tasks = params.num_parts + params.slot.num_scale_tiles;
    check_range("tasks of a call", args.call.max_tokens * (domain.num_ranks + 1) * params.num_row_tasks, 0, INT32_MAX);
  };
  const bool plain = args.ids.topk <= kHalf && params.x_alignment == 16 && params.chunk_words == params.num_words;
  set_parts(Narrow::kParts);
  const bool narrow = plain && is_narrow(args.call, items * params.num_row_tasks, LowLatencyTuning::kNarrowDispatch);
  if (!narrow) set_parts(Wide::kParts);
  params.by_row_tasks = Divisor(static_cast<std::uint32_t>(params.num_row_tasks));
  params.by_id_units = Divisor(static_cast<std::uint32_t>(params.slot.num_id_units));
  params.by_ranks = Divisor(static_cast<std::uint32_t>(domain.num_ranks));
  const LowLatencyGrid grid(args.call, items * params.num_row_tasks, LowLatencyTuning::kDispatchCarriers);
  params.num_carriers = grid.carriers;
  const int warps = grid.carriers + LowLatencyTuning::kDispatchOthers;
  const auto start = [&](void (*kernel)(DeviceDomain, LowLatencyDispatchParams)) {
    params.early = args.call.early && fits_twice(kernel, warps);
    launch(kernel, grid.blocks, warps, BitTable<false>::bytes(params, experts.num_local_experts(domain.rank)), stream,
           true, "launch of low_latency_dispatch", domain, params);
  };
  with_rows(args, [&](auto rows) {
    using Rows = decltype(rows);
    if (narrow)
      start(dispatch_kernel<Rows, Narrow>);
    else if (plain)
      start(dispatch_kernel<Rows, Wide>);
    else
      start(dispatch_kernel<Rows, General>);
  });
}

void prepare_low_latency_dispatch() {
  const auto load = [&](auto rows) {
    load_kernel(dispatch_kernel<decltype(rows), Narrow>, static_cast<int>(kMostTableBytes));
    load_kernel(dispatch_kernel<decltype(rows), Wide>, static_cast<int>(kMostTableBytes));
    load_kernel(dispatch_kernel<decltype(rows), General>, static_cast<int>(kMostTableBytes));
  };
  load(AsTheyAre{});
  load(CastFrom<__nv_bfloat16>{});
  load(CastFrom<__half>{});
  load(CastFrom<float>{});
}

}  // namespace deep_moe::kernels
