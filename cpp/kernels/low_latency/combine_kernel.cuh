// The kernel of a low-latency combine: which task is whose, warps that carry rows, the warp beside them. README.md
// beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cuda_runtime.h>

#include "kernels/low_latency/combine_task.cuh"
#include "kernels/low_latency/launch.hpp"

namespace deep_moe::kernels {

using CombineKernel = void(DeviceDomain, LowLatencyCombineParams);
// Rows that travel as logarithms: combine_logfmt.cu.
CombineKernel* logfmt_combine_kernel(const LowLatencyCombineArgs& args, bool plain);
void prepare_logfmt_combine();

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
  using Half = LowLatencyHalf;  // not "using enum", which gcc 10 does not know
  const LowLatencyHalf which = args.call.half;
  if (all || which == Half::kBoth) body(combine_kernel<T, Width, Half::kBoth, false>);
  if (all || (which == Half::kSend && !args.by_expert)) body(combine_kernel<T, Width, Half::kSend, false>);
  if (all || (which == Half::kSend && args.by_expert)) body(combine_kernel<T, Width, Half::kSend, true>);
  if (all || (which == Half::kReceive && !args.by_expert)) body(combine_kernel<T, Width, Half::kReceive, false>);
  if (all || (which == Half::kReceive && args.by_expert)) body(combine_kernel<T, Width, Half::kReceive, true>);
}

template <typename Body>
void with_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
}

}  // namespace
}  // namespace deep_moe::kernels
