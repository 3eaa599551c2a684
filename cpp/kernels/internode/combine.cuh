// Combine between nodes, as parts: whose rows a sum takes, the sum, the chunks of sums that go back. README.md beside
// this file has the words and the order among them; comments name the steps of docs/internode.md.
#pragma once

#include <cstdint>

#include "kernels/internode/dispatch.cuh"
#include "kernels/intranode/numbers.cuh"

namespace deep_moe::kernels::internode {

// The arguments, and what the host derives from them.
struct CombineParams {
  CombineArgs args;
  layout::RailRow rail_row;
  std::int64_t row_bytes;
};

// What a rank of this node holds.
struct Holder {
  const char* x;
  const float* weights;
};

// From places to addresses, for one rank of this node. False: its segment has no address here.
__device__ __forceinline__ bool find_holder(const WaitScope& scope, const RailDomain& domain, const CombineArgs& args,
                                            int local, Holder* holder) {
  const layout::Announce& record = announcement(scope, local);
  *holder = Holder{nullptr, nullptr};
  const Routes& routes = args.routes;
  const int rank = domain.rank_at(domain.own_node, local);
  if (total_rows(domain, routes, local) == 0) return true;
  holder->x = place_address(scope, routes.segment_bases, rank, record.place);
  if (holder->x == nullptr || args.topk == 0) return holder->x != nullptr;
  holder->weights =
      reinterpret_cast<const float*>(place_address(scope, routes.segment_bases, rank, record.weight_place));
  return holder->weights != nullptr;
}

// Rows of one sum, in its order.
struct SumList {
  const char* row[layout::kMaxKernelRanks + 2];
  const float* weights[layout::kMaxKernelRanks];
};

// The whole warp: adds what a node holds to the list; `index` by local rank, -1 for none.
template <typename Index>
__device__ __forceinline__ void list_holders(const CombineParams& params, const Holder* holders, int num_local_ranks,
                                             SumList& list, int* num_rows, int* num_weights, Index index) {
  *num_rows = list_addresses(list.row, *num_rows, num_local_ranks, [&](int local) -> const char* {
    const std::int64_t at = index(local);
    return at < 0 ? nullptr : holders[local].x + at * params.row_bytes;
  });
  if (params.args.topk == 0) return;
  *num_weights = list_addresses(list.weights, *num_weights, num_local_ranks, [&](int local) -> const float* {
    const std::int64_t at = index(local);
    return at < 0 ? nullptr : holders[local].weights + at * params.args.topk;
  });
}

// The whole warp: the sum of the listed rows, in fp32 and in their order, rounded once; and of their weights.
template <typename T>
__device__ __forceinline__ void sum_rows(const CombineParams& params, const SumList& list, int num_rows,
                                         int num_weights, char* out, float* out_weights) {
  constexpr int kBatch = RailTuning::kSumsInFlight, kAlone = 2 * kBatch, kStep = 32 * 16;
  if (num_rows == 1) {  // a row alone is only rounded
    for (std::int64_t first = lane_id() * 16; first < params.row_bytes; first += kAlone * kStep) {
      uint4 vectors[kAlone];
#pragma unroll
      for (int v = 0; v < kAlone; ++v)
        if (first + v * kStep < params.row_bytes) vectors[v] = ptx::ld_weak_16(list.row[0] + first + v * kStep);
#pragma unroll
      for (int v = 0; v < kAlone; ++v) {
        if (first + v * kStep >= params.row_bytes) continue;
        float sum[Vector<T>::kSize] = {};
        Vector<T>::add(sum, vectors[v]);
        ptx::st_weak_16(out + first + v * kStep, Vector<T>::round(sum));
      }
    }
  } else {
    for (std::int64_t first = lane_id() * 16; first < params.row_bytes; first += kBatch * kStep) {
      float sums[kBatch][Vector<T>::kSize] = {};
      for (int r = 0; r < num_rows; r += 2) {
        uint4 vectors[2][kBatch];
        const int rows = min(num_rows - r, 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i >= rows) break;
#pragma unroll
          for (int v = 0; v < kBatch; ++v)
            if (first + v * kStep < params.row_bytes)
              vectors[i][v] = ptx::ld_weak_16(list.row[r + i] + first + v * kStep);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i >= rows) break;
#pragma unroll
          for (int v = 0; v < kBatch; ++v)
            if (first + v * kStep < params.row_bytes) Vector<T>::add(sums[v], vectors[i][v]);
        }
      }
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < params.row_bytes) ptx::st_weak_16(out + first + v * kStep, Vector<T>::round(sums[v]));
    }
  }
  for (int k = lane_id(); k < params.args.topk; k += 32) {
    float sum = 0.0f;
    for (int r = 0; r < num_weights; ++r) sum += list.weights[r][k];
    out_weights[k] = sum;
  }
}

// C2, C3: the sum that is one row of a ring, back to the peer. False: the block must leave.
template <typename T, typename Network>
__device__ bool collect_row(const WaitScope& scope, const RailDomain& domain, const Network& network,
                            const CombineParams& params, const Holder* holders, const RingCalls& rings, int node,
                            std::int64_t number, SumList& list) {
  const Routes& routes = params.args.routes;
  const int num_local_ranks = domain.num_local_ranks();
  const RailCall& call = rings.out[node];
  const RailPlace place = call.place(domain.rail.shape(), number);
  bool free = true;
  if (lane_id() == 0)
    free = wait_for_peer(scope, domain, WaitPhase::kCredit, node, layout::chunk_number(place.number),
                         [&] { return has_credit(domain, network, node, place); });
  if (!from_first_lane(free)) return false;
  __syncwarp();
  const std::int64_t in_map = (node > 0 ? routes.rows_in_prefix[node - 1] : 0) + number;
  const std::int32_t* map = params.args.send_nvl_index + in_map * num_local_ranks;
  int num_rows = 0, num_weights = 0;
  list_holders(params, holders, num_local_ranks, list, &num_rows, &num_weights,
               [&](int local) { return static_cast<std::int64_t>(map[local]); });
  __syncwarp();
  char* out = row_out(domain, network, node, call, place);
  sum_rows<T>(params, list, num_rows, num_weights, out, reinterpret_cast<float*>(out + params.rail_row.topk_weights));
  row_is_filled(domain, network, node, call, place);
  return true;
}

// C4 to C6: one of this rank's tokens. False: the block must leave.
template <typename T, typename Network>
__device__ bool sum_token(const WaitScope& scope, const RailDomain& domain, const Network& network,
                          const CombineParams& params, const Holder* holders, const RingCalls& rings,
                          std::int64_t token, SumList& list) {
  const CombineArgs& args = params.args;
  const int own = domain.rank();
  const std::int32_t* position = args.routes.position + token * args.routes.position_stride;
  const std::int32_t* node_position = args.routes.node_position + token * args.routes.node_stride;
  int num_rows = 0, num_weights = 0;
  for (int b = 0; b < 2; ++b) {
    if (args.bias[b] == nullptr) continue;
    if (lane_id() == 0) list.row[num_rows] = static_cast<const char*>(args.bias[b]) + token * args.bias_stride[b];
    ++num_rows;
  }
  for (int node = 0; node < domain.num_nodes; ++node) {
    if (node == domain.own_node) {
      list_holders(params, holders, domain.num_local_ranks(), list, &num_rows, &num_weights,
                   [&](int local) -> std::int64_t {
                     const std::int32_t at = position[domain.rank_at(node, local)];
                     return at < 0 ? -1 : first_index(domain, args.routes, own, local) + at;
                   });
      continue;
    }
    const std::int32_t at = node_position[node];
    if (at < 0) continue;
    const RailCall& call = rings.in[node];
    const RailPlace place = call.place(domain.rail.shape(), at);
    bool there = true;
    if (lane_id() == 0)
      there = wait_for_peer(scope, domain, WaitPhase::kChunk, node, layout::chunk_number(place.number),
                            [&] { return has_arrived(domain, network, node, place); });
    if (!from_first_lane(there)) return false;
    __syncwarp();
    const char* sum = row_in(domain, network, node, call, place);
    if (lane_id() == 0) {
      list.row[num_rows] = sum;
      list.weights[num_weights] = reinterpret_cast<const float*>(sum + params.rail_row.topk_weights);
    }
    ++num_rows, ++num_weights;
  }
  __syncwarp();
  sum_rows<T>(params, list, num_rows, num_weights, static_cast<char*>(args.out) + token * args.out_stride,
              args.combined_topk_weights + token * args.topk);
  for (int node = 0; node < domain.num_nodes; ++node) {
    const std::int32_t at = node == domain.own_node ? -1 : node_position[node];
    if (at < 0) continue;
    const RailPlace place = rings.in[node].place(domain.rail.shape(), at);
    row_is_read(domain, network, node, place);
  }
  __syncwarp();  // the list is free
  return true;
}

}  // namespace deep_moe::kernels::internode
