// Low-latency dispatch: rows to the experts' ranks and into packed blocks there, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/launch.hpp"
#include "kernels/low_latency/dispatch_receive.cuh"
#include "kernels/low_latency/launch.hpp"

namespace deep_moe::kernels {
namespace {

// R1. This block's share of the rows' tasks, and how many tokens each source has. Guesses that all sources have as many
// as this rank, so that ids are waited for together with the headers that say so.
struct Share {
  Items items;
  TaskRange tasks;
  int first_item, end_item;

  __device__ Share(const LowLatencyRun& run, const LowLatencyDispatchParams& params, const std::uint32_t* num_tokens)
      : items{num_tokens, static_cast<int>(params.args.num_tokens), run.num_ranks()},
        tasks(items.total() * params.num_row_tasks, run.num_carriers(), turn(run, params)) {
    first_item = tasks.begin / params.num_row_tasks;
    end_item = tasks.begin < tasks.end ? (tasks.end - 1) / params.num_row_tasks + 1 : first_item;
  }
  // Blocks that have sent nothing are the first to receive.
  __device__ static int turn(const LowLatencyRun& run, const LowLatencyDispatchParams& params) {
    const int warps = static_cast<int>(blockDim.x / 32), carriers = run.num_carriers();
    if (!run.is_whole()) return static_cast<int>(blockIdx.x);
    const int senders = (static_cast<int>(params.args.num_tokens) * params.num_row_tasks + warps - 1) / warps;
    return (static_cast<int>(blockIdx.x) + carriers - senders % carriers) % carriers;
  }
  __device__ int chunk_end(int first) const { return min(first + ReceiveShared::kItems, end_item); }
};

// R2. Rows of each local expert before item `first`, if `count`, and ids of the chunk that begins there. False: leave.
__device__ bool collect_ids(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                            const ReceiveShared& shared, const Share& share, int first, bool count, int first_expert,
                            int num_local) {
  const int topk = params.args.ids.topk;
  return for_each_id_unit(run, params.slot, share.items, count ? 0 : first, share.chunk_end(first),
                          [&](int item, int, int u, const uint4& unit) {
#pragma unroll
                            for (int i = 0; i < layout::kIdsPerUnit; ++i) {
                              // One that is marked as repeated is above all local ones.
                              const int k = u * layout::kIdsPerUnit + i, id = static_cast<int>(id_of_unit(unit, i));
                              const int local = id - first_expert;
                              if (item >= first) {
                                if (k < topk) shared.ids[(item - first) * topk + k] = static_cast<std::uint16_t>(id);
                              } else if (local >= 0 && local < num_local) {
                                atomicAdd(&shared.counts[local], 1u);
                              }
                            }
                          });
}

// The second half of a block that carries rows, if all has gone well so far.
template <class Rows, class Width>
__device__ void receive_rows(const LowLatencyRun& run, const LowLatencyDispatchParams& params, bool ok,
                             char* shared_memory, TileBuffer& buffer, Arrival& arrival) {
  constexpr int kItems = ReceiveShared::kItems;
  __shared__ std::uint32_t num_tokens[layout::kMaxKernelRanks];
  __shared__ int num_copies[kItems];
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int first_expert = experts.first_expert(run.rank()), num_local = experts.num_local_experts(run.rank());
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), warp = thread / 32;
  const int warps = threads / 32, topk = params.args.ids.topk, row_tasks = params.num_row_tasks;
  const ReceiveShared shared(shared_memory, num_local, topk);
  const RowReceiver<Rows, Width> receiver(run, params, shared, buffer);
  const auto clear_counts = [&] {
    for (int local = thread; local < num_local; local += threads) shared.counts[local] = 0;
  };

  clear_counts();
  ok = __syncthreads_and(ok && !run.failed);
  if (run.is_whole()) arrival.make(run);
  if (!ok) return;
  Share share(run, params, nullptr);
  const int peer = threads - 1 - thread;
  if (peer < run.num_ranks())
    ok = await_header(run, peer, params.slot.header(run.my_slot(), peer), false, &num_tokens[peer]);
  bool guessing = true, count = true;
  int first = share.first_item;
#pragma unroll 1
  while (true) {
    ok = collect_ids(run, params, shared, share, first, count, first_expert, num_local) && ok;
    if (!__syncthreads_and(ok)) return;
    if (guessing) {
      guessing = false;
      bool right = true;
      for (int src = 0; src < run.num_ranks(); ++src)
        right = right && num_tokens[src] == static_cast<std::uint32_t>(params.args.num_tokens);
      if (!right) {
        clear_counts();
        __syncthreads();
        share = Share(run, params, num_tokens);
        first = share.first_item;
        continue;
      }
    }
    count = false;
    if (first >= share.end_item) return;
    const int num_items = share.chunk_end(first) - first;
    const int begin = max(share.tasks.begin, first * row_tasks);
    const int end = min(share.tasks.end, (first + num_items) * row_tasks);
    const auto task_at = [&](int at) {
      RowTask task{at / row_tasks - first, 0, 0, at % row_tasks, 0};
      share.items.find(first + task.item, &task.src, &task.token);
      return task;
    };
    // Units are asked for before it is known whether they come.
    int at = begin + warp;
    RowTask task{};
    typename RowReceiver<Rows, Width>::Ahead ahead = receiver.nothing();
    if (at < end) {
      task = task_at(at);
      ahead = receiver.load_ahead(task);
    }
    if (warp == 0)
      place_rows(shared, num_items, topk, first_expert, num_local,
                 static_cast<std::int32_t>(params.args.call.max_tokens) * run.num_ranks(), num_copies);
    __syncthreads();
#pragma unroll 1
    while (ok && at < end) {
      const int next = at + warps;
      RowTask next_task{};
      typename RowReceiver<Rows, Width>::Ahead next_ahead = receiver.nothing();
      if (next < end) {
        next_task = task_at(next);
        if (num_copies[next_task.item] > 0) next_ahead = receiver.load_ahead(next_task);
      }
      task.num_copies = num_copies[task.item];
      ok = receiver.run(task, ahead);
      at = next, task = next_task, ahead = next_ahead;
    }
    first += kItems;
    if (first >= share.end_item || !__syncthreads_and(ok)) return;
  }
}

// K2: counts by expert and source.
__device__ void run_clerk(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                          std::uint32_t* counts /* [R][L] */, Arrival& arrival) {
  __shared__ std::uint32_t num_tokens[layout::kMaxKernelRanks];
  const LowLatencyDispatchArgs& args = params.args;
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int first_expert = experts.first_expert(run.rank()), num_local = experts.num_local_experts(run.rank());
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int num_ranks = run.num_ranks();
  for (int i = thread; i < num_ranks * num_local; i += threads) counts[i] = 0;
  if (!__syncthreads_and(!run.failed)) return;
  arrival.make(run);
  if (!run.receives()) return;
  Items items{nullptr, static_cast<int>(args.num_tokens), num_ranks};
  bool ok = watch_peers(run, num_tokens);
#pragma unroll 1
  while (true) {
    ok = for_each_id_unit(run, params.slot, items, 0, items.total(),
                          [&](int, int src, int, const uint4& unit) {
#pragma unroll
                            for (int i = 0; i < layout::kIdsPerUnit; ++i) {
                              const int local = static_cast<int>(id_of_unit(unit, i)) - first_expert;
                              if (local >= 0 && local < num_local) atomicAdd(&counts[src * num_local + local], 1u);
                            }
                          }) &&
         ok;
    if (!__syncthreads_and(ok)) return;
    bool right = true;
    for (int src = 0; src < num_ranks; ++src)
      right = right && (items.num_tokens != nullptr || num_tokens[src] == static_cast<std::uint32_t>(items.each));
    if (right) break;
    items.num_tokens = num_tokens;
    for (int i = thread; i < num_ranks * num_local; i += threads) counts[i] = 0;
    __syncthreads();
  }
  for (int local = thread; local < num_local; local += threads) {
    std::int64_t begin = 0;
    for (int src = 0; src < num_ranks; ++src) {
      const std::int64_t rows = counts[src * num_local + local];
      args.layout_range[local * num_ranks + src] = begin << 32 | rows;
      begin += rows;
    }
    args.recv_count[local] = static_cast<std::int32_t>(begin);
    if (args.recv_stats != nullptr) args.recv_stats[local] += static_cast<std::int32_t>(begin);
  }
  if (thread < num_ranks)
    args.recv_pos[(thread * (run.call.max_tokens + 1) + run.call.max_tokens) * args.ids.topk] =
        static_cast<std::int32_t>(num_tokens[thread]);
}

template <class Rows, class Width>
__global__ void __launch_bounds__(LowLatencyTuning::kThreads, 1)
    dispatch_kernel(const __grid_constant__ DeviceDomain domain,
                    const __grid_constant__ LowLatencyDispatchParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  __shared__ TileBuffer buffers[LowLatencyTuning::kThreads / 32];
  TileBuffer& buffer = buffers[threadIdx.x / 32];
  LowLatencyRun run = begin_call(domain, params.args.call);
  Arrival arrival;
  if (run.is_herald()) {
    run_herald(run, params.args.num_tokens, arrival);
  } else if (run.is_clerk()) {
    run_clerk(run, params, reinterpret_cast<std::uint32_t*>(shared_memory), arrival);
  } else {
    bool ok = true;
    if (run.sends()) ok = send_rows<Rows, Width>(run, params, buffer);
    if (run.receives()) {
      receive_rows<Rows, Width>(run, params, ok, shared_memory, buffer, arrival);
    } else {
      __syncthreads();
      arrival.make(run);
    }
  }
  arrival.finish(run);
  ptx::griddepcontrol_launch_dependents();
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

std::size_t shared_bytes(int num_experts, int num_ranks, int topk) {
  const layout::ExpertBlocks experts(num_experts, num_ranks);
  const int most = experts.max_local_experts();
  return std::max(ReceiveShared::bytes(most, topk),
                  sizeof(std::uint32_t) * static_cast<std::size_t>(most) * static_cast<std::size_t>(num_ranks));
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
  LowLatencyDispatchParams params;
  params.args = args;
  params.slot = slot_of(domain.num_ranks, args);
  params.num_scales =
      static_cast<int>(args.cast ? args.row_bytes / kCastBlock / (args.ue8m0 ? 4 : 1) : args.scales.num_items);
  params.x_alignment = common_alignment(reinterpret_cast<std::uintptr_t>(args.x) |
                                        static_cast<std::uint64_t>(args.num_tokens > 1 ? args.row_stride : 0) | 16u);
  const auto set_parts = [&](int parts_per_tile) {
    params.num_parts = params.slot.num_tiles * parts_per_tile;
    params.num_row_tasks = params.num_parts + params.slot.num_scale_tiles + 1;
    check_range("tasks of a call", args.call.max_tokens * domain.num_ranks * params.num_row_tasks, 0, INT32_MAX);
  };
  // As if all ranks had as many tokens as this one; with more than that it takes longer.
  const std::int64_t sent = args.call.half == LowLatencyHalf::kReceive ? 0 : args.num_tokens;
  const std::int64_t received = args.call.half == LowLatencyHalf::kSend ? 0 : args.num_tokens * domain.num_ranks;
  set_parts(Narrow::kParts);
  const bool narrow = fits_one_round(args.call, (sent + received) * params.num_row_tasks);
  if (!narrow) set_parts(Wide::kParts);
  const int num_blocks =
      num_low_latency_blocks(args.call, sent * params.num_row_tasks, received * params.num_row_tasks);
  with_rows(args, [&](auto rows) {
    using Rows = decltype(rows);
    launch(narrow ? dispatch_kernel<Rows, Narrow> : dispatch_kernel<Rows, Wide>, num_blocks,
           LowLatencyTuning::kThreads / 32, shared_bytes(args.call.num_experts, domain.num_ranks, args.ids.topk),
           stream, true, "launch of low_latency_dispatch", domain, params);
  });
}

void prepare_low_latency_dispatch() {
  const int most = static_cast<int>(std::max(shared_bytes(layout::kMaxExperts, 1, layout::kMaxTopk),
                                             shared_bytes(layout::kMaxExperts, layout::kMaxKernelRanks, 1)));
  const auto load = [&](auto rows) {
    load_kernel(dispatch_kernel<decltype(rows), Narrow>, most);
    load_kernel(dispatch_kernel<decltype(rows), Wide>, most);
  };
  load(AsTheyAre{});
  load(CastFrom<__nv_bfloat16>{});
  load(CastFrom<__half>{});
  load(CastFrom<float>{});
}

}  // namespace deep_moe::kernels
