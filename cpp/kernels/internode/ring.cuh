// Ends of a ring inside kernels, and the waits for it. README.md beside this file has the words and the order among
// them.
#pragma once

#include <cstdint>

#include "kernels/internode/network.cuh"
#include "kernels/protocol/wait.cuh"

namespace deep_moe::kernels::internode {

using layout::RailCall;
using layout::RailPlace;
using layout::RailRegion;
using layout::WaitPhase;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ bool from_first_lane(bool value) { return __shfl_sync(0xffffffffu, value, 0) != 0; }

// The chunks of this call in the ring to, or from, the peer on a node. Numbers are tags: the generation is in device
// memory, so that it is today's in a launch that a graph replays.
__device__ __forceinline__ RailCall ring_call(const RailDomain& domain, const std::uint64_t* last_chunks, int node,
                                              std::int64_t num_rows, std::size_t stride) {
  return RailCall(domain.rail.shape(), ptx::ld_relaxed_gpu(last_chunks + node) + 1, num_rows, stride);
}
__device__ __forceinline__ std::int64_t rows_in(const Routes& routes, int node) {
  return routes.rows_in_prefix[node] - (node > 0 ? routes.rows_in_prefix[node - 1] : 0);
}

// The rings' part of one call, by node: in shared memory, for every row asks for it.
struct RingCalls {
  RailCall out[layout::kMaxNodes], in[layout::kMaxNodes];
};
// All threads; before a barrier. `rows_out(node)` and `rows_in(node)` of the call.
template <typename RowsOut, typename RowsIn>
__device__ __forceinline__ void find_ring_calls(const RailDomain& domain, std::size_t stride, RowsOut rows_out,
                                                RowsIn rows_in, RingCalls& calls) {
  const int node = static_cast<int>(threadIdx.x);
  if (node >= domain.num_nodes) return;
  const bool own = node == domain.own_node;
  calls.out[node] = ring_call(domain, domain.state().sent, node, own ? 0 : rows_out(node), stride);
  calls.in[node] = ring_call(domain, domain.state().received, node, own ? 0 : rows_in(node), stride);
}

// Whether chunk `number` may be written to its slot: what was there before has been read at the other end.
template <typename Network>
__device__ __forceinline__ bool has_credit(const RailDomain& domain, const Network& network, int node,
                                           const RailPlace& place) {
  const auto num_slots = static_cast<std::uint64_t>(domain.rail.shape().num_slots);
  if (layout::chunk_number(place.number) <= num_slots) return true;
  return network.is(domain.rail.word(RailRegion::kChunkCredit, domain.own_node, node, place.slot),
                    place.number - num_slots);
}
template <typename Network>
__device__ __forceinline__ bool has_arrived(const RailDomain& domain, const Network& network, int node,
                                            const RailPlace& place) {
  return network.is(domain.rail.word(RailRegion::kChunkArrived, domain.own_node, node, place.slot), place.number);
}

// One thread. False: the block must leave.
template <typename Test>
__device__ __forceinline__ bool wait_for_peer(const WaitScope& scope, const RailDomain& domain, WaitPhase phase,
                                              int node, std::uint64_t expected, Test test) {
  std::uint64_t seen;
  return wait_until(
      scope, phase, domain.in_errors(domain.peer(node)), expected, [&] { return std::uint64_t{test()}; },
      [](std::uint64_t there) { return there != 0; }, &seen);
}

// Of a row that has come, from a peer; and where one is written that goes to it: its slot there, or the send slot here.
template <typename Network>
__device__ __forceinline__ char* row_in(const RailDomain& domain, const Network& network, int node,
                                        const RailCall& call, const RailPlace& place) {
  return network.memory() + domain.rail.slot(RailRegion::kRingSlots, domain.own_node, node, place.slot) +
         static_cast<std::size_t>(place.row) * call.row_stride;
}
template <typename Network>
__device__ __forceinline__ char* row_out(const RailDomain& domain, const Network& network, int node,
                                         const RailCall& call, const RailPlace& place) {
  const std::size_t row = static_cast<std::size_t>(place.row) * call.row_stride;
  if constexpr (Network::kDirect) {
    return network.memory_of(domain.peer(node)) +
           domain.rail.slot(RailRegion::kRingSlots, node, domain.own_node, place.slot) + row;
  } else {
    return network.memory() + domain.rail.slot(RailRegion::kSendSlots, domain.own_node, node, place.slot) + row;
  }
}

// D4, C3: the whole warp, which is behind all writers of the chunk.
template <typename Network>
__device__ __forceinline__ void put_chunk(const RailDomain& domain, const Network& network, int node,
                                          const RailCall& call, const RailPlace& place) {
  const std::size_t word = domain.rail.word(RailRegion::kChunkArrived, node, domain.own_node, place.slot);
  if constexpr (Network::kDirect) {
    if (lane_id() == 0) network.signal(domain.peer(node), word, place.number);
  } else {
    network.put_signal(domain.peer(node), domain.rail.slot(RailRegion::kRingSlots, node, domain.own_node, place.slot),
                       domain.rail.slot(RailRegion::kSendSlots, domain.own_node, node, place.slot),
                       static_cast<std::size_t>(place.num_rows) * call.row_stride, word, place.number);
  }
}
// D7, C6: one thread, behind all readers of the chunk.
template <typename Network>
__device__ __forceinline__ void give_credit(const RailDomain& domain, const Network& network, int node,
                                            const RailPlace& place) {
  ptx::fence_acq_rel_sys();
  network.signal(domain.peer(node), domain.rail.word(RailRegion::kChunkCredit, node, domain.own_node, place.slot),
                 place.number);
}

// The whole warp, when it is through with a row of a chunk that several warps share; `count` is the slot's. True for
// the warp that is last; the count is zero again. A fence in front, and one in the last warp behind, put that behind
// all.
__device__ __forceinline__ bool counts_last(std::uint64_t* count, const RailPlace& place) {
  bool last = false;
  if (lane_id() == 0) {
    last = ptx::atom_add_relaxed_gpu(count, 1) + 1 == static_cast<std::uint64_t>(place.num_rows);
    if (last) ptx::st_relaxed_gpu(count, 0);
  }
  return from_first_lane(last);
}
// A row has been written to where it goes: with the last one of a chunk, that leaves.
template <typename Network>
__device__ __forceinline__ void row_is_filled(const RailDomain& domain, const Network& network, int node,
                                              const RailCall& call, const RailPlace& place) {
  __syncwarp();
  if (lane_id() == 0) ptx::fence_acq_rel_gpu();
  if (!counts_last(&domain.state().filled[node][place.slot], place)) return;
  ptx::fence_acq_rel_sys();
  __syncwarp();
  put_chunk(domain, network, node, call, place);
}
// A row that has come has been read: with the last one of a chunk, its slot goes back.
template <typename Network>
__device__ __forceinline__ void row_is_read(const RailDomain& domain, const Network& network, int node,
                                            const RailPlace& place) {
  __syncwarp();
  if (lane_id() == 0) ptx::fence_acq_rel_gpu();
  if (counts_last(&domain.state().read[node][place.slot], place) && lane_id() == 0)
    give_credit(domain, network, node, place);
}

// Rows of the rings for one warp after the other, in the order of each ring; every ring has warps of its own, which
// help the others once it has no more rows. So a warp may wait for the ring whose row it has been given: nobody else's
// does.
class RingRows {
 public:
  // `warp` of those of the grid that serve rings, at least as many as there are rings; `calls` by node.
  __device__ RingRows(const RailDomain& domain, int warp, const RailCall* calls)
      : domain_(domain), calls_(calls), first_(warp % (domain.num_nodes - 1)) {}

  // The next one. False: there are no more.
  __device__ bool next(int* node, std::int64_t* row) {
    for (; turn_ < domain_.num_nodes - 1; ++turn_) {
      *node = (domain_.own_node + 1 + (first_ + turn_) % (domain_.num_nodes - 1)) % domain_.num_nodes;
      std::uint64_t taken = 0;
      if (lane_id() == 0) taken = ptx::atom_add_relaxed_gpu(&domain_.state().taken[*node], 1);
      *row = static_cast<std::int64_t>(__shfl_sync(0xffffffffu, taken, 0));
      if (*row < calls_[*node].num_rows) return true;
    }
    return false;
  }

 private:
  const RailDomain& domain_;
  const RailCall* calls_;
  const int first_;
  int turn_ = 0;
};

// The first block, when all blocks are through: the next call's chunks follow this one's.
__device__ __forceinline__ void advance_rings(const RailDomain& domain, int node, std::int64_t chunks_out,
                                              std::int64_t chunks_in) {
  layout::RailState& state = domain.state();
  state.sent[node] += static_cast<std::uint64_t>(chunks_out);
  state.received[node] += static_cast<std::uint64_t>(chunks_in);
  state.taken[node] = 0;
}

}  // namespace deep_moe::kernels::internode
