// Low-latency combine: weighted sums back to the owners of the tokens, as one launch or as two.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/low_latency/combine_own.cuh"
#include "kernels/low_latency/launch.hpp"

namespace deep_moe::kernels {
namespace {

constexpr int kMostBuffers = static_cast<int>(sizeof(RowBuffer)) * LowLatencyTuning::kCombineCarriers;
constexpr int kMostThreads = 32 * (LowLatencyTuning::kCombineCarriers + LowLatencyTuning::kCombineOthers);

// Tasks of a holder: parts of tokens of all owners, in one launch but for this rank.
struct HeldTasks {
  const LowLatencyCombineParams& params;
  int owners, without;
  __device__ HeldTasks(const LowLatencyCombineParams& params_, const DeviceDomain& domain)
      : params(params_),
        owners(domain.num_ranks - (params.args.call.half == LowLatencyHalf::kBoth ? 1 : 0)),
        without(owners < domain.num_ranks ? domain.rank : domain.num_ranks) {}
  __device__ __forceinline__ void find(int task, int* owner, int* token, int* part) const {
    std::uint32_t rest;
    const std::uint32_t item = params.by_parts.divide(static_cast<std::uint32_t>(task), &rest);
    *part = static_cast<int>(rest);
    *token = owners > 0 ? static_cast<int>(params.by_owners.divide(item, &rest)) : INT32_MAX;
    *owner = static_cast<int>(rest);
    if (*owner >= without) ++*owner;
  }
};

struct CombineShared {
  WaitFailure failure;
  int arrived;
};

// A warp that carries rows.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ void carry(const DeviceDomain& domain, const LowLatencyCombineParams& params,
                                      int num_arrivals, CombineShared& shared, RowBuffer* buffer) {
  const LowLatencyCombineArgs& args = params.args;
  const int topk = args.ids.topk;
  const Carriers carriers(params.num_carriers);
  const HeldTasks tasks(params, domain);
  const bool sends = args.call.half != LowLatencyHalf::kReceive, receives = args.call.half != LowLatencyHalf::kSend;
  const int num_tokens = static_cast<int>(args.ids.num_tokens), num_own = receives ? num_tokens * params.num_parts : 0;
  // As if all ranks had as many tokens; then, what they have.
  const int guess = sends ? num_tokens * tasks.owners * params.num_parts : 0;
  const int first_own = carriers.task_from(guess);
  int owner = 0, token = 0, part = 0;
  OwnEntry own;  // or, as a holder, its row alone
  TokenCounts counts;
  std::uint32_t rest;
  int own_token = static_cast<int>(params.by_parts.divide(static_cast<std::uint32_t>(first_own), &rest));
  int own_part = static_cast<int>(rest);
  tasks.find(carriers.mine, &owner, &token, &part);
  const bool holds_first = carriers.mine < guess;
  {
    const std::int32_t* count = TokenCounts::address(args);
    const HeldRow::Address first(args, holds_first ? owner : domain.rank, holds_first ? token : own_token);
    ptx::griddepcontrol_wait();
    if (sends) counts.load(args, count, domain.num_ranks);
    if (holds_first)
      own.held.load(first, topk, 0);
    else if (first_own < num_own)
      own.load(args, first, own_token, 0);
  }
  LowLatencyRun run = begin_call(domain, args.call, params.hot, &shared.failure);
  if (params.early) ptx::griddepcontrol_launch_dependents();
  bool is_own_loaded = !holds_first;
  bool ok = sends ? await_slot(run) : !run.failed;
  if (ok && sends) {
    counts.leave_out_masked(run);
    const int most = counts.most();
    bool is_loaded = holds_first;
#pragma unroll 1
    for (int task = carriers.mine; ok && token < most;) {
      // The next one's words are asked for before this one's rows are.
      const int this_owner = owner, this_token = token, this_part = part;
      const bool there = token < counts.of(owner);
      if (there && !is_loaded) own.held.load(HeldRow::Address(args, owner, token), topk, 0);
      const HeldRow held = own.held;
      task += carriers.count;
      tasks.find(task, &owner, &token, &part);
      is_loaded = token < most && token < counts.of(owner);
      if (is_loaded) own.held.load(HeldRow::Address(args, owner, token), topk, 0);
      if (is_loaded || there) is_own_loaded = false;
      if (there) ok = send_held<T, Width, kByExpert>(run, params, buffer, held, this_owner, this_token, this_part);
    }
  }
  Arrival arrival(&shared.arrived, num_arrivals);
  arrival.make(run);
  if (ok && receives && first_own < num_own) {
    if (!is_own_loaded) own.load(args, HeldRow::Address(args, domain.rank, own_token), own_token, 0);
#pragma unroll 1
    for (int task = first_own; ok && task < num_own;) {
      const OwnEntry entry = own;
      const int this_token = own_token, this_part = own_part;
      task += carriers.count;
      if (task < num_own) {
        own_token = static_cast<int>(params.by_parts.divide(static_cast<std::uint32_t>(task), &rest));
        own_part = static_cast<int>(rest);
        own.load(args, HeldRow::Address(args, domain.rank, own_token), own_token, 0);
      }
      ok = receive_own<T, Width, kByExpert>(run, params, buffer, entry, this_token, this_part);
    }
  }
  arrival.finish(run, ok);
}

// The warp beside them: weights ahead, and in the first block what peers are told and how they are watched.
template <bool kPlain>
__device__ __forceinline__ void guard(const DeviceDomain& domain, const LowLatencyCombineParams& params,
                                      int num_arrivals, CombineShared& shared) {
  ptx::griddepcontrol_wait();
  LowLatencyRun run = begin_call(domain, params.args.call, params.hot, &shared.failure);
  Arrival arrival(&shared.arrived, num_arrivals);
  bool ok = run.sends() ? await_slot(run) : !run.failed;
  if (ok && run.sends()) {
    if (blockIdx.x == 0) send_header(run, params.args.ids.num_tokens);
    send_weights<kPlain>(run, params);
  }
  arrival.make(run);
  if (ok && blockIdx.x == 0) tell_peers(run, params.args.ids.num_tokens);
  if (ok && run.receives() && blockIdx.x == 0) ok = watch_peers(run, [](int, std::uint32_t) {});
  arrival.finish(run, ok);
}

template <typename T, class Width, bool kByExpert>
__global__ void __launch_bounds__(kMostThreads, 1)
    combine_kernel(const __grid_constant__ DeviceDomain domain,
                   const __grid_constant__ LowLatencyCombineParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  RowBuffer* const buffers = reinterpret_cast<RowBuffer*>(shared_memory);
  __shared__ CombineShared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), num_arrivals = params.num_carriers + 1;
  if (threadIdx.x == 0) shared.arrived = shared.failure.claimed = 0;
  const std::uint32_t touched = touch(&domain, domain.workspaces + domain.num_ranks) +
                                touch(&params, params.args.call.staging.bases + domain.num_ranks) +
                                touch(&params.args.call.staging.slot_bytes, &params + 1);
  ptx::keep(touched);
  __syncthreads();
  if (warp < params.num_carriers)
    carry<T, Width, kByExpert>(domain, params, num_arrivals, shared, &buffers[warp]);
  else
    guard<Width::kPlain>(domain, params, num_arrivals, shared);
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
  const bool plain = args.ids.topk <= kHalf && params.x_alignment == 16 && params.out_alignment == 16;
  params.num_parts = params.slot.num_tiles * Narrow::kParts;
  const bool narrow = plain && is_narrow(args.call, items * params.num_parts, LowLatencyTuning::kNarrowCombine);
  if (!narrow) params.num_parts = params.slot.num_tiles;
  check_range("parts of a call", args.call.max_tokens * (domain.num_ranks + 1) * params.num_parts, 0, INT32_MAX);
  const LowLatencyGrid grid(args.call, items * params.num_parts, LowLatencyTuning::kCombineCarriers);
  params.by_parts = Divisor(static_cast<std::uint32_t>(params.num_parts));
  params.by_owners = Divisor(static_cast<std::uint32_t>(std::max(domain.num_ranks - (halves ? 0 : 1), 1)));
  params.num_carriers = grid.carriers;
  const int warps = grid.carriers + LowLatencyTuning::kCombineOthers;
  const auto start = [&](void (*kernel)(DeviceDomain, LowLatencyCombineParams)) {
    params.early = args.call.early && fits_twice(kernel, warps);
    launch(kernel, grid.blocks, warps, narrow ? 0 : sizeof(RowBuffer) * static_cast<std::size_t>(grid.carriers), stream,
           true, "launch of low_latency_combine", domain, params);
  };
  with_type(args.type, [&](auto number) {
    using T = decltype(number);
    if (narrow)
      start(args.by_expert ? combine_kernel<T, Narrow, true> : combine_kernel<T, Narrow, false>);
    else if (plain)
      start(args.by_expert ? combine_kernel<T, Wide, true> : combine_kernel<T, Wide, false>);
    else
      start(args.by_expert ? combine_kernel<T, General, true> : combine_kernel<T, General, false>);
  });
}

void prepare_low_latency_combine() {
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_type(type, [&](auto number) {
      using T = decltype(number);
      load_kernel(combine_kernel<T, Narrow, false>, 0);
      load_kernel(combine_kernel<T, Narrow, true>, 0);
      load_kernel(combine_kernel<T, Wide, false>, kMostBuffers);
      load_kernel(combine_kernel<T, Wide, true>, kMostBuffers);
      load_kernel(combine_kernel<T, General, false>, kMostBuffers);
      load_kernel(combine_kernel<T, General, true>, kMostBuffers);
    });
}

}  // namespace deep_moe::kernels
