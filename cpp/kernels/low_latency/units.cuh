// Units and tiles: how bytes travel as their own flags, and how a warp turns rows into units and back.
#pragma once

#include <cstdint>

#include "kernels/protocol/wait.cuh"
#include "kernels/ptx/units.cuh"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {

// A tile's bytes in a lane, as vectors and as payload of units.
struct LaneVectors {
  uint4 v[layout::kLaneVectors];
};
struct LaneUnits {
  uint4 u[layout::kLaneUnits];
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

__device__ __forceinline__ LaneUnits to_units(const LaneVectors& in, std::uint32_t tag) {
  return {{make_uint4(in.v[0].x, in.v[0].y, in.v[0].z, tag), make_uint4(in.v[0].w, in.v[1].x, in.v[1].y, tag),
           make_uint4(in.v[1].z, in.v[1].w, in.v[2].x, tag), make_uint4(in.v[2].y, in.v[2].z, in.v[2].w, tag)}};
}
__device__ __forceinline__ LaneVectors to_vectors(const LaneUnits& in) {
  return {{make_uint4(in.u[0].x, in.u[0].y, in.u[0].z, in.u[1].x),
           make_uint4(in.u[1].y, in.u[1].z, in.u[2].x, in.u[2].y),
           make_uint4(in.u[2].z, in.u[3].x, in.u[3].y, in.u[3].z)}};
}

// What one lane has of one tile of a row.
struct LaneTile {
  int tile;
  int num_vectors;

  __device__ __forceinline__ LaneTile(std::int64_t row_bytes, int tile_) : tile(tile_) {
    const int rest = static_cast<int>(row_bytes / 16) - tile * layout::kTileVectors - lane_id();
    num_vectors = min(layout::kLaneVectors, (max(rest, 0) + 31) / 32);
  }
  __device__ __forceinline__ bool has_vector(int j) const { return j < num_vectors; }
  __device__ __forceinline__ bool has_unit(int j) const { return num_vectors > 0 && j <= num_vectors; }
  // Of vector j in the row; of unit j in the row as it travels.
  __device__ __forceinline__ std::int64_t vector_offset(int j) const {
    return static_cast<std::int64_t>(tile * layout::kTileVectors + 32 * j + lane_id()) * 16;
  }
  __device__ __forceinline__ std::int64_t unit_offset(int j) const {
    return static_cast<std::int64_t>(tile) * layout::kTileBytes + (32 * j + lane_id()) * layout::kUnitBytes;
  }
  __device__ __forceinline__ void store_units(char* row, const LaneUnits& units) const {
#pragma unroll
    for (int j = 0; j < layout::kLaneUnits; ++j)
      if (has_unit(j)) ptx::st_relaxed_sys_16(row + unit_offset(j), units.u[j]);
  }
  __device__ __forceinline__ void load_units(const char* row, LaneUnits* units) const {
#pragma unroll
    for (int j = 0; j < layout::kLaneUnits; ++j)
      if (has_unit(j)) units->u[j] = ptx::ld_relaxed_sys_16(row + unit_offset(j));
  }
  __device__ __forceinline__ void store_vectors(char* row, const LaneVectors& vectors) const {
#pragma unroll
    for (int j = 0; j < layout::kLaneVectors; ++j)
      if (has_vector(j)) ptx::st_weak_16(row + vector_offset(j), vectors.v[j]);
  }
};

// Loads a unit of this call until it is there; `*unit` holds an earlier try. False: leave.
__device__ __forceinline__ bool await_unit(const WaitScope& scope, layout::WaitPhase phase, int peer,
                                           const void* address, uint4* unit) {
  const std::uint32_t tag = static_cast<std::uint32_t>(scope.epoch);
  if (unit->w == tag) return true;
  std::uint64_t seen;
  return wait_until(
      scope, phase, peer, tag,
      [&] {
        *unit = ptx::ld_relaxed_sys_16(address);
        return std::uint64_t{unit->w};
      },
      [&](std::uint64_t now) { return now == tag; }, &seen);
}

// The same for all units of a lane, and one more, of its scales, if `scale_address` is not null. The same answer in the
// whole warp.
__device__ __forceinline__ bool await_units(const WaitScope& scope, layout::WaitPhase phase, int peer, const char* row,
                                            const LaneTile& tile, LaneUnits* units, const void* scale_address = nullptr,
                                            uint4* scales = nullptr) {
  const std::uint32_t tag = static_cast<std::uint32_t>(scope.epoch);
  const auto different = [&] {  // from the tag, in any of the tags
    std::uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < layout::kLaneUnits; ++j)
      if (tile.has_unit(j)) bits |= units->u[j].w ^ tag;
    if (scale_address != nullptr) bits |= scales->w ^ tag;
    return std::uint64_t{bits};
  };
  std::uint64_t seen = different();
  const bool ok = seen == 0 || wait_until(
                                   scope, phase, peer, tag,
                                   [&] {
                                     tile.load_units(row, units);
                                     if (scale_address != nullptr) *scales = ptx::ld_relaxed_sys_16(scale_address);
                                     return different();
                                   },
                                   [](std::uint64_t bits) { return bits == 0; }, &seen);
  return __all_sync(0xffffffffu, ok);
}

// A unit that cannot be of this call.
__device__ __forceinline__ uint4 no_unit(std::uint32_t tag) { return make_uint4(0, 0, 0, ~tag); }
__device__ __forceinline__ LaneUnits no_units(std::uint32_t tag) {
  return {{no_unit(tag), no_unit(tag), no_unit(tag), no_unit(tag)}};
}

}  // namespace deep_moe::kernels
