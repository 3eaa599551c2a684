// Notify between nodes, as parts. README.md beside this file has the words and the order among them; comments name the
// steps of docs/internode.md.
#pragma once

#include <cstdint>

#include "kernels/internode/ring.cuh"
#include "kernels/intranode/notify.cuh"
#include "kernels/protocol/announce.cuh"

namespace deep_moe::kernels::internode {

// What a record in network memory holds behind its announcement: rows of the node, of every rank, entries of the node's
// experts, as many a rank as the largest has.
struct Record {
  layout::Announce* announce;
  std::int32_t* rows;     // of the node
  std::int32_t* counts;   // [R]
  std::int32_t* experts;  // [L][max_local]

  __device__ Record(const RailDomain& domain, char* at)
      : announce(reinterpret_cast<layout::Announce*>(at)),
        rows(reinterpret_cast<std::int32_t*>(announce + 1)),
        counts(rows + 1),
        experts(counts + domain.num_ranks()) {}
};

// The arguments, and what the host derives from them.
struct NotifyParams {
  NotifyArgs args;
  layout::ExpertBlocks experts;
  std::size_t record_bytes = 0;                      // that are used
  std::uint64_t node_ranks[layout::kMaxNodes] = {};  // ranks of each node, as bits

  DM_HOST_DEVICE bool with_counts() const { return args.with_counts(); }
  NotifyParams(const NotifyArgs& args_, int num_ranks)
      : args(args_), experts(std::max(args_.num_experts, 1), num_ranks) {}
};

// Ranks of a token as bits, and behind them the other nodes that it goes to.
template <typename Route>
struct RouteToNodes {
  Route to_ranks;
  const RailDomain& domain;
  const NotifyParams& params;

  template <bool kCount>
  __device__ std::uint64_t ranks(std::int64_t t, std::uint32_t* expert_counts) const {
    std::uint64_t mask = to_ranks.template ranks<kCount>(t, expert_counts);
    const std::uint64_t ranks = mask;
    for (int node = 0; node < domain.num_nodes; ++node) {
      if (node != domain.own_node && (ranks & params.node_ranks[node]) != 0)
        mask |= std::uint64_t{1} << (domain.num_ranks() + node);
    }
    return mask;
  }
  __device__ std::uint32_t first_count(int block, int expert_idx) const {
    return to_ranks.first_count(block, expert_idx);
  }
};

// This rank's call, but for the epoch.
__device__ __forceinline__ void describe_call(const NotifyArgs& args, layout::Announce& record) {
  const auto status = args.refused ? layout::CallStatus::kRefused : layout::CallStatus::kOk;
  record.status = static_cast<std::uint32_t>(status);
  record.num_reason_bytes = args.num_reason_bytes;
  record.hash = args.hash;
  record.signature = args.signature;
  record.num_tokens = args.ids.num_tokens;
  record.place = args.place;
#pragma unroll 1
  for (std::uint32_t i = 0; i < args.num_reason_bytes; ++i) record.reason[i] = args.reason[i];
}

// X4: what this rank knows of a source's call, to one mate. The whole warp; `describe` is called by its first lane.
// `rows` [R] or null without counts; `experts` are those of the mate.
template <typename Count, typename Describe>
__device__ __forceinline__ void relay(const WaitScope& scope, const RailDomain& domain, int local, int src,
                                      const Count* rows, const Count* experts, int num_experts, Describe describe) {
  char* base = domain.workspaces[local];
  std::int32_t* to = domain.words.relay_counts(base, scope.epoch, src);
  const int num_ranks = domain.num_ranks();
  for (int i = lane_id(); rows != nullptr && i < num_ranks + num_experts; i += 32)
    to[i] = static_cast<std::int32_t>(i < num_ranks ? rows[i] : experts[i - num_ranks]);
  __syncwarp();
  if (lane_id() != 0) return;
  layout::Announce& record = domain.words.relay(base, scope.epoch, src);
  describe(record);
  ptx::st_release_sys(&record.epoch, scope.epoch);
}

// X2: to one peer. The whole warp. `rows` [R + N] and `expert_counts` [E] of this rank.
template <typename Network>
__device__ __forceinline__ void send_record(const WaitScope& scope, const RailDomain& domain, const Network& network,
                                            const NotifyParams& params, int node, const std::uint32_t* rows,
                                            const std::uint32_t* expert_counts) {
  const NotifyArgs& args = params.args;
  const std::size_t at = domain.rail.record(RailRegion::kNotifyOut, scope.epoch, domain.own_node, node);
  const Record record(domain, network.memory() + at);
  if (lane_id() == 0) describe_call(args, *record.announce);
  if (params.with_counts()) {
    if (lane_id() == 0) *record.rows = static_cast<std::int32_t>(rows[domain.num_ranks() + node]);
    for (int rank = lane_id(); rank < domain.num_ranks(); rank += 32)
      record.counts[rank] = static_cast<std::int32_t>(rows[rank]);
    const int max_local = params.experts.max_local_experts();
    for (int local = 0; local < domain.num_local_ranks(); ++local) {
      const int rank = domain.rank_at(node, local), first = params.experts.first_expert(rank);
      for (int e = lane_id(); e < params.experts.num_local_experts(rank); e += 32)
        record.experts[local * max_local + e] = static_cast<std::int32_t>(expert_counts[first + e]);
    }
  }
  ptx::fence_acq_rel_sys();
  __syncwarp();
  network.put_signal(domain.peer(node), domain.rail.record(RailRegion::kNotifyIn, scope.epoch, node, domain.own_node),
                     at, params.record_bytes, domain.rail.notify_word(scope.epoch, node, domain.own_node), scope.epoch);
}

// Whether the call that a rank of the group has announced is this rank's; the first one that is not is recorded.
__device__ __forceinline__ layout::NotifyOutcome compare_call(const WaitScope& scope, int src,
                                                              const layout::Announce& record, std::uint64_t own_hash) {
  const bool refused = record.status != static_cast<std::uint32_t>(layout::CallStatus::kOk);
  if (!refused && record.hash == own_hash) return layout::NotifyOutcome::kNone;
  report_error(scope, refused ? layout::KernelErrorKind::kPeerRefused : layout::KernelErrorKind::kCallMismatch,
               layout::WaitPhase::kRelay, src, own_hash, record.hash, [&](layout::ErrorRecord& error) {
                 error.peer_signature = record.signature;
                 error.peer_status = record.status;
                 error.num_reason_bytes =
                     min(record.num_reason_bytes, static_cast<std::uint32_t>(layout::kReasonBytes));
#pragma unroll 1
                 for (std::uint32_t i = 0; i < error.num_reason_bytes; ++i) error.reason[i] = record.reason[i];
               });
  return refused ? layout::NotifyOutcome::kRefused : layout::NotifyOutcome::kMismatch;
}

// X3, X4: the record of one peer, passed on to all mates. The whole warp. False: the block must leave.
template <typename Network>
__device__ __forceinline__ bool pass_on_record(const WaitScope& scope, const RailDomain& domain, const Network& network,
                                               const NotifyParams& params, int node, std::int32_t* rows_in) {
  const std::size_t word = domain.rail.notify_word(scope.epoch, domain.own_node, node);
  bool there = true;
  if (lane_id() == 0)
    there = wait_for_peer(scope, domain, WaitPhase::kRecord, node, scope.epoch,
                          [&] { return network.is(word, scope.epoch); });
  if (!from_first_lane(there)) return false;
  __syncwarp();
  const Record record(domain,
                      network.memory() + domain.rail.record(RailRegion::kNotifyIn, scope.epoch, domain.own_node, node));
  const int max_local = params.experts.max_local_experts();
  for (int local = 0; local < domain.num_local_ranks(); ++local) {
    const int rank = domain.rank_at(domain.own_node, local);
    relay(scope, domain, local, domain.peer(node), params.with_counts() ? record.counts : nullptr,
          record.experts + local * max_local, params.experts.num_local_experts(rank), [&](layout::Announce& to) {
            to.status = record.announce->status;
            to.num_reason_bytes = record.announce->num_reason_bytes;
            to.hash = record.announce->hash;
            to.signature = record.announce->signature;
            to.place = record.announce->place;
#pragma unroll 1
            for (std::uint32_t i = 0; i < to.num_reason_bytes; ++i) to.reason[i] = record.announce->reason[i];
          });
  }
  if (params.with_counts() && lane_id() == 0) rows_in[node] = *record.rows;
  return true;
}

}  // namespace deep_moe::kernels::internode
