// Low-latency combine at the rank that holds rows: their sum to the owner of the token, or each by itself; weights
// ahead. README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine.cuh"

namespace deep_moe::kernels {

// The weight of this lane's entry that its owner sends ahead. False: leave.
__device__ __forceinline__ bool await_weight(const LowLatencyRun& run, const LowLatencyCombineParams& params, int owner,
                                             std::int64_t token, int half, float* weight) {
  bool ok = true;
  uint4 unit = no_unit(run.tag);
  if (lane_id() < params.slot.num_weight_units)
    ok = await_unit(run.scope, layout::WaitPhase::kWeights, owner,
                    params.slot.weights(run.my_slot(), owner, token) + lane_id() * layout::kUnitBytes, &unit);
  const int k = entry_of_lane(half), lane = k / layout::kFloatsPerUnit, i = k - lane * layout::kFloatsPerUnit;
  const std::uint32_t x = __shfl_sync(0xffffffffu, unit.x, lane), y = __shfl_sync(0xffffffffu, unit.y, lane),
                      z = __shfl_sync(0xffffffffu, unit.z, lane);
  *weight = __uint_as_float(i == 0 ? x : i == 1 ? y : z);
  return __all_sync(0xffffffffu, ok);
}

// H3. A part of a token's row to its owner, if this rank holds any of its rows; `held` is the first half. False: leave.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ bool send_held(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                          RowBuffer* buffer, HeldRow held, int owner, int token, int part) {
  const LowLatencyCombineArgs& args = params.args;
  const layout::LowLatencyCombineSlot& slot = params.slot;
  const LaneTile<Width> tile(params.num_vectors, part);
  LaneSums<T, Width> sums;
  bool any = false;
#pragma unroll 1
  for (int half = 0; half < num_halves<Width::kPlain>(args.ids.topk); ++half) {
    if (half > 0) held.load(HeldRow::Address(args, owner, token), args.ids.topk, half);
    const std::uint32_t entries = held.entries();
    if (entries == 0) continue;
    if constexpr (kByExpert) {
      // By expert a row is known to its owner by its first entry.
      for_each_row(params, buffer, row_offset(params, held.position, run.num_ranks()), entries, tile,
                   [&](int k, const LaneVectors<Width>& vectors) {
                     tile.store_units(slot.expert_row(run.slot_of(owner), token, half * kHalf + k),
                                      to_units(vectors, run.tag));
                   });
    } else {
      any = true;
      if (args.recv_weights == nullptr && !await_weight(run, params, owner, token, half, &held.weight)) return false;
      add_held(params, buffer, held, entries, run.num_ranks(), tile, &sums);
    }
  }
  if (any) tile.store_units(slot.reduced_row(run.slot_of(owner), run.rank(), token), to_units(sums.rounded(), run.tag));
  return true;
}

// W1. This rank's weights to the holders of its rows, ahead of everything else, those of equal entries summed; and what
// the second half will need: the ids of entries that have a row, and such weights. One warp of each block.
template <bool kPlain>
__device__ __forceinline__ void send_weights(const LowLatencyRun& run, const LowLatencyCombineParams& params) {
  const LowLatencyCombineArgs& args = params.args;
  const bool ahead = !args.by_expert && args.recv_weights == nullptr;
  if (run.is_whole() && !ahead) return;
  const int topk = args.ids.topk;
#pragma unroll 1
  for (std::int64_t token = blockIdx.x; token < args.ids.num_tokens; token += gridDim.x) {
    const float* row = args.topk_weights + token * args.weight_stride;
    std::int32_t id[2] = {-1, -1};
    float weight[2] = {};
#pragma unroll
    for (int half = 0; half < (kPlain ? 1 : 2); ++half) {
      if (half * kHalf >= topk) break;
      const int k = entry_of_lane(half);
      id[half] = checked_id(raw_id(args.ids, token, k), run.call.num_experts);
      weight[half] = merged_weight(args.ids, token, half, id[half], row);
      if (run.is_whole()) continue;
      const bool repeated = is_repeated(args.ids, token, half, id[half]);
      if (k >= topk) continue;
      args.kept_ids[token * topk + k] = repeated ? -1 : id[half];
      args.kept_weights[token * topk + k] = weight[half];
    }
    if (!ahead) continue;
    const std::uint64_t ranks =
        ranks_of<kPlain>(run, args.ids, token, id[0], params.expert_ranks) & ~(std::uint64_t{1} << run.rank());
#pragma unroll
    for (int half = 0; half < (kPlain ? 1 : 2); ++half) {  // units that begin in it
      if (half * kHalf >= topk) break;
      const int first = entry_of_lane(half);
      std::uint32_t words[3];
#pragma unroll
      for (int w = 0; w < 3; ++w) {
        const int k = first + w;
        const float low = __shfl_sync(0xffffffffu, weight[0], k & 31);
        const float high = !kPlain && topk > kHalf ? __shfl_sync(0xffffffffu, weight[1], k & 31) : 0.0f;
        words[w] = k < topk ? __float_as_uint(k < kHalf ? low : high) : 0;
      }
      const uint4 unit = make_uint4(words[0], words[1], words[2], run.tag);
      if (first % layout::kFloatsPerUnit == 0 && first < topk)
        for_each_rank(ranks, [&](int holder) {
          ptx::st_relaxed_sys_16(params.slot.weights(run.slot_of(holder), run.rank(), token) +
                                     first / layout::kFloatsPerUnit * layout::kUnitBytes,
                                 unit);
        });
    }
  }
}

}  // namespace deep_moe::kernels
