// Units and tiles: how bytes travel as their own flags, and how a warp turns rows into units and back.
#pragma once

#include <cstdint>

#include "kernels/protocol/wait.cuh"
#include "kernels/ptx/units.cuh"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

// How a warp covers a tile. Wide: a lane has all its vectors and units, which takes the fewest instructions in all.
// Narrow: four lanes stand for one, lane q of a quad for its vector q and its unit q, and the warp covers a quarter of
// the tile, which takes the fewest instructions a warp. The bytes that travel are the same. Both are for what is
// common; General, wide too, is for all calls.
struct Wide {
  static constexpr int kVectors = layout::kLaneVectors, kUnits = layout::kLaneUnits;
  static constexpr int kParts = 1;      // of a tile
  static constexpr int kNeighbour = 1;  // lanes between those with the same vector of neighbours
  static constexpr bool kPlain = true;  // at most 32 entries a token, 16-byte addresses, the bit table in one piece
};
struct General : Wide {
  static constexpr bool kPlain = false;
};
struct Narrow {
  static constexpr int kVectors = 1, kUnits = 1;
  static constexpr int kParts = 4;
  static constexpr int kNeighbour = 4;
  static constexpr bool kPlain = true;
};

// A tile's bytes in a lane, as vectors and as payload of units.
template <class Width>
struct LaneVectors {
  uint4 v[Width::kVectors];
};
template <class Width>
struct LaneUnits {
  uint4 u[Width::kUnits];
};

template <class Width>
__device__ __forceinline__ LaneUnits<Width> to_units(const LaneVectors<Width>& in, std::uint32_t tag) {
  return {{make_uint4(in.v[0].x, in.v[0].y, in.v[0].z, tag), make_uint4(in.v[0].w, in.v[1].x, in.v[1].y, tag),
           make_uint4(in.v[1].z, in.v[1].w, in.v[2].x, tag), make_uint4(in.v[2].y, in.v[2].z, in.v[2].w, tag)}};
}
template <class Width>
__device__ __forceinline__ LaneVectors<Width> to_vectors(const LaneUnits<Width>& in) {
  return {{make_uint4(in.u[0].x, in.u[0].y, in.u[0].z, in.u[1].x),
           make_uint4(in.u[1].y, in.u[1].z, in.u[2].x, in.u[2].y),
           make_uint4(in.u[2].z, in.u[3].x, in.u[3].y, in.u[3].z)}};
}

// The whole warp. Unit q has words 3 q to 3 q + 2 of the quad's twelve: from vector 3 q / 4 and the next.
template <>
__device__ __forceinline__ LaneUnits<Narrow> to_units<Narrow>(const LaneVectors<Narrow>& in, std::uint32_t tag) {
  const int q = lane_id() % 4, quad = lane_id() - q, first = quad + 3 * q / 4, second = quad + (3 * q + 2) / 4;
  const uint4 mine = in.v[0];
  const auto from = [](std::uint32_t word, int lane) { return __shfl_sync(0xffffffffu, word, lane); };
  const uint4 a = make_uint4(from(mine.x, first), from(mine.y, first), from(mine.z, first), from(mine.w, first));
  const uint2 b = make_uint2(from(mine.x, second), from(mine.y, second));
  return {{make_uint4(q == 0   ? a.x
                      : q == 1 ? a.w
                      : q == 2 ? a.z
                               : a.y,
                      q == 0   ? a.y
                      : q == 1 ? b.x
                      : q == 2 ? a.w
                               : a.z,
                      q == 0   ? a.z
                      : q == 1 ? b.y
                      : q == 2 ? b.x
                               : a.w,
                      tag)}};
}
// Vector q has words 4 q to 4 q + 3: from unit q and the next.
template <>
__device__ __forceinline__ LaneVectors<Narrow> to_vectors<Narrow>(const LaneUnits<Narrow>& in) {
  const int q = lane_id() % 4, next = lane_id() - q + min(q + 1, 3);
  const uint4 a = in.u[0];
  const auto from = [&](std::uint32_t word) { return __shfl_sync(0xffffffffu, word, next); };
  const uint3 b = make_uint3(from(a.x), from(a.y), from(a.z));
  return {{make_uint4(q == 0   ? a.x
                      : q == 1 ? a.y
                               : a.z,
                      q == 0   ? a.y
                      : q == 1 ? a.z
                               : b.x,
                      q == 0   ? a.z
                      : q == 1 ? b.x
                               : b.y,
                      q == 0   ? b.x
                      : q == 1 ? b.y
                               : b.z)}};
}

// What one lane has of one part of a row of `num_vectors` 16-byte vectors: a tile, or a quarter of one.
template <class Width>
struct LaneTile {
  int tile, lane, first;  // first: of the lane's vectors and units
  int rest;               // vectors of the row from the lane's first one of the tile on

  __device__ __forceinline__ LaneTile(int num_vectors, int part)
      : tile(part / Width::kParts),
        lane(Width::kParts == 1 ? lane_id() : part % Width::kParts * 8 + lane_id() / 4),
        first(Width::kParts == 1 ? 0 : lane_id() % 4),
        rest(num_vectors - tile * layout::kTileVectors - lane) {}
  __device__ __forceinline__ bool has_vector(int j) const {
    return first + j < layout::kLaneVectors && rest > 32 * (first + j);
  }
  // A unit begins in the vector before its own, but for the first.
  __device__ __forceinline__ bool has_unit(int j) const { return rest > max(32 * (first + j) - 32, 0); }
  // Of vector j in the row; of unit j in the row as it travels.
  __device__ __forceinline__ std::uint32_t vector_offset(int j) const {
    return static_cast<std::uint32_t>(tile * layout::kTileVectors + 32 * (first + j) + lane) * 16;
  }
  __device__ __forceinline__ std::uint32_t unit_offset(int j) const {
    return static_cast<std::uint32_t>(tile * layout::kTileBytes + (32 * (first + j) + lane) * layout::kUnitBytes);
  }
  __device__ __forceinline__ void store_units(char* row, const LaneUnits<Width>& units) const {
    row += unit_offset(0);
#pragma unroll
    for (int j = 0; j < Width::kUnits; ++j)
      if (has_unit(j)) ptx::st_relaxed_sys_16(row + 32 * layout::kUnitBytes * j, units.u[j]);
  }
  __device__ __forceinline__ void load_units(const char* row, LaneUnits<Width>* units) const {
    row += unit_offset(0);
#pragma unroll
    for (int j = 0; j < Width::kUnits; ++j)
      if (has_unit(j)) units->u[j] = ptx::ld_relaxed_sys_16(row + 32 * layout::kUnitBytes * j);
  }
  __device__ __forceinline__ void store_vectors(char* row, const LaneVectors<Width>& vectors) const {
    row += vector_offset(0);
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (has_vector(j)) ptx::st_weak_16(row + 32 * 16 * j, vectors.v[j]);
  }

  // Scales: of the eight lanes' vector j that make a block, in lane_with_scales() for all three j.
  __device__ __forceinline__ int scale_group() const { return lane / 8; }
  __device__ __forceinline__ int lane_with_scales() const { return Width::kParts == 1 ? lane_id() / 8 * 8 : 0; }
  __device__ __forceinline__ bool has_scale_unit() const { return lane_id() == lane_with_scales() && rest > 0; }
};

// Loads a unit of this call until it is there; `*unit` holds an earlier try. False: leave.
__device__ __forceinline__ bool await_unit(const WaitScope& scope, layout::WaitPhase phase, int peer,
                                           const void* address, uint4* unit) {
  const std::uint32_t tag = static_cast<std::uint32_t>(scope.epoch);
  if (unit->w == tag) [[likely]]
    return true;
  std::uint64_t seen;
  return wait_in_line(
      scope, phase, peer, tag,
      [&] {
        *unit = ptx::ld_relaxed_sys_16(address);
        return std::uint64_t{unit->w};
      },
      [&](std::uint64_t now) { return now == tag; }, &seen);
}

// The same for all units of a lane, and one more, of its scales, if `scale_address` is not null. The same answer in the
// whole warp.
template <class Width>
__device__ __forceinline__ bool await_units(const WaitScope& scope, layout::WaitPhase phase, int peer, const char* row,
                                            const LaneTile<Width>& tile, LaneUnits<Width>* units,
                                            const void* scale_address = nullptr, uint4* scales = nullptr) {
  const std::uint32_t tag = static_cast<std::uint32_t>(scope.epoch);
  const auto different = [&] {  // from the tag, in any of the tags
    std::uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < Width::kUnits; ++j)
      if (tile.has_unit(j)) bits |= units->u[j].w ^ tag;
    if (scale_address != nullptr) bits |= scales->w ^ tag;
    return std::uint64_t{bits};
  };
  std::uint64_t seen = different();
  const bool ok = seen == 0 || wait_in_line(
                                   scope, phase, peer, tag,
                                   [&] {
                                     tile.load_units(row, units);
                                     if (scale_address != nullptr) *scales = ptx::ld_relaxed_sys_16(scale_address);
                                     return different();
                                   },
                                   [](std::uint64_t bits) { return bits == 0; }, &seen);
  return __all_sync(0xffffffffu, ok);
}

// Whether all units of the lanes are of this call, after a wait that a mask may have ended. The whole warp.
template <class Width>
__device__ __forceinline__ bool are_there(const WaitScope& scope, const LaneTile<Width>& tile,
                                          const LaneUnits<Width>& units) {
  bool there = true;
#pragma unroll
  for (int j = 0; j < Width::kUnits; ++j)
    there = there && (!tile.has_unit(j) || units.u[j].w == static_cast<std::uint32_t>(scope.epoch));
  return __all_sync(0xffffffffu, there);
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
