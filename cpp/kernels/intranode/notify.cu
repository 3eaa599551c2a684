// Layout and notify in one launch, refusals, and the state they share.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "kernels/intranode/launch.hpp"
#include "kernels/intranode/notify.cuh"
#include "kernels/protocol/cuda_check.hpp"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {
namespace {

// Blocks 0 .. n - 2 read ids, or the mask in their place, in order of tokens; the last one gathers.
template <typename Id>
__global__ void __launch_bounds__(NotifyTuning::kThreads, 1)
    notify_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ NotifyArgs args,
                  const __grid_constant__ Owners owners) {
  extern __shared__ std::uint32_t dynamic_shared[];
  __shared__ NotifyShared shared;
  ptx::griddepcontrol_launch_dependents();  // dispatch waits for the end of this kernel where it needs it
  const int num_blocks = static_cast<int>(gridDim.x) - 1, block = static_cast<int>(blockIdx.x);
  if (block == num_blocks) return gather_block(domain, args, owners.blocks, dynamic_shared);
  if constexpr (std::is_void_v<Id>) {
    const RouteByMask route{args.token_in_rank, args.expert_counts, domain.num_ranks};
    layout_block(domain, args, route, owners, block, num_blocks, dynamic_shared, shared);
  } else {
    const RouteByIds<Id> route{args.ids, owners};
    layout_block(domain, args, route, owners, block, num_blocks, dynamic_shared, shared);
  }
}

struct Refusal {
  layout::CallSignature signature;
  std::uint64_t hash = 0;
  std::uint32_t num_reason_bytes = 0;
  char reason[layout::kReasonBytes] = {};
};

// One thread a peer. Ends with the same promise as a notify: every peer has finished the epoch that used the ring slot
// which the next call will write.
__global__ void __launch_bounds__(layout::kMaxKernelRanks)
    refusal_kernel(const __grid_constant__ DeviceDomain domain, const __grid_constant__ Refusal refusal) {
  const int peer = static_cast<int>(threadIdx.x);
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&state.epoch) + 1};
  if (__syncthreads_or(ptx::ld_relaxed_gpu(&state.failed) != 0)) return;

  const auto& low = *reinterpret_cast<const layout::LowLatencyState*>(domain.words.low_latency_state(scope.mine()));
  const bool is_live = (ptx::ld_relaxed_gpu(&low.masked) >> peer & 1) == 0;
  if (is_live)
    announce(scope, peer, refusal.signature, refusal.hash, 0, layout::Place{}, layout::Place{},
             layout::CallStatus::kRefused, refusal.reason, refusal.num_reason_bytes);

  bool ok = true;
  if (is_live && scope.epoch + 2 > state.reset_epoch + layout::kAnnounceDepth) {
    const std::uint64_t heard = scope.epoch + 2 - layout::kAnnounceDepth;  // who announces it has ended all before it
    const layout::Announce& record = domain.words.announce(scope.mine(), heard, peer);
    std::uint64_t seen;
    ok = wait_until(
        scope, layout::WaitPhase::kRingSpace, peer, heard, [&] { return ptx::ld_acquire_sys(&record.epoch); },
        [&](std::uint64_t epoch) { return epoch >= heard; }, &seen);
  }
  if (__syncthreads_and(ok) && peer == 0) ptx::st_relaxed_gpu(&state.epoch, scope.epoch);
}

void check_mask(const NotifyArgs& args) {
  check_range("num_experts", args.num_experts, 1, layout::kMaxExperts);
  check_range("num_blocks", args.num_blocks, 0, layout::kMaxNotifyBlocks);
  check_range("ids.num_tokens", args.ids.num_tokens, 0, INT32_MAX);
  if (args.expert_counts == nullptr) throw ArgumentError("expert_counts is null; allowed: null only with ids");
  if (args.ids.num_tokens > 0 && args.token_in_rank == nullptr)
    throw ArgumentError("token_in_rank is null; allowed: null only with ids or without tokens");
}

__global__ void set_epoch_kernel(layout::NotifyState* state, std::uint64_t epoch) {
  state->epoch = epoch;
  state->reset_epoch = epoch;
}

}  // namespace

void notify(const DeviceDomain& domain, NotifyArgs args, Stream stream) {
  check_domain(domain);
  const bool by_mask = args.ids.topk == 0;
  if (by_mask) {
    check_mask(args);
  } else {
    check_ids(args.ids, args.num_experts, args.num_blocks);
  }
  args.hash = layout::signature_hash(args.signature);
  const dim3 grid(static_cast<unsigned>(num_layout_blocks(args.ids.num_tokens, args.num_blocks) + 1));
  const std::size_t shared = notify_dynamic_bytes(args.num_experts, domain.num_ranks);
  const auto start = [&](auto* kernel) {
    kernel<<<grid, NotifyTuning::kThreads, shared, static_cast<cudaStream_t>(stream)>>>(
        domain, args, Owners(args.num_experts, domain.num_ranks));
  };
  if (by_mask) {
    start(notify_kernel<void>);
  } else {
    with_id_type(args.ids.id_bytes, [&](auto id) { start(notify_kernel<decltype(id)>); });
  }
  check_cuda(cudaGetLastError(), "launch of notify");
}

void post_refusal(const DeviceDomain& domain, const layout::CallSignature& signature, const std::string& reason,
                  Stream stream) {
  check_domain(domain);
  Refusal refusal;
  refusal.signature = signature;
  refusal.hash = layout::signature_hash(signature);
  refusal.num_reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(refusal.reason)));
  std::memcpy(refusal.reason, reason.data(), refusal.num_reason_bytes);
  refusal_kernel<<<1, static_cast<unsigned>(domain.num_ranks), 0, static_cast<cudaStream_t>(stream)>>>(domain, refusal);
  check_cuda(cudaGetLastError(), "launch of post_refusal");
}

void clear_error(const DeviceDomain& domain, char* host, Stream stream, bool failures) {
  check_domain(domain);
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  for (const bool failure : {false, true}) {
    if (failure && !failures) break;
    std::atomic_ref<std::uint32_t>(domain.host_words.error(host, failure).kind).store(0, std::memory_order_release);
    std::uint32_t& claimed = state.error_claimed[failure ? 1 : 0];
    check_cuda(cudaMemsetAsync(&claimed, 0, sizeof(claimed), static_cast<cudaStream_t>(stream)), "clear_error");
  }
}

void reset_state(const DeviceDomain& domain, std::uint64_t epoch, Stream stream) {
  check_domain(domain);
  // Everything that a launch which left early may have left behind: all regions that only this rank's kernels write.
  char* first = domain.workspaces[domain.rank] + layout::region_offset(layout::NotifyRegion::kState, domain.num_ranks);
  char* last =
      domain.workspaces[domain.rank] + layout::region_offset(layout::NotifyRegion::kCountWords, domain.num_ranks);
  check_cuda(cudaMemsetAsync(first, 0, static_cast<std::size_t>(last - first), static_cast<cudaStream_t>(stream)),
             "reset_state");
  set_epoch_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(&domain.words.state(domain.workspaces[domain.rank]),
                                                                   epoch);
  check_cuda(cudaGetLastError(), "launch of reset_state");
}

void prepare_notify() {
  const int shared = static_cast<int>(notify_dynamic_bytes(layout::kMaxExperts, layout::kMaxKernelRanks));
  for (const int id_bytes : {4, 8}) {
    with_id_type(id_bytes, [&](auto id) { load_kernel(notify_kernel<decltype(id)>, shared); });
  }
  load_kernel(notify_kernel<void>, shared);
  load_kernel(refusal_kernel, 0);
  load_kernel(set_epoch_kernel, 0);
}

}  // namespace deep_moe::kernels
