// The sending side of low-latency dispatch: rows, ids, weights. README.md beside this file has the words and the order
// among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/call.cuh"
#include "kernels/low_latency/cast.cuh"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct LowLatencyDispatchParams {
  LowLatencyHot hot;
  LowLatencyDispatchArgs args;
  layout::LowLatencyDispatchSlot slot;
  ExpertRanks expert_ranks;
  Divisor by_row_tasks, by_id_units, by_ranks;
  int num_vectors = 0;    // of a row as it travels
  int num_parts = 0;      // of a row
  int num_row_tasks = 0;  // its parts and tiles of scales
  int num_scales = 0;     // a row, as received
  int x_alignment = 16;
  int words_per_source = 0;  // of the bit table
  int num_words = 0;         // of one expert: all sources'
  int chunk_words = 0;       // of them in shared memory at a time
  int num_carriers = 0;      // warps of a block that carry rows
  bool early = false;        // the next launch may start at once
};

// Marks how rows travel: as they are, or cast from T.
struct AsTheyAre {};
template <typename T>
struct CastFrom {};

template <class Rows>
inline constexpr bool kCasts = !std::is_same_v<Rows, AsTheyAre>;

// A lane's part of a tile of one of this rank's rows: loaded, then, once it is needed, as it travels.
template <class Rows, class Width>
struct TileInput;

template <class Width>
struct TileInput<AsTheyAre, Width> {
  LaneVectors<Width> vectors;
  __device__ __forceinline__ void load(const LowLatencyDispatchParams& params, int token, const LaneTile<Width>& tile) {
    const char* row = static_cast<const char*>(params.args.x) + token * params.args.row_stride;
    if (Width::kPlain || params.x_alignment == 16) {
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = ptx::ld_weak_16(row + tile.vector_offset(j));
    } else {
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = load_16_anywhere(row + tile.vector_offset(j));
    }
  }
  __device__ __forceinline__ void finish(const LowLatencyDispatchParams&, LaneVectors<Width>* out, uint4*) const {
    *out = vectors;
  }
};

template <typename T, class Width>
struct TileInput<CastFrom<T>, Width> {
  CastInput<T> inputs[Width::kVectors];
  __device__ __forceinline__ void load(const LowLatencyDispatchParams& params, int token, const LaneTile<Width>& tile) {
    const char* row = static_cast<const char*>(params.args.x) + token * params.args.row_stride;
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < CastInput<T>::kVectors; ++i) inputs[j].vectors[i] = make_uint4(0, 0, 0, 0);
      if (tile.has_vector(j))
        inputs[j].load(row + tile.vector_offset(j) * static_cast<int>(sizeof(T)),
                       Width::kPlain ? 16 : params.x_alignment);
    }
  }
  // In the lane with scales also those of the three blocks, as payload of a unit.
  __device__ __forceinline__ void finish(const LowLatencyDispatchParams& params, LaneVectors<Width>* out,
                                         uint4* scales) const {
    float scale[Width::kVectors];
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      out->v[j] = cast_block<Width::kNeighbour>(inputs[j], params.args.round_scale, &scale[j]);
    if constexpr (Width::kVectors == 1) {
      const std::uint32_t bits = __float_as_uint(scale[0]);
      *scales = make_uint4(__shfl_sync(0xffffffffu, bits, 0), __shfl_sync(0xffffffffu, bits, 1),
                           __shfl_sync(0xffffffffu, bits, 2), 0);
    } else {
      *scales = make_uint4(__float_as_uint(scale[0]), __float_as_uint(scale[1]), __float_as_uint(scale[2]), 0);
    }
  }
};

template <class Width>
__device__ __forceinline__ std::int64_t scale_unit_offset(const layout::LowLatencyDispatchSlot& slot,
                                                          const LaneTile<Width>& tile) {
  return static_cast<std::int64_t>(slot.scales_offset) +
         (tile.tile * layout::kScaleUnitsPerTile + tile.scale_group()) * layout::kUnitBytes;
}

// Scratch memory of a warp.
struct alignas(16) TileBuffer {
  char bytes[layout::kTilePayload];
};

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
               load_fresh_item(row + (items.first + i) * scales.item_stride, scales.item_bytes), scales.item_bytes);
  __syncwarp();
}

__device__ __forceinline__ void send_scale_tile(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                                std::int64_t token, int tile, std::uint64_t ranks, TileBuffer& buffer) {
  const ScaleRows& scales = params.args.scales;
  const ScaleTile items(scales, tile);
  gather_scales(scales, token, items, buffer);
  const LaneTile<Wide> lane(static_cast<int>((scales.num_items * scales.item_bytes + 15) / 16), tile);
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

// A task of one of this rank's tokens: a part of its row, or a tile of the scales that it brings along.
template <class Rows, class Width>
struct SentPart {
  int token = 0, part = 0;
  std::int64_t raw = -1;
  TileInput<Rows, Width> input;

  // The whole warp. Nothing that is loaded is waited for.
  __device__ __forceinline__ void load(const LowLatencyDispatchParams& params, int task) {
    std::uint32_t rest;
    token = static_cast<int>(params.by_row_tasks.divide(static_cast<std::uint32_t>(task), &rest));
    part = static_cast<int>(rest);
    raw = raw_id(params.args.ids, token, lane_id());
    if (part < params.num_parts) input.load(params, token, LaneTile<Width>(params.num_vectors, part));
  }
  // S3. To every rank of the token's experts, this rank too.
  __device__ __forceinline__ void send(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                       TileBuffer* buffer) const {
    const std::uint64_t ranks = ranks_of<Width::kPlain>(run, params.args.ids, token,
                                                        checked_id(raw, run.call.num_experts), params.expert_ranks);
    if (ranks == 0) return;
    const layout::LowLatencyDispatchSlot& slot = params.slot;
    if constexpr (!kCasts<Rows>) {
      if (part >= params.num_parts) return send_scale_tile(run, params, token, part - params.num_parts, ranks, *buffer);
    }
    const LaneTile<Width> tile(params.num_vectors, part);
    LaneVectors<Width> vectors;
    uint4 scales;
    input.finish(params, &vectors, &scales);
    const LaneUnits<Width> units = to_units(vectors, run.tag);
    for_each_rank(ranks, [&](int dst) {
      char* row = slot.row(run.slot_of(dst), run.rank(), token);
      tile.store_units(row, units);
      if constexpr (kCasts<Rows>) {
        if (tile.has_scale_unit())
          ptx::st_relaxed_sys_16(row + scale_unit_offset(slot, tile),
                                 make_uint4(scales.x, scales.y, scales.z, run.tag));
      }
    });
  }
};

__device__ __forceinline__ std::uint32_t encoded(std::int32_t id, bool repeated) {
  if (id < 0) return layout::kNoExpert;
  return static_cast<std::uint32_t>(id) | (repeated ? layout::kRepeatedExpert : 0u);
}

// S2. Ids of tokens, 32 / width of them from `first` on, to every rank, and their weights to the ranks of their
// experts. At most 32 entries a token. The whole warp.
class WordSender {
 public:
  __device__ WordSender(const LowLatencyDispatchParams& params)
      : args_(params.args),
        params_(params),
        width_(params.args.ids.topk <= 8    ? 8
               : params.args.ids.topk <= 16 ? 16
                                            : 32),
        k_(lane_id() & (width_ - 1)) {}
  __device__ int tokens_at_a_time() const { return 32 / width_; }

  __device__ __forceinline__ void load(int group) {
    token_ = group * tokens_at_a_time() + lane_id() / width_;
    has_entry_ = token_ < args_.num_tokens && k_ < args_.ids.topk;
    raw_ = -1, weight_ = 0;
    if (!has_entry_) return;
    raw_ = raw_id(args_.ids, token_, k_);
    if (args_.with_weights) weight_ = ptx::ld_relaxed_gpu(args_.topk_weights + token_ * args_.weight_stride + k_);
  }

  __device__ __forceinline__ void send(const LowLatencyRun& run) const {
    const layout::LowLatencyDispatchSlot& slot = params_.slot;
    const std::int32_t id = checked_id(raw_, run.call.num_experts);
    // Entries alike among those of one token.
    const std::uint32_t alike =
        __match_any_sync(0xffffffffu, id < 0 ? lane_id() - 64 : lane_id() / width_ * (layout::kMaxExperts + 1) + id);
    const bool repeated = (alike & ((1u << lane_id()) - 1)) != 0;
    float weight = __fadd_rn(0.0f, weight_);
    if (__any_sync(0xffffffffu, repeated)) {
#pragma unroll 1
      for (int k = 0; k < width_; ++k) {
        const float other = __shfl_sync(0xffffffffu, weight_, k, width_);
        const int lane = lane_id() - k_ + k;
        if (lane > lane_id() && (alike >> lane & 1) != 0) weight = __fadd_rn(weight, other);
      }
    }
    const std::uint32_t mine = encoded(id, repeated);
    const std::uint32_t pair = mine | __shfl_down_sync(0xffffffffu, mine, 1) << 16;
    constexpr std::uint32_t kNone = layout::kNoExpert | layout::kNoExpert << 16;
    const std::uint32_t second = __shfl_down_sync(0xffffffffu, pair, 2), third = __shfl_down_sync(0xffffffffu, pair, 4);
    const auto in_row = [&](int k, std::uint32_t value, std::uint32_t none) { return k < width_ ? value : none; };
    if (has_entry_ && k_ % layout::kIdsPerUnit == 0) {
      const uint4 unit = make_uint4(pair, in_row(k_ + 2, second, kNone), in_row(k_ + 4, third, kNone), run.tag);
#pragma unroll 1
      for (int dst = 0; dst < run.num_ranks(); ++dst)
        if (run.is_live(dst))
          ptx::st_relaxed_sys_16(
              slot.ids(run.slot_of(dst), run.rank(), token_) + k_ / layout::kIdsPerUnit * layout::kUnitBytes, unit);
    }
    if (slot.num_weight_units == 0) return;
    std::uint64_t ranks = 0;
    if (id >= 0) ranks = std::uint64_t{1} << params_.expert_ranks.rank_of(static_cast<std::uint32_t>(id));
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      if (step < width_) ranks |= __shfl_xor_sync(0xffffffffu, ranks, step);
    ranks &= run.live;
    const std::uint32_t bits = __float_as_uint(weight);
    const std::uint32_t next = __shfl_down_sync(0xffffffffu, bits, 1), last = __shfl_down_sync(0xffffffffu, bits, 2);
    if (!has_entry_ || k_ % layout::kFloatsPerUnit != 0) return;
    const uint4 unit = make_uint4(bits, in_row(k_ + 1, next, 0), in_row(k_ + 2, last, 0), run.tag);
    for_each_rank(ranks, [&](int dst) {
      ptx::st_relaxed_sys_16(slot.row(run.slot_of(dst), run.rank(), token_) + slot.weights_offset +
                                 k_ / layout::kFloatsPerUnit * layout::kUnitBytes,
                             unit);
    });
  }

 private:
  const LowLatencyDispatchArgs& args_;
  const LowLatencyDispatchParams& params_;
  const int width_, k_;
  int token_ = 0;
  bool has_entry_ = false;
  std::int64_t raw_ = -1;
  float weight_ = 0;
};

// S2 for more than 32 entries a token, by way of shared memory.
struct ManyEntries {
  std::uint16_t ids[layout::kMaxTopk + layout::kIdsPerUnit];
  float weights[layout::kMaxTopk + layout::kFloatsPerUnit];
};
static __device__ __noinline__ void send_many_words(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                                    std::int64_t token, ManyEntries& entries) {
  const LowLatencyDispatchArgs& args = params.args;
  const layout::LowLatencyDispatchSlot& slot = params.slot;
  std::int32_t id = -1;
#pragma unroll 1
  for (int half = 1; half >= 0; --half) {
    const int k = entry_of_lane(half);
    id = checked_id(raw_id(args.ids, token, k), run.call.num_experts);
    entries.ids[k] = static_cast<std::uint16_t>(encoded(id, is_repeated(args.ids, token, half, id)));
    entries.weights[k] = 0;
    if (args.with_weights)
      entries.weights[k] = merged_weight(args.ids, token, half, id, args.topk_weights + token * args.weight_stride);
  }
  if (lane_id() < layout::kIdsPerUnit) entries.ids[layout::kMaxTopk + lane_id()] = layout::kNoExpert;
  if (lane_id() < layout::kFloatsPerUnit) entries.weights[layout::kMaxTopk + lane_id()] = 0;
  __syncwarp();
  if (lane_id() < slot.num_id_units) {
    std::uint32_t words[3];
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      const int k = layout::kIdsPerUnit * lane_id() + 2 * w;
      words[w] = entries.ids[k] | static_cast<std::uint32_t>(entries.ids[k + 1]) << 16;
    }
#pragma unroll 1
    for (int dst = 0; dst < run.num_ranks(); ++dst)
      if (run.is_live(dst))
        ptx::st_relaxed_sys_16(slot.ids(run.slot_of(dst), run.rank(), token) + lane_id() * layout::kUnitBytes,
                               make_uint4(words[0], words[1], words[2], run.tag));
  }
  __syncwarp();
  const std::uint64_t ranks = ranks_of<false>(run, args.ids, token, id, params.expert_ranks);
  if (lane_id() < slot.num_weight_units) {
    const float* at = entries.weights + layout::kFloatsPerUnit * lane_id();
    const uint4 unit = make_uint4(__float_as_uint(at[0]), __float_as_uint(at[1]), __float_as_uint(at[2]), run.tag);
    for_each_rank(ranks, [&](int dst) {
      ptx::st_relaxed_sys_16(
          slot.row(run.slot_of(dst), run.rank(), token) + slot.weights_offset + lane_id() * layout::kUnitBytes, unit);
    });
  }
  __syncwarp();
}

}  // namespace deep_moe::kernels
