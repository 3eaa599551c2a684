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
  Divisor by_piece, by_sources, by_num_pieces, by_count_units;
  int num_vectors = 0;    // of a row as it travels
  int num_parts = 0;      // of a row
  int num_row_tasks = 0;  // its parts and tiles of scales
  int piece = 0;          // of them a block has: some, where there are fewer tokens than blocks
  int num_pieces = 0;     // that is, blocks a token
  int per_block = 0;      // of this rank's tokens, one after another
  int stride = 0;         // from one to the next of a source's tokens that a block receives
  int num_scales = 0;     // a row, as received
  int x_alignment = 16;
  int num_carriers = 0;  // warps of a block that carry rows
  bool early = false;    // the next launch may start at once
};

// What of a call a block has a part in.
struct BlockShare {
  int begin, end;   // this rank's tokens
  int first_part;   // of each token, also of those that come in
  int first_token;  // of a source
  __device__ explicit BlockShare(const LowLatencyDispatchParams& params) {
    std::uint32_t rest;
    first_token = static_cast<int>(params.by_num_pieces.divide(blockIdx.x, &rest));
    first_part = static_cast<int>(rest) * params.piece;
    const int num_tokens = static_cast<int>(params.args.num_tokens);
    begin = min(first_token * params.per_block, num_tokens);
    end = min(begin + params.per_block, num_tokens);
  }
  // Task `number` of those of each token.
  __device__ __forceinline__ int part_of(const LowLatencyDispatchParams& params, int number, int* item) const {
    std::uint32_t part;
    *item = static_cast<int>(params.by_piece.divide(static_cast<std::uint32_t>(number), &part));
    return first_part + static_cast<int>(part);
  }
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
  __device__ __forceinline__ void finish(const LowLatencyDispatchParams&, LaneVectors<Width>* out,
                                         std::uint32_t*) const {
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
  // And the word that is left over in its units.
  __device__ __forceinline__ void finish(const LowLatencyDispatchParams& params, LaneVectors<Width>* out,
                                         std::uint32_t* spare) const {
    float scale[Width::kVectors];
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      out->v[j] = cast_block<Width::kParts>(inputs[j], params.args.round_scale, &scale[j]);
    if constexpr (Width::kVectors == 1) {
      const std::uint32_t mine = __float_as_uint(scale[0]), next = __shfl_down_sync(0xffffffffu, mine, 1);
      *spare = lane_id() / 2 % 2 == 0 ? mine : next;
    } else {
      *spare = __float_as_uint(lane_id() % 2 == 0 ? scale[0] : scale[1]);
    }
  }
};

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

template <typename Ranks>
__device__ __forceinline__ void send_scale_tile(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                                std::int64_t token, int tile, Ranks ranks, TileBuffer& buffer) {
  const ScaleRows& scales = params.args.scales;
  const ScaleTile items(scales, tile);
  gather_scales(scales, token, items, buffer);
  const LaneTile<Wide> lane(static_cast<int>((scales.num_items * scales.item_bytes + 15) / 16), tile);
  LaneVectors<Wide> vectors;
#pragma unroll
  for (int j = 0; j < layout::kLaneVectors; ++j)
    vectors.v[j] = reinterpret_cast<const uint4*>(buffer.bytes)[32 * j + lane_id()];
  const LaneUnits<Wide> units = to_units(vectors, run.tag(), run.tag());
  for_each_rank(ranks, [&](int dst) {
    lane.store_units(params.slot.row(run.slot_of(dst), run.rank(), token) + params.slot.num_tiles * layout::kTileBytes,
                     units);
  });
  __syncwarp();
}

// A task of one of this rank's tokens: a part of its row, or a tile of the scales that it brings along.
template <class Rows, class Width>
struct SentPart {
  int token = 0, part = 0;
  std::int64_t raw = -1;  // id of this lane's entry of the first half
  TileInput<Rows, Width> input;
  LaneVectors<Width> vectors;  // as they travel
  std::uint32_t spare = 0;

  // The whole warp. Nothing that is loaded is waited for.
  __device__ __forceinline__ void load(const LowLatencyDispatchParams& params, int token_, int part_) {
    token = token_, part = part_;
    raw = raw_id(params.args.ids, token, lane_id());
    if (part < params.num_parts) input.load(params, token, LaneTile<Width>(params.num_vectors, part));
  }
  __device__ __forceinline__ void finish(const LowLatencyDispatchParams& params) {
    if (part < params.num_parts) input.finish(params, &vectors, &spare);
  }
  // S3. To every rank of the token's experts; in one launch but for this rank.
  template <bool kToItself>
  __device__ __forceinline__ void send(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                       TileBuffer* buffer) const {
    auto ranks = ranks_of<Width::kPlain>(run, params.args.ids, token, checked_id(raw, run.call.num_experts),
                                         params.expert_ranks);
    if (!kToItself) ranks &= ~(RankBits<Width::kPlain>{1} << run.rank());
    if (ranks == 0) return;
    if constexpr (!kCasts<Rows>) {
      if (part >= params.num_parts) return send_scale_tile(run, params, token, part - params.num_parts, ranks, *buffer);
    }
    const LaneTile<Width> tile(params.num_vectors, part);
    const LaneUnits<Width> units = to_units(vectors, kCasts<Rows> ? spare : run.tag(), run.tag());
    for_each_rank(ranks,
                  [&](int dst) { tile.store_units(params.slot.row(run.slot_of(dst), run.rank(), token), units); });
  }
};

}  // namespace deep_moe::kernels
