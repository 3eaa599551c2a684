// Units and tiles: how bytes travel as their own flags, and how a warp turns rows into units and back.
#pragma once

#include <cstdint>

#include "kernels/protocol/wait.cuh"
#include "kernels/ptx/units.cuh"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

// How a warp covers a tile. Wide: a lane has both its vectors and all its units, which takes the fewest instructions in
// all. Narrow: two lanes stand for one, the first of a pair for vector 0, units 0 and 1, the second for vector 1 and
// unit 2, and the warp covers half a tile, which takes the fewest instructions a warp. The bytes that travel are the
// same. Both are for what is common; General, wide too, is for all calls.
struct Wide {
  static constexpr int kVectors = layout::kLaneVectors, kUnits = layout::kLaneUnits;
  static constexpr int kParts = 1;      // of a tile
  static constexpr bool kPlain = true;  // at most 32 entries a token, 16-byte addresses
};
struct General : Wide {
  static constexpr bool kPlain = false;
};
struct Narrow {
  static constexpr int kVectors = 1, kUnits = 2;
  static constexpr int kParts = 2;
  static constexpr bool kPlain = true;
};

// A tile's bytes in a lane, as vectors and as payload of units. Narrow: unit 1 is the second one of both lanes.
template <class Width>
struct LaneVectors {
  uint4 v[Width::kVectors];
};
template <class Width>
struct LaneUnits {
  uint4 u[Width::kUnits];
};

// `spare` is the word that is left over, in Narrow that of the first lane of a pair.
template <class Width>
__device__ __forceinline__ LaneUnits<Width> to_units(const LaneVectors<Width>& in, std::uint32_t spare,
                                                     std::uint32_t tag) {
  return {{make_uint4(in.v[0].x, in.v[0].y, in.v[0].z, tag), make_uint4(in.v[0].w, in.v[1].x, spare, tag),
           make_uint4(in.v[1].y, in.v[1].z, in.v[1].w, tag)}};
}
template <class Width>
__device__ __forceinline__ LaneVectors<Width> to_vectors(const LaneUnits<Width>& in) {
  return {
      {make_uint4(in.u[0].x, in.u[0].y, in.u[0].z, in.u[1].x), make_uint4(in.u[1].y, in.u[2].x, in.u[2].y, in.u[2].z)}};
}
// Pairs of lanes. The whole warp.
template <>
__device__ __forceinline__ LaneUnits<Narrow> to_units<Narrow>(const LaneVectors<Narrow>& in, std::uint32_t spare,
                                                              std::uint32_t tag) {
  const bool first = lane_id() % 2 == 0;
  const uint4 mine = in.v[0];
  const std::uint32_t next = __shfl_down_sync(0xffffffffu, mine.x, 1);
  return {{make_uint4(first ? mine.x : mine.y, first ? mine.y : mine.z, first ? mine.z : mine.w, tag),
           make_uint4(mine.w, next, spare, tag)}};
}
template <>
__device__ __forceinline__ LaneVectors<Narrow> to_vectors<Narrow>(const LaneUnits<Narrow>& in) {
  const bool first = lane_id() % 2 == 0;
  const uint4 own = in.u[0], both = in.u[1];
  return {{make_uint4(first ? own.x : both.y, first ? own.y : own.x, first ? own.z : own.y, first ? both.x : own.z)}};
}
// The word that is left over.
template <class Width>
__device__ __forceinline__ std::uint32_t& spare_of(LaneUnits<Width>& units) {
  return units.u[1].z;
}

// What one lane has of one part of a row of `num_vectors` 16-byte vectors: a tile, or half of one.
template <class Width>
struct LaneTile {
  static constexpr bool kIsPair = Width::kParts > 1;  // two lanes for one
  static constexpr int kVectorStride = 32 * 16;       // bytes

  int tile, lane, first;  // first: of the lane's vectors
  int rest;               // vectors of the row from vector 0 of `lane` in the tile on

  __device__ __forceinline__ LaneTile(int num_vectors, int part)
      : tile(part / Width::kParts),
        lane(kIsPair ? part % Width::kParts * 16 + lane_id() / 2 : lane_id()),
        first(kIsPair ? lane_id() % 2 : 0),
        rest(num_vectors - tile * layout::kTileVectors - lane) {}
  __device__ __forceinline__ bool has_vector(int j) const { return rest > 32 * (first + j); }
  // Which one of three the lane's j-th unit is.
  __device__ __forceinline__ int unit(int j) const { return kIsPair ? (j == 0 ? 2 * first : 1) : j; }
  __device__ __forceinline__ bool has_unit(int j) const { return rest > (unit(j) == 2 ? 32 : 0); }
  // Of vector j in the row; of the lane's unit 0 of three in the row as it travels.
  __device__ __forceinline__ std::uint32_t vector_offset(int j) const {
    return static_cast<std::uint32_t>(tile * layout::kTileVectors + 32 * (first + j) + lane) * 16;
  }
  __device__ __forceinline__ std::uint32_t unit_offset() const {
    return static_cast<std::uint32_t>(tile * layout::kTileBytes + lane * layout::kUnitBytes);
  }
  __device__ __forceinline__ void store_units(char* row, const LaneUnits<Width>& units) const {
    row += unit_offset();
#pragma unroll
    for (int j = 0; j < Width::kUnits; ++j)
      if (has_unit(j) && (!kIsPair || j == 0 || first == 0))
        ptx::st_relaxed_sys_16(row + 32 * layout::kUnitBytes * unit(j), units.u[j]);
  }
  __device__ __forceinline__ void load_units(const char* row, LaneUnits<Width>* units) const {
    row += unit_offset();
#pragma unroll
    for (int j = 0; j < Width::kUnits; ++j)
      if (has_unit(j)) units->u[j] = ptx::ld_relaxed_sys_16(row + 32 * layout::kUnitBytes * unit(j));
  }
  __device__ __forceinline__ void store_vectors(char* row, const LaneVectors<Width>& vectors) const {
    row += vector_offset(0);
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (has_vector(j)) ptx::st_weak_16(row + kVectorStride * j, vectors.v[j]);
  }

  // Rows that are cast: vectors of eight neighbours share a scale. It travels as the spare word of `lane` % 8 == j for
  // vector j: which block of the row it belongs to, and whether this lane has to store it.
  __device__ __forceinline__ int scale_block() const { return (tile * layout::kLaneVectors + lane % 2) * 4 + lane / 8; }
  __device__ __forceinline__ bool has_scale() const { return lane % 8 < 2 && first == 0 && rest > lane % 2 * 32; }
};

// Loads a unit of this call until it is there; `*unit` holds an earlier try. False: leave.
template <class Run>
__device__ __forceinline__ bool await_unit(const Run& run, layout::WaitPhase phase, int peer, const void* address,
                                           uint4* unit) {
  const std::uint32_t tag = run.tag();
  if (unit->w == tag) [[likely]]
    return true;
  std::uint64_t seen;
  return wait_in_line(
      run.scope(), phase, peer, tag,
      [&] {
        *unit = ptx::ld_relaxed_sys_16(address);
        return std::uint64_t{unit->w};
      },
      [&](std::uint64_t now) { return now == tag; }, &seen);
}

// Whether a lane's units are all of this call. Of rows that are not cast the spare word is a tag as well: all words of
// a unit have to be looked at.
template <bool kHasScales, class Width>
__device__ __forceinline__ bool are_there(std::uint32_t tag, const LaneTile<Width>& tile,
                                          const LaneUnits<Width>& units) {
  std::uint32_t different = 0;
#pragma unroll
  for (int j = 0; j < Width::kUnits; ++j)
    if (tile.has_unit(j)) different |= units.u[j].w ^ tag;
  if (!kHasScales && tile.has_unit(1)) different |= units.u[1].z ^ tag;
  return different == 0;
}

// The same as await_unit for all units of a lane. The same answer in the whole warp.
template <bool kHasScales, class Run, class Width>
__device__ __forceinline__ bool await_units(const Run& run, layout::WaitPhase phase, int peer, const char* row,
                                            const LaneTile<Width>& tile, LaneUnits<Width>* units) {
  const std::uint32_t tag = run.tag();
  std::uint64_t seen;
  const bool ok =
      are_there<kHasScales>(tag, tile, *units) || wait_in_line(
                                                      run.scope(), phase, peer, tag,
                                                      [&] {
                                                        tile.load_units(row, units);
                                                        return std::uint64_t{are_there<kHasScales>(tag, tile, *units)};
                                                      },
                                                      [](std::uint64_t there) { return there != 0; }, &seen);
  return __all_sync(0xffffffffu, ok);
}

// A unit that cannot be of this call.
__device__ __forceinline__ uint4 no_unit(std::uint32_t tag) { return make_uint4(0, 0, 0, ~tag); }
template <class Width>
__device__ __forceinline__ LaneUnits<Width> no_units(std::uint32_t tag) {
  LaneUnits<Width> units;
#pragma unroll
  for (int j = 0; j < Width::kUnits; ++j) units.u[j] = no_unit(tag);
  return units;
}

}  // namespace deep_moe::kernels
