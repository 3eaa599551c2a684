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

// The chunks of this call in the ring to, or from, the peer on a node.
__device__ __forceinline__ RailCall ring_call(const RailDomain& domain, const std::uint64_t* chunks_before, int node,
                                              std::int64_t num_rows, std::size_t stride) {
  return RailCall(domain.rail.shape(), ptx::ld_relaxed_gpu(chunks_before + node) + 1, num_rows, stride);
}
__device__ __forceinline__ std::int64_t rows_in(const Routes& routes, int node) {
  return routes.rows_in_prefix[node] - (node > 0 ? routes.rows_in_prefix[node - 1] : 0);
}

// Whether chunk `number` may be written to its slot: what was there before has been read at the other end.
template <typename Network>
__device__ __forceinline__ bool has_credit(const RailDomain& domain, const Network& network, int node,
                                           const RailPlace& place) {
  const auto num_slots = static_cast<std::uint64_t>(domain.rail.shape().num_slots);
  if (place.number <= num_slots) return true;
  return network.is(domain.rail.word(RailRegion::kChunkCredit, domain.own_node, node, place.slot),
                    layout::pack_chunk_tag(domain.generation, place.number - num_slots));
}
template <typename Network>
__device__ __forceinline__ bool has_arrived(const RailDomain& domain, const Network& network, int node,
                                            const RailPlace& place) {
  return network.is(domain.rail.word(RailRegion::kChunkArrived, domain.own_node, node, place.slot),
                    layout::pack_chunk_tag(domain.generation, place.number));
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

__device__ __forceinline__ char* slot_row(const RailDomain& domain, char* memory, RailRegion region, int node,
                                          const RailCall& call, const RailPlace& place) {
  return memory + domain.rail.slot(region, domain.own_node, node, place.slot) +
         static_cast<std::size_t>(place.row) * call.row_stride;
}

// D4, C3: the whole warp, which is behind all writers of the chunk.
template <typename Network>
__device__ __forceinline__ void put_chunk(const RailDomain& domain, const Network& network, int node,
                                          const RailCall& call, const RailPlace& place) {
  network.put_signal(domain.peer(node), domain.rail.slot(RailRegion::kRingSlots, node, domain.own_node, place.slot),
                     domain.rail.slot(RailRegion::kSendSlots, domain.own_node, node, place.slot),
                     static_cast<std::size_t>(place.num_rows) * call.row_stride,
                     domain.rail.word(RailRegion::kChunkArrived, node, domain.own_node, place.slot),
                     layout::pack_chunk_tag(domain.generation, place.number));
}
// D7, C6: one thread, behind all readers of the chunk.
template <typename Network>
__device__ __forceinline__ void give_credit(const RailDomain& domain, const Network& network, int node,
                                            const RailPlace& place) {
  ptx::fence_acq_rel_sys();
  network.signal(domain.peer(node), domain.rail.word(RailRegion::kChunkCredit, node, domain.own_node, place.slot),
                 layout::pack_chunk_tag(domain.generation, place.number));
}

// The whole warp, when it is through with a row of a chunk that several warps share. True for the warp that is last,
// which is behind all others; the count is zero again.
__device__ __forceinline__ bool counts_last(const RailDomain& domain, int node, const RailPlace& place) {
  ptx::fence_acq_rel_sys();
  __syncwarp();
  bool last = false;
  if (lane_id() == 0) {
    std::uint64_t* count = &domain.state().filled[node][place.slot];
    last = ptx::atom_add_acq_rel_gpu(count, 1) + 1 == static_cast<std::uint64_t>(place.num_rows);
    if (last) ptx::st_relaxed_gpu(count, 0);
  }
  last = from_first_lane(last);
  __syncwarp();
  return last;
}

// A chunk of one of the rings for this warp alone, in no order among the rings: the next one, of any, for which `ready`
// (node, chunk of the call) says yes. `num_chunks(node)`. Gives node and chunk; node -1 when all are taken, -2 when the
// block must leave.
struct TakenChunk {
  int node;
  std::int64_t chunk;
};
template <typename NumChunks, typename Ready>
__device__ __forceinline__ TakenChunk take_chunk(const WaitScope& scope, const RailDomain& domain, WaitPhase phase,
                                                 NumChunks num_chunks, Ready ready) {
  TakenChunk taken{-1, 0};
  if (lane_id() == 0) {
    const int start = static_cast<int>(threadIdx.x / 32 + blockIdx.x);
    int waits_for = 0;
    const auto next = [&]() -> std::uint64_t {  // 0: wait, 1: all taken, else node + 2
      bool all_taken = true;
      for (int i = 0; i < domain.num_nodes; ++i) {
        const int node = (start + i) % domain.num_nodes;
        if (node == domain.own_node) continue;
        const std::uint64_t chunk = ptx::ld_relaxed_gpu(&domain.state().taken[node]);
        if (static_cast<std::int64_t>(chunk) >= num_chunks(node)) continue;
        all_taken = false;
        waits_for = node;
        if (!ready(node, static_cast<std::int64_t>(chunk))) continue;
        const auto before =
            atomicCAS(reinterpret_cast<unsigned long long*>(&domain.state().taken[node]),
                      static_cast<unsigned long long>(chunk), static_cast<unsigned long long>(chunk + 1));
        if (before != chunk) continue;
        taken = {node, static_cast<std::int64_t>(chunk)};
        return static_cast<std::uint64_t>(node) + 2;
      }
      return all_taken ? 1 : 0;
    };
    std::uint64_t seen = next();
    if (seen == 0 && !wait_until(
                         scope, phase, domain.in_errors(domain.peer(waits_for)), 1, next,
                         [](std::uint64_t got) { return got != 0; }, &seen))
      taken.node = -2;
  }
  taken.node = __shfl_sync(0xffffffffu, taken.node, 0);
  taken.chunk = __shfl_sync(0xffffffffu, taken.chunk, 0);
  __syncwarp();  // what the first lane has acquired, all lanes may read
  return taken;
}

// The first block, when all blocks are through: the next call's chunks follow this one's.
__device__ __forceinline__ void advance_rings(const RailDomain& domain, int node, std::int64_t chunks_out,
                                              std::int64_t chunks_in) {
  layout::RailState& state = domain.state();
  state.sent[node] += static_cast<std::uint64_t>(chunks_out);
  state.received[node] += static_cast<std::uint64_t>(chunks_in);
  state.taken[node] = 0;
}

}  // namespace deep_moe::kernels::internode
