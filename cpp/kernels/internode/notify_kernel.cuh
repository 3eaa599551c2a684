// The kernel of notify between nodes, for any network.
#pragma once

#include <type_traits>

#include "kernels/internode/launch.cuh"
#include "kernels/internode/notify.cuh"

namespace deep_moe::kernels::internode {

struct NotifyBlock {
  kernels::NotifyShared counting;
  std::uint32_t rows[layout::kMaxKernelRanks];  // [R + N] of this rank
  std::int32_t rows_in[layout::kMaxNodes];
  std::uint32_t trouble;
};

// A rank that takes a fixed number of rows has so many entries in its forward map for each rank of its node, and its
// host does not look at the counts: enough, where no mate takes more rows than it. Else what it may have to forward is
// looked at, rows for several mates counted for each. `at`: a place in the table of ranks; every rank finds the same.
__device__ __forceinline__ bool map_is_too_small(const WaitScope& scope, const RailDomain& domain, int at) {
  char* const mine = domain.workspaces[domain.node.rank];
  const int L = domain.num_local_ranks(), node = at / L, rank = domain.rank_table[at];
  const auto place_of = [&](int of) -> const layout::Place& { return domain.words.relay(mine, scope.epoch, of).place; };
  const std::int64_t capacity = place_of(rank).capacity;
  if ((place_of(rank).flags & layout::kPlaceHard) == 0) return false;
  bool more = false;
  for (int local = 0; local < L; ++local) {
    const layout::Place& mates = place_of(domain.rank_at(node, local));
    more = more || (mates.flags & layout::kPlaceHard) == 0 || mates.capacity > capacity;
  }
  if (!more) return false;
  std::int64_t rows = 0;
  for (int src = at % L; src < domain.num_ranks(); src += L) {  // of the same rail
    if (src / L == node) continue;
    const std::int32_t* counts = domain.words.relay_counts(mine, scope.epoch, domain.rank_table[src]);
    for (int local = 0; local < L; ++local) rows += counts[domain.rank_at(node, local)];
  }
  if (rows <= capacity * L) return false;
  report_too_few_rows(scope, rank, capacity, static_cast<std::uint32_t>((rows + L - 1) / L));
  return true;
}

// X5: prefix sums over all ranks, what fits, totals of this rank's experts. All threads.
__device__ __forceinline__ layout::NotifyOutcome sum_up(const WaitScope& scope, const RailDomain& domain,
                                                        const NotifyParams& params, const NotifyBlock& shared) {
  using layout::NotifyOutcome;
  const NotifyArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), num_ranks = domain.num_ranks(), own = domain.rank();
  char* const mine = domain.workspaces[domain.node.rank];
  char* const host = domain.node.host;
  const layout::HostLayout& host_words = domain.node.host_words;
  const auto counts_of = [&](int src) { return domain.words.relay_counts(mine, scope.epoch, src); };
  bool too_small = false, hard = false;
  if (thread < num_ranks) {
    std::int32_t rows = 0;
    for (int src = 0; src < num_ranks; ++src)
      args.rank_prefix_matrix[src * num_ranks + thread] = rows += counts_of(src)[thread];
    const layout::Place& place = domain.words.relay(mine, scope.epoch, thread).place;
    too_small = rows > place.capacity;
    hard = too_small && (place.flags & layout::kPlaceHard) != 0;
    if (hard) report_too_few_rows(scope, thread, place.capacity, static_cast<std::uint32_t>(rows));
    hard = hard || map_is_too_small(scope, domain, thread);
    tell_host(args.sequence, host_words.rank_rows(host) + thread, static_cast<std::uint32_t>(rows));
    tell_host(args.sequence, host_words.source_rows(host) + thread, static_cast<std::uint32_t>(counts_of(thread)[own]));
  }
  for (int e = thread; e < params.experts.num_local_experts(own); e += NotifyTuning::kThreads) {
    std::int32_t entries = 0;
    for (int src = 0; src < num_ranks; ++src) entries += counts_of(src)[num_ranks + e];
    if (args.recv_per_expert != nullptr) args.recv_per_expert[e] = entries;
    tell_host(args.sequence, host_words.expert_rows(host) + e, static_cast<std::uint32_t>(entries));
  }
  if (thread == 0) {
    std::int32_t rows = 0;
    for (int node = 0; node < domain.num_nodes; ++node) {
      const std::int32_t rows_in = node == domain.own_node ? 0 : shared.rows_in[node];
      args.rows_out[node] = static_cast<std::int32_t>(shared.rows[num_ranks + node]);
      args.rows_in_prefix[node] = rows += rows_in;
      tell_host(args.sequence, host_words.node_rows(host) + node, static_cast<std::uint32_t>(rows_in));
    }
  }
  if (__syncthreads_or(hard)) return NotifyOutcome::kTooSmallHard;
  return __syncthreads_or(too_small) ? NotifyOutcome::kTooSmall : NotifyOutcome::kRowsFit;
}

template <typename Id>
__device__ __forceinline__ auto route_to_ranks(const NotifyArgs& args, const Owners& owners, int num_ranks) {
  if constexpr (std::is_void_v<Id>) {
    return RouteByMask{args.token_in_rank, args.expert_counts, num_ranks};
  } else {
    return RouteByIds<Id>{args.ids, owners};
  }
}

// Id void: by mask.
template <typename Network, typename Id>
__global__ void __launch_bounds__(NotifyTuning::kThreads, 1)
    notify_kernel(const __grid_constant__ RailDomain domain, const __grid_constant__ Network network,
                  const __grid_constant__ NotifyParams params, const __grid_constant__ Owners owners) {
  using layout::NotifyOutcome;
  extern __shared__ std::uint32_t expert_counts[];  // [E]
  __shared__ NotifyBlock shared;
  const NotifyArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, num_ranks = domain.num_ranks(),
            num_local_ranks = domain.num_local_ranks(), columns = num_ranks + domain.num_nodes;
  layout::NotifyState& state = domain.node.words.state(domain.node.workspaces[domain.node.rank]);
  const WaitScope scope{domain.node, ptx::ld_relaxed_gpu(&state.epoch) + 1};
  const auto end = [&](NotifyOutcome outcome) {
    if (thread == 0) finish(scope, args.sequence, outcome);
  };
  if (thread == 0) {
    shared.trouble = 0;
    tell_host(args.sequence, &domain.node.host_words.started(domain.node.host), 1);
  }
  if (__syncthreads_or(ptx::ld_relaxed_gpu(&state.failed) != 0)) return end(NotifyOutcome::kFailed);

  // A record is written over that of 8 calls before: each peer, and each mate, has come to within 4 calls of this one.
  bool ok = true;
  const std::uint64_t before = scope.epoch - layout::kAnnounceDepth / 2;
  if (thread < domain.num_nodes && thread != domain.own_node && scope.epoch > layout::kAnnounceDepth / 2 &&
      before > state.reset_epoch) {
    const std::size_t word = domain.rail.notify_word(before, domain.own_node, thread);
    ok = wait_for_peer(scope, domain, WaitPhase::kRecord, thread, before, [&] { return network.is(word, before); });
  }
  if (thread < num_local_ranks && scope.epoch > layout::kAnnounceDepth / 2 && before > state.reset_epoch) {
    const std::uint64_t* epoch =
        &domain.node.words.announce(domain.node.workspaces[domain.node.rank], before, thread).epoch;
    std::uint64_t seen;
    ok = ok && wait_until(
                   scope, WaitPhase::kRingSpace, thread, before, [&] { return ptx::ld_acquire_sys(epoch); },
                   [&](std::uint64_t value) { return value == before; }, &seen);
  }
  if (!__syncthreads_and(ok)) return end(NotifyOutcome::kFailed);

  // X1: counts.
  const RouteToNodes<decltype(route_to_ranks<Id>(args, owners, num_ranks))> route{
      route_to_ranks<Id>(args, owners, num_ranks), domain, params};
  const TokenRange range(params.with_counts() ? args.ids.num_tokens : 0, 0, 1);
  if (params.with_counts()) {
    layout::ExpertBlocks wide = params.experts;
    wide.num_ranks = columns;  // nodes are counted as ranks are
    count_tokens(route, wide, 0, range, expert_counts, shared.counting.warp_counts,
                 [&](int chunk, std::int64_t, std::uint64_t mask) {
                   if (chunk < NotifyTuning::kKeptChunks) shared.counting.masks[chunk][thread] = mask;
                 });
    __syncthreads();
    if (thread < layout::kMaxKernelRanks) {
      shared.rows[thread] = sum_warps(shared.counting.warp_counts[0], thread, NotifyTuning::kWarps);
      shared.counting.first_row[thread] = 0;
    }
  }
  __syncthreads();

  // X2: to peers and mates.
  const auto status = args.refused ? layout::CallStatus::kRefused : layout::CallStatus::kOk;
  if (thread < num_local_ranks)
    announce(scope, thread, args.signature, args.hash, args.ids.num_tokens, args.place, args.weight_place, status,
             args.reason, args.num_reason_bytes);
  for (int node = warp; node < domain.num_nodes; node += NotifyTuning::kWarps)
    if (node != domain.own_node) send_record(scope, domain, network, params, node, shared.rows, expert_counts);
  for (int local = warp; local < num_local_ranks; local += NotifyTuning::kWarps) {
    const int mate = domain.rank_at(domain.own_node, local);
    relay(scope, domain, local, domain.rank(), params.with_counts() ? shared.rows : nullptr,
          expert_counts + params.experts.first_expert(mate), params.experts.num_local_experts(mate),
          [&](layout::Announce& to) { describe_call(args, to); });
  }
  if (args.refused) return end(NotifyOutcome::kRefused);
  if (params.with_counts()) {
    __syncthreads();
    kernels::NotifyArgs positions;
    positions.ids = args.ids;
    positions.send_position = args.position;
    positions.is_token_in_rank = args.is_token_in_rank;
    write_positions(positions, route, columns, range, shared.counting);
  }

  // X3 to X5. Mates first: one that refuses relays nothing.
  if (thread < num_local_ranks) {
    const NotifyOutcome outcome = wait_for_announcement(scope, thread, args.hash);
    if (outcome != NotifyOutcome::kNone) atomicMax(&shared.trouble, static_cast<std::uint32_t>(outcome));
  }
  __syncthreads();
  if (shared.trouble != 0) return end(static_cast<NotifyOutcome>(shared.trouble));
  for (int node = warp; node < domain.num_nodes; node += NotifyTuning::kWarps)
    ok = ok && (node == domain.own_node || pass_on_record(scope, domain, network, params, node, shared.rows_in));
  if (!__syncthreads_and(ok)) return end(NotifyOutcome::kFailed);
  if (thread < num_ranks) {
    const layout::Announce& record = domain.words.relay(domain.workspaces[domain.node.rank], scope.epoch, thread);
    std::uint64_t seen;
    const bool there = wait_until(
        scope, WaitPhase::kRelay, domain.in_errors(thread), scope.epoch,
        [&] { return ptx::ld_acquire_sys(&record.epoch); }, [&](std::uint64_t epoch) { return epoch == scope.epoch; },
        &seen);
    const NotifyOutcome outcome = there ? compare_call(scope, thread, record, args.hash) : NotifyOutcome::kFailed;
    if (outcome != NotifyOutcome::kNone) atomicMax(&shared.trouble, static_cast<std::uint32_t>(outcome));
  }
  __syncthreads();
  if (shared.trouble != 0) return end(static_cast<NotifyOutcome>(shared.trouble));
  end(params.with_counts() ? sum_up(scope, domain, params, shared) : NotifyOutcome::kRowsFit);
}

template <typename Network>
void launch_notify(const RailDomain& domain, const Network& network, NotifyArgs args, Stream stream) {
  internode::check_domain(domain);
  args.hash = layout::signature_hash(args.signature);
  const int num_ranks = domain.num_ranks();
  NotifyParams params(args, num_ranks);
  std::size_t dynamic = 0, counts = 0;
  if (params.with_counts()) {
    if (args.ids.topk > 0) {
      check_ids(args.ids, args.num_experts, 0);
    } else {
      check_range("num_experts", args.num_experts, 1, layout::kMaxExperts);
      if (args.ids.num_tokens > 0 && args.token_in_rank == nullptr)
        throw ArgumentError("token_in_rank is null; allowed: null only with ids or without tokens");
    }
    if (args.position == nullptr || args.rank_prefix_matrix == nullptr || args.rows_out == nullptr ||
        args.rows_in_prefix == nullptr)
      throw ArgumentError("outputs of a notify with counts must not be null");
    dynamic = sizeof(std::uint32_t) * static_cast<std::size_t>(args.num_experts);
    counts =
        4 * static_cast<std::size_t>(1 + num_ranks + domain.num_local_ranks() * params.experts.max_local_experts());
  }
  params.record_bytes = layout::align_up(sizeof(layout::Announce) + counts, 16);
  for (int node = 0; node < domain.num_nodes; ++node) params.node_ranks[node] = ranks_of(domain, node);
  const Owners owners(std::max(args.num_experts, 1), num_ranks);
  const auto run = [&](auto* kernel) {
    launch(kernel, 1, NotifyTuning::kWarps, dynamic, stream, false, "launch of notify between nodes", domain, network,
           params, owners);
  };
  if (args.ids.topk == 0) return run(notify_kernel<Network, void>);
  args.ids.id_bytes == 4 ? run(notify_kernel<Network, std::int32_t>) : run(notify_kernel<Network, std::int64_t>);
}

template <typename Network>
void load_notify() {
  constexpr int kMost = static_cast<int>(sizeof(std::uint32_t)) * layout::kMaxExperts;
  load_kernel(notify_kernel<Network, std::int32_t>, kMost);
  load_kernel(notify_kernel<Network, std::int64_t>, kMost);
  load_kernel(notify_kernel<Network, void>, kMost);
}

}  // namespace deep_moe::kernels::internode
