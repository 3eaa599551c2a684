// Dispatch between nodes, as parts: where rows go, what travels with one, how a warp moves it. README.md beside this
// file has the words and the order among them; comments name the steps of docs/internode.md.
#pragma once

#include <cstdint>

#include "kernels/internode/copy.cuh"
#include "kernels/protocol/bytes.cuh"
#include "kernels/protocol/call.cuh"
#include "kernels/tuning.hpp"
#include "layout/experts.hpp"
#include "layout/rows.hpp"

namespace deep_moe::kernels::internode {

// The arguments, and what the host derives from them.
struct DispatchParams {
  DispatchArgs args;
  layout::RowFormat format;
  layout::RailRow rail_row;
  bool copy_engine;
};

// Where one rank of this node takes rows.
struct Target {
  char* x;
  char* scales;
  char* ids;
  float* weights;
  std::int32_t* src_idx;
  std::int64_t block_rows;  // rows that its block is laid out for
  std::int64_t total_rows;  // that come
  int first_expert, num_local_experts;
  bool column_scales;
};

// A row as it lies in the caller's tensors or in a slot.
struct RowView {
  const char* x;
  const char* scales;
  std::int64_t scale_step;
  const char* ids;
  const float* weights;
  std::int32_t token;

  __device__ RowView(const DispatchArgs& args, std::int64_t token_)
      : x(static_cast<const char*>(args.x) + token_ * args.row_stride),
        scales(static_cast<const char*>(args.scales.data) + token_ * args.scales.row_stride),
        scale_step(args.scales.item_stride),
        ids(static_cast<const char*>(args.ids.data) + token_ * args.ids.row_stride * args.ids.id_bytes),
        weights(args.topk_weights == nullptr ? nullptr : args.topk_weights + token_ * args.weight_stride),
        token(static_cast<std::int32_t>(token_)) {}
  __device__ RowView(const DispatchParams& params, const char* slot)
      : x(slot),
        scales(slot + params.rail_row.scales),
        scale_step(params.args.scales.item_bytes),
        ids(slot + params.rail_row.topk_idx),
        weights(params.format.weight_bytes > 0 ? reinterpret_cast<const float*>(slot + params.rail_row.topk_weights)
                                               : nullptr),
        token(*reinterpret_cast<const std::int32_t*>(slot + params.rail_row.token)) {}
  __device__ std::int64_t id(int id_bytes, int k) const {
    return id_bytes == 8 ? reinterpret_cast<const std::int64_t*>(ids)[k]
                         : reinterpret_cast<const std::int32_t*>(ids)[k];
  }
};

// Of the prefix sums over sources, at a rank of this node: rows up to a source, and of all.
__device__ __forceinline__ std::int32_t rows_up_to(const RailDomain& domain, const Routes& routes, int src, int local) {
  return routes.rank_prefix_matrix[src * domain.num_ranks() + domain.rank_at(domain.own_node, local)];
}
__device__ __forceinline__ std::int32_t total_rows(const RailDomain& domain, const Routes& routes, int local) {
  return rows_up_to(domain, routes, domain.num_ranks() - 1, local);
}

// From places to addresses, for one rank of this node. False: its segment has no address here.
__device__ __forceinline__ bool aim(const WaitScope& scope, const RailDomain& domain, const DispatchParams& params,
                                    int local, Target* target) {
  const layout::Place& place = announcement(scope, local).place;
  *target = Target{};
  target->total_rows = total_rows(domain, params.args.routes, local);
  const bool hard = (place.flags & layout::kPlaceHard) != 0;
  target->block_rows = hard ? place.capacity : target->total_rows;
  target->column_scales = (place.flags & layout::kPlaceColumnScales) != 0;
  if (params.format.topk > 0) {
    const layout::ExpertBlocks experts(params.args.num_experts, domain.num_ranks());
    const int rank = domain.rank_at(domain.own_node, local);
    target->first_expert = experts.first_expert(rank);
    target->num_local_experts = experts.num_local_experts(rank);
  }
  if (target->block_rows == 0) return true;
  char* base = place_address(scope, params.args.routes.segment_bases, domain.rank_at(domain.own_node, local), place);
  if (base == nullptr) return false;
  const layout::RecvBlock block(params.format, target->block_rows);
  target->x = base + block.x;
  target->scales = base + block.scales;
  target->ids = base + block.topk_idx;
  target->weights = reinterpret_cast<float*>(base + block.topk_weights);
  target->src_idx = reinterpret_cast<std::int32_t*>(base + block.src_idx);
  return true;
}

// The final index of the first row of a source at a rank of this node.
__device__ __forceinline__ std::int64_t first_index(const RailDomain& domain, const Routes& routes, int src,
                                                    int local) {
  return src == 0 ? 0 : rows_up_to(domain, routes, src - 1, local);
}

// The whole warp: what goes with a row, at its final index.
__device__ __forceinline__ void store_words(const DispatchParams& params, const Target& target, const RowView& row,
                                            std::int64_t at) {
  const layout::RowFormat& format = params.format;
  const int topk = static_cast<int>(format.topk), id_bytes = params.args.ids.id_bytes;
  for (int k = lane_id(); k < topk; k += 32) {
    const std::int64_t local = row.id(id_bytes, k) - target.first_expert;
    const bool here = local >= 0 && local < target.num_local_experts;
    store_item(target.ids + (at * topk + k) * id_bytes, static_cast<std::uint64_t>(here ? local : std::int64_t{-1}),
               id_bytes);
    if (row.weights != nullptr) target.weights[at * topk + k] = here ? row.weights[k] : 0.0f;
  }
  const int item = params.args.scales.item_bytes;
  for (std::int64_t s = lane_id(); s < params.args.scales.num_items; s += 32) {
    const std::int64_t to =
        target.column_scales ? (s * target.block_rows + at) * item : at * format.scale_bytes + s * item;
    store_item(target.scales + to, load_item(row.scales + s * row.scale_step, item), item);
  }
  if (lane_id() == 0) target.src_idx[at] = row.token;
}

// The whole warp: the same into a slot, ids as given, with the positions at the node's ranks.
__device__ __forceinline__ void pack_words(const DispatchParams& params, const RailDomain& domain, int node, char* slot,
                                           const RowView& row, const std::int32_t* position) {
  const layout::RailRow& where = params.rail_row;
  const int topk = static_cast<int>(params.format.topk), id_bytes = params.args.ids.id_bytes;
  for (int k = lane_id(); k < topk; k += 32) {
    store_item(slot + where.topk_idx + k * id_bytes, static_cast<std::uint64_t>(row.id(id_bytes, k)), id_bytes);
    if (row.weights != nullptr) reinterpret_cast<float*>(slot + where.topk_weights)[k] = row.weights[k];
  }
  const int item = params.args.scales.item_bytes;
  for (std::int64_t s = lane_id(); s < params.args.scales.num_items; s += 32)
    store_item(slot + where.scales + s * item, load_item(row.scales + s * row.scale_step, item), item);
  if (lane_id() == 0) *reinterpret_cast<std::int32_t*>(slot + where.token) = row.token;
  for (int local = lane_id(); local < domain.num_local_ranks(); local += 32)
    reinterpret_cast<std::int32_t*>(slot + where.positions)[local] = position[domain.rank_at(node, local)];
}

// What a warp needs in shared memory: where its row goes, up to a node's ranks and the other nodes; which ones.
struct WarpLists {
  char* destination[layout::kMaxKernelRanks];
  std::int64_t index[layout::kMaxKernelRanks];  // final index at each rank of this node, or -1
};

// Lists the addresses that lanes have, in the order of `i`; `address` null for none. The whole warp.
template <typename T, typename Address>
__device__ __forceinline__ int list_addresses(T** list, int first, int count, Address address) {
  for (int begin = 0; begin < count; begin += 32) {
    T* mine = begin + lane_id() < count ? address(begin + lane_id()) : nullptr;
    const unsigned mask = __ballot_sync(0xffffffffu, mine != nullptr);
    if (mine != nullptr) list[first + __popc(mask & ((1u << lane_id()) - 1))] = mine;
    first += __popc(mask);
  }
  return first;
}

// D4 of a warp's last token, whose stores may be on their way until then; -1: none.
template <typename Network>
__device__ void finish_token(const RailDomain& domain, const Network& network, const DispatchParams& params,
                             const RingCalls& rings, std::int64_t* last, RowCopier& copier) {
  if (*last < 0) return;
  copier.complete();
  const std::int32_t* node_position = params.args.routes.node_position + *last * params.args.routes.node_stride;
  for (int node = 0; node < domain.num_nodes; ++node) {
    const std::int32_t at = node_position[node];
    if (at < 0) continue;
    const RailCall& call = rings.out[node];
    row_is_filled(domain, network, node, call, call.place(domain.rail.shape(), at));
  }
  *last = -1;
}

// D1 to D3: one token; `last` is the one before, which is finished as soon as this one's bytes have been asked for, and
// before any wait for a peer. False: the block must leave.
template <typename Network>
__device__ bool send_token(const WaitScope& scope, const RailDomain& domain, const Network& network,
                           const DispatchParams& params, const Target* targets, const RingCalls& rings,
                           std::int64_t token, std::int64_t* last, WarpLists& lists, RowCopier& copier) {
  const Routes& routes = params.args.routes;
  const int own = domain.rank();
  const std::int32_t* position = routes.position + token * routes.position_stride;
  const std::int32_t* node_position = routes.node_position + token * routes.node_stride;
  const RowView row(params.args, token);
  int count = list_addresses(lists.destination, 0, domain.num_local_ranks(), [&](int local) -> char* {
    const std::int32_t at = position[domain.rank_at(domain.own_node, local)];
    lists.index[local] = at < 0 ? -1 : first_index(domain, routes, own, local) + at;
    return at < 0 ? nullptr : targets[local].x + lists.index[local] * params.format.row_bytes;
  });
  // D2: each lane looks for the slot at one other node.
  bool free = true;
  count = list_addresses(lists.destination, count, domain.num_nodes, [&](int node) -> char* {
    const std::int32_t at = node_position[node];
    if (at < 0) return nullptr;
    const RailCall& call = rings.out[node];
    const RailPlace place = call.place(domain.rail.shape(), at);
    free = has_credit(domain, network, node, place);
    return row_out(domain, network, node, call, place);
  });
  if (!__all_sync(0xffffffffu, free)) {
    finish_token(domain, network, params, rings, last, copier);
    if (!free) {
      const int node = lane_id();
      const RailPlace place = rings.out[node].place(domain.rail.shape(), node_position[node]);
      free = wait_for_peer(scope, domain, WaitPhase::kCredit, node, layout::chunk_number(place.number),
                           [&] { return has_credit(domain, network, node, place); });
    }
    if (!__all_sync(0xffffffffu, free)) return false;
  }
  __syncwarp();
  const auto words = [&] {
    finish_token(domain, network, params, rings, last, copier);
    for (int local = 0; local < domain.num_local_ranks(); ++local)
      if (lists.index[local] >= 0) store_words(params, targets[local], row, lists.index[local]);
    for (int node = 0; node < domain.num_nodes; ++node) {
      const std::int32_t at = node_position[node];
      if (at < 0) continue;
      const RailCall& call = rings.out[node];
      const RailPlace place = call.place(domain.rail.shape(), at);
      pack_words(params, domain, node, row_out(domain, network, node, call, place), row, position);
    }
  };
  if (!copier.copy(scope, row.x, params.format.row_bytes, lists.destination, count, words)) return false;
  *last = token;
  __syncwarp();  // the lists are free
  return true;
}

// D5 to D7: one row of a ring. False: the block must leave.
template <typename Network>
__device__ bool forward_row(const WaitScope& scope, const RailDomain& domain, const Network& network,
                            const DispatchParams& params, const Target* targets, const RingCalls& rings, int node,
                            std::int64_t number, WarpLists& lists, RowCopier& copier) {
  const Routes& routes = params.args.routes;
  const int src = domain.peer(node), num_local_ranks = domain.num_local_ranks();
  const RailCall& call = rings.in[node];
  const RailPlace place = call.place(domain.rail.shape(), number);
  bool there = true;
  if (lane_id() == 0)
    there = wait_for_peer(scope, domain, WaitPhase::kChunk, node, layout::chunk_number(place.number),
                          [&] { return has_arrived(domain, network, node, place); });
  if (!from_first_lane(there)) return false;
  __syncwarp();
  const std::int64_t in_map = (node > 0 ? routes.rows_in_prefix[node - 1] : 0) + number;
  const char* slot = row_in(domain, network, node, call, place);
  const RowView row(params, slot);
  const int count = list_addresses(lists.destination, 0, num_local_ranks, [&](int local) -> char* {
    const std::int32_t at = reinterpret_cast<const std::int32_t*>(slot + params.rail_row.positions)[local];
    std::int64_t index = at < 0 ? -1 : first_index(domain, routes, src, local) + at;
    if (index >= targets[local].block_rows) index = -1;  // of a row that is none: never out of the block
    lists.index[local] = index;
    if (params.args.send_nvl_index != nullptr)
      params.args.send_nvl_index[in_map * num_local_ranks + local] = static_cast<std::int32_t>(index);
    return index < 0 ? nullptr : targets[local].x + index * params.format.row_bytes;
  });
  __syncwarp();
  const auto words = [&] {
    for (int local = 0; local < num_local_ranks; ++local)
      if (lists.index[local] >= 0) store_words(params, targets[local], row, lists.index[local]);
  };
  if (!copier.copy(scope, row.x, params.format.row_bytes, lists.destination, count, words)) return false;
  row_is_read(domain, network, node, place);
  return true;
}

// Rows of a hard place that nobody sends. All threads of the grid.
__device__ __forceinline__ void fill_tail(const DispatchParams& params, const Target& mine) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t topk = params.format.topk, id_words = topk * params.format.idx_bytes / 4;
  std::int32_t* ids = reinterpret_cast<std::int32_t*>(mine.ids);
  for (std::int64_t i = mine.total_rows * id_words + first; i < mine.block_rows * id_words; i += step) ids[i] = -1;
  if (params.format.weight_bytes > 0)
    for (std::int64_t i = mine.total_rows * topk + first; i < mine.block_rows * topk; i += step) mine.weights[i] = 0.0f;
  for (std::int64_t i = mine.total_rows + first; i < mine.block_rows; i += step) mine.src_idx[i] = -1;
}

}  // namespace deep_moe::kernels::internode
