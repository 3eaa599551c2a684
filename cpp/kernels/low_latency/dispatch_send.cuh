// The sending side of low-latency dispatch: a token's tasks. README.md beside this file has the words and the order
// among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/call.cuh"
#include "kernels/low_latency/cast.cuh"
#include "layout/experts.hpp"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct LowLatencyDispatchParams {
  LowLatencyDispatchArgs args;
  layout::LowLatencyDispatchSlot slot;
  int num_parts = 0;      // of a row
  int num_row_tasks = 0;  // its parts, tiles of scales, and one for ids and weights
  int num_scales = 0;     // a row, as received
  int x_alignment = 16;
};

// Marks how rows travel: as they are, or cast from T.
struct AsTheyAre {};
template <typename T>
struct CastFrom {};

// A lane's part of a tile of one of this rank's rows: loaded, then, once it is needed, as it travels.
template <class Rows, class Width>
struct TileInput;

template <class Width>
struct TileInput<AsTheyAre, Width> {
  LaneVectors<Width> vectors;
  __device__ __forceinline__ TileInput(const LowLatencyDispatchParams& params, std::int64_t token,
                                       const LaneTile<Width>& tile) {
    const char* row = static_cast<const char*>(params.args.x) + token * params.args.row_stride;
    if (params.x_alignment == 16) {
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = ptx::ld_weak_16(row + tile.vector_offset(j));
    } else {
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = load_16_unaligned(row + tile.vector_offset(j), params.x_alignment);
    }
  }
  __device__ __forceinline__ const LaneVectors<Width>& finish(const LowLatencyDispatchParams&, uint4*) {
    return vectors;
  }
};

template <typename T, class Width>
struct TileInput<CastFrom<T>, Width> {
  CastInput<T> inputs[Width::kVectors];
  __device__ __forceinline__ TileInput(const LowLatencyDispatchParams& params, std::int64_t token,
                                       const LaneTile<Width>& tile)
      : inputs{} {
    const char* row = static_cast<const char*>(params.args.x) + token * params.args.row_stride;
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (tile.has_vector(j))
        inputs[j].load(row + tile.vector_offset(j) * static_cast<int>(sizeof(T)), params.x_alignment);
  }
  // In the lane with scales also those of the three blocks, as payload of a unit.
  __device__ __forceinline__ LaneVectors<Width> finish(const LowLatencyDispatchParams& params, uint4* scales) {
    LaneVectors<Width> vectors;
    float scale[Width::kVectors];
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      vectors.v[j] = cast_block<Width::kNeighbour>(inputs[j], params.args.round_scale, &scale[j]);
    if constexpr (Width::kVectors == 1) {
      const std::uint32_t bits = __float_as_uint(scale[0]);
      *scales = make_uint4(__shfl_sync(0xffffffffu, bits, 0), __shfl_sync(0xffffffffu, bits, 1),
                           __shfl_sync(0xffffffffu, bits, 2), 0);
    } else {
      *scales = make_uint4(__float_as_uint(scale[0]), __float_as_uint(scale[1]), __float_as_uint(scale[2]), 0);
    }
    return vectors;
  }
};

template <class Width>
__device__ __forceinline__ std::int64_t scale_unit_offset(const layout::LowLatencyDispatchSlot& slot,
                                                          const LaneTile<Width>& tile) {
  return static_cast<std::int64_t>(slot.scales_offset) +
         (tile.tile * layout::kScaleUnitsPerTile + tile.scale_group()) * layout::kUnitBytes;
}

// S3. One tile of a token's row to every rank of `ranks`.
template <class Width>
__device__ __forceinline__ void send_tile(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                          std::int64_t token, const LaneTile<Width>& tile,
                                          const LaneVectors<Width>& vectors, uint4 scales, std::uint64_t ranks) {
  const layout::LowLatencyDispatchSlot& slot = params.slot;
  const LaneUnits<Width> units = to_units(vectors, run.tag);
  scales.w = run.tag;
  for_each_rank(ranks, [&](int dst) {
    char* row = slot.row(run.slot_of(dst), run.rank(), token);
    tile.store_units(row, units);
    if (slot.num_scale_units > 0 && tile.has_scale_unit())
      ptx::st_relaxed_sys_16(row + scale_unit_offset(slot, tile), scales);
  });
}

// The scales that a row brings along, as bytes: items of one tile.
struct ScaleTile {
  int first, count;
  __device__ ScaleTile(const ScaleRows& scales, int tile) {
    const int per_tile = layout::kTilePayload / scales.item_bytes;
    first = tile * per_tile;
    count = min(per_tile, static_cast<int>(scales.num_items) - first);
  }
};

__device__ __forceinline__ void gather_scales(const ScaleRows& scales, std::int64_t token, const ScaleTile& items,
                                              TileBuffer& buffer) {
  const char* row = static_cast<const char*>(scales.data) + token * scales.row_stride;
#pragma unroll 1
  for (int i = lane_id(); i < items.count; i += 32)
    store_item(buffer.bytes + i * scales.item_bytes,
               load_item(row + (items.first + i) * scales.item_stride, scales.item_bytes), scales.item_bytes);
  __syncwarp();
}

__device__ __forceinline__ void send_scale_tile(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                                std::int64_t token, int tile, std::uint64_t ranks, TileBuffer& buffer) {
  const ScaleRows& scales = params.args.scales;
  const ScaleTile items(scales, tile);
  gather_scales(scales, token, items, buffer);
  const LaneTile<Wide> lane((scales.num_items * scales.item_bytes + 15) / 16 * 16, tile);
  LaneVectors<Wide> vectors;
#pragma unroll
  for (int j = 0; j < layout::kLaneVectors; ++j)
    vectors.v[j] = reinterpret_cast<const uint4*>(buffer.bytes)[32 * j + lane_id()];
  const LaneUnits<Wide> units = to_units(vectors, run.tag);
  for_each_rank(ranks, [&](int dst) {
    lane.store_units(params.slot.row(run.slot_of(dst), run.rank(), token) + params.slot.scales_offset, units);
  });
  __syncwarp();
}

// S2. A token's ids to every rank, and its weights to those of `ranks`.
__device__ __forceinline__ void send_words(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                           std::int64_t token, const TokenIds& ids, std::uint64_t ranks,
                                           TileBuffer& buffer) {
  const LowLatencyDispatchArgs& args = params.args;
  const int topk = args.ids.topk, num_units = params.slot.num_id_units;
  auto* encoded = reinterpret_cast<std::uint16_t*>(buffer.bytes);
  std::uint32_t weight[TokenIds::kPerLane];
#pragma unroll
  for (int i = 0; i < TokenIds::kPerLane; ++i) {
    const int k = lane_id() + 32 * i;
    weight[i] = 0;
    if (params.slot.num_weight_units > 0 && k < topk)
      weight[i] = __float_as_uint(args.topk_weights[token * args.weight_stride + k]);
  }
#pragma unroll
  for (int i = 0; i < TokenIds::kPerLane; ++i) {
    const int k = lane_id() + 32 * i;
    bool repeated = (__match_any_sync(0xffffffffu, ids.id[i]) & ((1u << lane_id()) - 1)) != 0;
    if (topk > 32 && i > 0) {
#pragma unroll 1
      for (int earlier = 0; earlier < 32; ++earlier)
        repeated = __shfl_sync(0xffffffffu, ids.id[0], earlier) == ids.id[i] || repeated;
    }
    repeated = repeated && ids.id[i] >= 0;
    const std::uint32_t word = ids.id[i] >= 0 ? static_cast<std::uint32_t>(ids.id[i]) : layout::kNoExpert;
    encoded[k] = static_cast<std::uint16_t>(repeated ? word | layout::kRepeatedExpert : word);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane_id(); i < num_units * run.num_ranks(); i += 32) {
    const int dst = i / num_units, first = i % num_units * layout::kIdsPerUnit;
    std::uint32_t words[3];
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      const int k = first + 2 * w;
      words[w] = (k < topk ? std::uint32_t{encoded[k]} : layout::kNoExpert) |
                 (k + 1 < topk ? std::uint32_t{encoded[k + 1]} : layout::kNoExpert) << 16;
    }
    ptx::st_relaxed_sys_16(params.slot.ids(run.slot_of(dst), run.rank(), token) + i % num_units * layout::kUnitBytes,
                           make_uint4(words[0], words[1], words[2], run.tag));
  }
  __syncwarp();
  if (params.slot.num_weight_units == 0) return;
  auto* weights = reinterpret_cast<std::uint32_t*>(buffer.bytes);
#pragma unroll
  for (int i = 0; i < TokenIds::kPerLane; ++i) weights[lane_id() + 32 * i] = weight[i];
  if (lane_id() < layout::kFloatsPerUnit) weights[32 * TokenIds::kPerLane + lane_id()] = 0;
  __syncwarp();
  if (lane_id() < params.slot.num_weight_units) {
    const std::uint32_t* words = weights + layout::kFloatsPerUnit * lane_id();
    const uint4 unit = make_uint4(words[0], words[1], words[2], run.tag);
    for_each_rank(ranks, [&](int dst) {
      ptx::st_relaxed_sys_16(params.slot.row(run.slot_of(dst), run.rank(), token) + params.slot.weights_offset +
                                 lane_id() * layout::kUnitBytes,
                             unit);
    });
  }
  __syncwarp();
}

// The first half: this block's tasks. False: leave.
template <class Rows, class Width>
__device__ __forceinline__ bool send_rows(LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                          TileBuffer& buffer) {
  const LowLatencyDispatchArgs& args = params.args;
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int warps = static_cast<int>(blockDim.x / 32), warp = static_cast<int>(threadIdx.x / 32);
  const int total = static_cast<int>(args.num_tokens) * params.num_row_tasks, num_parts = params.num_parts;
  bool ok = true;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * warps + warp; ok && i < total; i += run.num_carriers() * warps) {
    const std::int64_t token = i / params.num_row_tasks;
    const int task = i % params.num_row_tasks;
    const RawIds raw(args.ids, token);
    const auto ranks_of = [&](const TokenIds& ids) {
      const std::uint64_t ranks = ids.ranks(experts);
      return run.is_whole() ? ranks & ~(std::uint64_t{1} << run.rank()) : ranks;
    };
    if (task < num_parts) {
      const LaneTile<Width> tile(args.row_bytes, task);
      TileInput<Rows, Width> input(params, token, tile);
      uint4 scales = make_uint4(0, 0, 0, 0);
      const LaneVectors<Width> vectors = input.finish(params, &scales);
      const std::uint64_t ranks = ranks_of(TokenIds(raw, run.call.num_experts));
      ok = await_slot(run);
      if (ok) send_tile(run, params, token, tile, vectors, scales, ranks);
    } else {
      const TokenIds ids(raw, run.call.num_experts);
      const std::uint64_t ranks = ranks_of(ids);
      ok = await_slot(run);
      if (!ok) break;
      if (task < num_parts + params.slot.num_scale_tiles)
        send_scale_tile(run, params, token, task - num_parts, ranks, buffer);
      else
        send_words(run, params, token, ids, ranks, buffer);
    }
  }
  return ok;
}

}  // namespace deep_moe::kernels
