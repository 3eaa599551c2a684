// Low-latency combine: weighted sums back to the owners of the tokens, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/low_latency/combine_task.cuh"
#include "kernels/low_latency/launch.hpp"

namespace deep_moe::kernels {
namespace {

constexpr int kMostThreads = 32 * (LowLatencyTuning::kCombineCarriers + LowLatencyTuning::kCombineOthers);
constexpr int kNarrowThreads = 32 * (LowLatencyTuning::kNarrowCombine + LowLatencyTuning::kCombineOthers);

// Which token a task is of: parts of tokens of all owners, in one launch but for this rank; then this rank's own.
struct CombineTasks {
  const LowLatencyCombineParams& params;
  int rank, without;  // without: that is no owner of rows held for others
  int owners;
  int num_held;  // tokens of them
  int num_own;

  __device__ CombineTasks(const LowLatencyCombineParams& params_, const DeviceDomain& domain, LowLatencyHalf part)
      : params(params_),
        rank(domain.rank),
        without(part == LowLatencyHalf::kBoth ? domain.rank : domain.num_ranks),
        owners(part == LowLatencyHalf::kReceive ? 0
               : without < domain.num_ranks     ? domain.num_ranks - 1
                                                : domain.num_ranks),
        num_own(part == LowLatencyHalf::kSend ? 0 : static_cast<int>(params.args.ids.num_tokens)) {
    // As if all ranks had as many.
    guess(static_cast<int>(params.args.ids.num_tokens));
  }
  __device__ __forceinline__ void guess(int most_tokens) { num_held = most_tokens * owners; }

  // False: there is no such task.
  template <class Task>
  __device__ __forceinline__ bool find(int number, Task* task) const {
    std::uint32_t part, owner;
    const int item = static_cast<int>(params.by_parts.divide(static_cast<std::uint32_t>(number), &part));
    task->part = static_cast<int>(part);
    task->is_own = item >= num_held;
    if (task->is_own) {
      task->owner = rank;
      task->token = item - num_held;
      return task->token < num_own;
    }
    task->token = static_cast<int>(params.by_owners.divide(static_cast<std::uint32_t>(item), &owner));
    task->owner = static_cast<int>(owner);
    if (task->owner >= without) ++task->owner;
    return true;
  }
};

struct CombineShared {
  CallState call;
  int most_tokens;  // of any owner
  int num_tokens[layout::kMaxKernelRanks];
};

// A warp that carries rows.
template <typename T, class Width, LowLatencyHalf kHalf_, bool kByExpert>
__device__ __forceinline__ void carry(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                      const CombineShared& shared) {
  using Task = CombineTask<T, Width, kHalf_, kByExpert>;
  constexpr bool kHolds = kHalf_ != LowLatencyHalf::kReceive;
  const LowLatencyCombineArgs& args = params.args;
  const Carriers carriers(params.num_carriers);
  CombineTasks tasks(params, run.domain, kHalf_);
  typename Task::Item next;
  bool is_there = tasks.find(carriers.mine, &next);
  ptx::griddepcontrol_wait();
  if (is_there) next.load(args);
  meet_block();
  if (params.early) ptx::griddepcontrol_launch_dependents();
  if (kHolds && shared.most_tokens != static_cast<int>(args.ids.num_tokens)) [[unlikely]] {
    tasks.guess(shared.most_tokens);
    is_there = tasks.find(carriers.mine, &next);
    if (is_there) next.load(args);
  }
  bool ok = !run.state.failed;
#pragma unroll 1
  for (int number = carriers.mine; ok && is_there;) {
    // The next one's words are asked for before this one's rows are.
    Task task{run, params, next};
    number += carriers.count;
    is_there = tasks.find(number, &next);
    if (is_there) next.load(args);
    if (!kHolds || task.item.is_own || task.item.token < shared.num_tokens[task.item.owner]) ok = task.work();
  }
  leave(run, ok);
}

// The warp beside them: the call itself, weights ahead, and in the first block what peers are told and how they are
// watched.
template <bool kPlain>
__device__ __forceinline__ void guard(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                      CombineShared& shared) {
  CallEntry entry;
  ptx::griddepcontrol_wait();
  if (run.sends()) {
    int most = 0;
#pragma unroll 1
    for (int owner = lane_id(); owner < run.num_ranks(); owner += 32)
      most = max(most, shared.num_tokens[owner] = num_tokens_of(run, params.args, owner));
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane_id() == 0) shared.most_tokens = most;
  }
  entry.begin(run);
  meet_block();
  entry.arrive(run);
  bool ok = !run.state.failed;
  if (ok && run.sends()) {
    if (blockIdx.x == 0) send_header(run, params.args.ids.num_tokens);
    send_weights<kPlain>(run, params);
  }
  if (ok && blockIdx.x == 0) tell_peers(run, params.args.ids.num_tokens);
  if (ok && run.receives() && blockIdx.x == 0) ok = watch_peers(run, [](int, std::uint32_t) {});
  entry.finish(run);
  leave(run, ok);
}

template <typename T, class Width, LowLatencyHalf kHalf_, bool kByExpert>
__global__ void __launch_bounds__(Width::kParts > 1 ? kNarrowThreads : kMostThreads, 1)
    combine_kernel(const __grid_constant__ DeviceDomain domain,
                   const __grid_constant__ LowLatencyCombineParams params) {
  __shared__ CombineShared shared;
  const LowLatencyRun run{domain, params.args.call, params.hot, shared.call};
  const std::uint32_t touched = touch(&domain, domain.workspaces + domain.num_ranks) +
                                touch(&params, params.args.call.staging.bases + domain.num_ranks) +
                                touch(&params.args.call.staging.slot_bytes, &params + 1);
  ptx::keep(touched);
  if (static_cast<int>(threadIdx.x / 32) < params.num_carriers)
    carry<T, Width, kHalf_, kByExpert>(run, params, shared);
  else
    guard<Width::kPlain>(run, params, shared);
}

// Calls body(kernel) for the kernel of a call; with `all` for every one there is.
template <typename T, class Width, typename Body>
void with_half(const LowLatencyCombineArgs& args, bool all, Body body) {
  using enum LowLatencyHalf;
  const LowLatencyHalf which = args.call.half;
  if (all || which == kBoth) body(combine_kernel<T, Width, kBoth, false>);
  if (all || (which == kSend && !args.by_expert)) body(combine_kernel<T, Width, kSend, false>);
  if (all || (which == kSend && args.by_expert)) body(combine_kernel<T, Width, kSend, true>);
  if (all || (which == kReceive && !args.by_expert)) body(combine_kernel<T, Width, kReceive, false>);
  if (all || (which == kReceive && args.by_expert)) body(combine_kernel<T, Width, kReceive, true>);
}

template <typename Body>
void with_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
}

std::int64_t row_bytes_of(const LowLatencyCombineArgs& args) {
  return args.hidden * (args.type == SumType::kFp32 ? 4 : 2);
}

layout::LowLatencyCombineSlot slot_of(int num_ranks, const LowLatencyCombineArgs& args) {
  return layout::LowLatencyCombineSlot(num_ranks, args.call.max_tokens, args.ids.topk, row_bytes_of(args),
                                       args.by_expert);
}

}  // namespace

std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyCombineArgs& args) {
  return static_cast<std::int64_t>(layout::align_up(slot_of(domain.num_ranks, args).total, 128));
}

void low_latency_combine(const DeviceDomain& domain, LowLatencyCombineArgs args, Stream stream) {
  check_low_latency(domain, args.call, low_latency_slot_bytes(domain, args));
  check_ids(args.ids, args.call.num_experts, 0);
  check_range("ids.num_tokens", args.ids.num_tokens, 0, args.call.max_tokens);
  const bool halves = args.call.half != LowLatencyHalf::kBoth;
  if (args.by_expert && !halves) throw ArgumentError("by_expert is true; allowed: with halves alone");
  if (halves && !args.by_expert && args.recv_weights == nullptr)
    throw ArgumentError("recv_weights is null; allowed: null only in one launch or by expert");
  LowLatencyCombineParams params;
  params.row_bytes = row_bytes_of(args);
  check_range("row bytes", params.row_bytes, 16, INT32_MAX);
  if (params.row_bytes % 16 != 0) throw ArgumentError("rows must be a multiple of 16 bytes");
  args.call.hash = layout::signature_hash(args.call.signature);
  params.args = args;
  params.hot = LowLatencyHot(domain, args.call);
  params.num_vectors = static_cast<int>(params.row_bytes / 16);
  params.slot = slot_of(domain.num_ranks, args);
  params.expert_ranks = ExpertRanks(layout::ExpertBlocks(args.call.num_experts, domain.num_ranks));
  const auto alignment = [](const void* base, std::int64_t strides) {
    return common_alignment(reinterpret_cast<std::uintptr_t>(base) | static_cast<std::uint64_t>(strides) | 16u);
  };
  params.x_alignment = alignment(args.x, args.expert_stride | args.row_stride);
  params.out_alignment = alignment(args.out, args.ids.num_tokens > 1 ? args.out_stride : 0);
  params.is_dense = args.expert_stride == args.call.max_tokens * domain.num_ranks * args.row_stride;
  // As if all ranks had as many tokens as this one; with more than that it takes longer.
  const std::int64_t sent =
      args.call.half == LowLatencyHalf::kReceive ? 0 : args.ids.num_tokens * (domain.num_ranks - (halves ? 0 : 1));
  const std::int64_t items = sent + (args.call.half == LowLatencyHalf::kSend ? 0 : args.ids.num_tokens);
  const bool plain = args.ids.topk <= kHalf && params.x_alignment == 16 && params.out_alignment == 16 &&
                     params.is_dense && domain.num_ranks <= 32;
  params.num_parts = params.slot.num_tiles * Narrow::kParts;
  const bool narrow = plain && is_narrow(args.call, items * params.num_parts, LowLatencyTuning::kNarrowCombine);
  if (!narrow) params.num_parts = params.slot.num_tiles;
  check_range("parts of a call", args.call.max_tokens * (domain.num_ranks + 1) * params.num_parts, 0, INT32_MAX);
  const LowLatencyGrid grid(args.call, items * params.num_parts,
                            narrow ? LowLatencyTuning::kNarrowCombine : LowLatencyTuning::kCombineCarriers);
  params.by_parts = Divisor(static_cast<std::uint32_t>(params.num_parts));
  params.by_owners = Divisor(static_cast<std::uint32_t>(std::max(domain.num_ranks - (halves ? 0 : 1), 1)));
  params.num_carriers = grid.carriers;
  const int warps = grid.carriers + LowLatencyTuning::kCombineOthers;
  const auto start = [&](void (*kernel)(DeviceDomain, LowLatencyCombineParams)) {
    params.early = args.call.early && fits_twice(kernel, warps);
    launch(kernel, grid.blocks, warps, 0, stream, true, "launch of low_latency_combine", domain, params);
  };
  with_type(args.type, [&](auto number) {
    using T = decltype(number);
    if (narrow)
      with_half<T, Narrow>(args, false, start);
    else if (plain)
      with_half<T, Wide>(args, false, start);
    else
      with_half<T, General>(args, false, start);
  });
}

void prepare_low_latency_combine() {
  const auto load = [](auto* kernel) { load_kernel(kernel, 0); };
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_type(type, [&](auto number) {
      using T = decltype(number);
      with_half<T, Narrow>({}, true, load);
      with_half<T, Wide>({}, true, load);
      with_half<T, General>({}, true, load);
    });
}

}  // namespace deep_moe::kernels
