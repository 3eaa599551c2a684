// Low-latency combine: weights that the owners of tokens send ahead. README.md beside this file has the words and the
// order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine.cuh"

namespace deep_moe::kernels {

// The weight of this lane's entry that its owner sends ahead. False: leave.
__device__ __forceinline__ bool await_weight(const LowLatencyRun& run, const LowLatencyCombineParams& params, int owner,
                                             std::int64_t token, int half, float* weight) {
  bool ok = true;
  uint4 unit = no_unit(run.tag());
  if (lane_id() < params.slot.num_weight_units)
    ok = await_unit(run, layout::WaitPhase::kWeights, owner,
                    params.slot.weights(run.my_slot(), owner, token) + lane_id() * layout::kUnitBytes, &unit);
  const int k = entry_of_lane(half), lane = k / layout::kUnitWords, i = k - lane * layout::kUnitWords;
  const std::uint32_t x = __shfl_sync(0xffffffffu, unit.x, lane), y = __shfl_sync(0xffffffffu, unit.y, lane),
                      z = __shfl_sync(0xffffffffu, unit.z, lane);
  *weight = __uint_as_float(i == 0 ? x : i == 1 ? y : z);
  return __all_sync(0xffffffffu, ok);
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
      const uint4 unit = make_uint4(words[0], words[1], words[2], run.tag());
      if (first % layout::kUnitWords == 0 && first < topk)
        for_each_rank(ranks, [&](int holder) {
          ptx::st_relaxed_sys_16(params.slot.weights(run.slot_of(holder), run.rank(), token) +
                                     first / layout::kUnitWords * layout::kUnitBytes,
                                 unit);
        });
    }
  }
}

}  // namespace deep_moe::kernels
