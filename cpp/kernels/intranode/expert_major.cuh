// Rows grouped by local expert, as parts: where each entry's row is, copies to the groups, sums of their rows.
// README.md beside this file says how places are found.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"
#include "kernels/intranode/numbers.cuh"
#include "kernels/protocol/bytes.cuh"
#include "kernels/tuning.hpp"

namespace deep_moe::kernels {

// The n-th of `count` parts of [begin, end), alike but for the last ones.
struct EntryRange {
  std::int64_t begin, end;

  __device__ EntryRange(std::int64_t first, std::int64_t last, int n, int count) {
    const std::int64_t each = (last - first + count - 1) / count;
    begin = min(first + each * n, last);
    end = min(begin + each, last);
  }
};

// Entries of this block.
__device__ __forceinline__ EntryRange block_entries(const ExpertGroups& groups) {
  return {0, groups.num_received * groups.topk, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
}

// The local expert of an entry, or -1. After a dispatch that has failed with a fixed number of rows, ids are whatever
// lay there before.
template <typename Id>
__device__ __forceinline__ int expert_of(const PlaceByExpertArgs& args, std::int64_t at) {
  const Id id = static_cast<const Id*>(args.ids)[at];
  return id >= 0 && id < args.groups.num_experts ? static_cast<int>(id) : -1;
}

// Inclusive sum over the lanes up to this one.
__device__ __forceinline__ std::int64_t sum_of_lanes(std::int64_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t below = __shfl_sync(0xffffffffu, value, lane >= step ? lane - step : lane);
    if (lane >= step) value += below;
  }
  return value;
}

// E3, by one warp: from the counts of all blocks to the groups. `first` comes with the rows of earlier blocks and goes
// with the first row of this block; `total` goes with the end of a group's rows, where its padding begins.
__device__ __forceinline__ void scan_groups(const PlaceByExpertArgs& args, std::int32_t* total, std::int32_t* first) {
  const ExpertGroups& groups = args.groups;
  const int lane = threadIdx.x % 32;
  std::int64_t running = 0;
  for (int base = 0; base < groups.num_experts; base += 32) {
    const int expert = base + lane;
    const bool is_one = expert < groups.num_experts;
    const std::int64_t count = is_one ? total[expert] : 0;
    const std::int64_t aligned = (count + args.alignment - 1) / args.alignment * args.alignment;
    const std::int64_t inclusive = sum_of_lanes(aligned);
    if (is_one) {
      const auto offset = static_cast<std::int32_t>(running + inclusive - aligned);
      first[expert] += offset;
      total[expert] = offset + static_cast<std::int32_t>(count);
      if (blockIdx.x == 0) {
        groups.offsets[expert] = offset;
        groups.counts[expert] = static_cast<std::int32_t>(count);
      }
    }
    running += __shfl_sync(0xffffffffu, inclusive, 31);
  }
  if (blockIdx.x == 0 && lane == 0) groups.offsets[groups.num_experts] = static_cast<std::int32_t>(running);
}

// E5, by one warp: entries in their order, 32 at a time; `next` has the next row of each expert.
template <typename Id>
__device__ __forceinline__ void place_entries(const PlaceByExpertArgs& args, const EntryRange& range,
                                              std::int32_t* next) {
  const int lane = threadIdx.x % 32;
  for (std::int64_t base = range.begin; base < range.end; base += 32) {
    const std::int64_t at = base + lane;
    const int id = at < range.end ? expert_of<Id>(args, at) : -1;
    const unsigned alike = __match_any_sync(0xffffffffu, id);
    const int before = __popc(alike & ((1u << lane) - 1));
    const std::int32_t row = id >= 0 ? next[id] + before : -1;
    __syncwarp();
    if (id >= 0 && before == 0) next[id] += __popc(alike);
    __syncwarp();
    if (at >= range.end) continue;
    const bool is_row = row >= 0 && row < args.groups.num_rows;
    args.groups.rows[at] = is_row ? row : -1;
    if (!is_row) continue;
    args.experts[row] = id;
    if (args.weights != nullptr) args.row_weights[row] = args.weights[at];
  }
}

// E6: of this block's experts, and this block's part of the rows behind the last group.
__device__ __forceinline__ void mark_padding(const PlaceByExpertArgs& args, const std::int32_t* ends) {
  const int warps = static_cast<int>(blockDim.x) / 32, blocks = static_cast<int>(gridDim.x);
  const auto aligned = [&](std::int64_t row) { return (row + args.alignment - 1) / args.alignment * args.alignment; };
  const auto clear = [&](std::int64_t row) {
    args.experts[row] = -1;
    if (args.weights != nullptr) args.row_weights[row] = 0.0f;
  };
  for (int expert = static_cast<int>(blockIdx.x) + blocks * static_cast<int>(threadIdx.x / 32);
       expert < args.groups.num_experts; expert += blocks * warps) {
    const std::int64_t begin = ends[expert], end = aligned(begin);
    for (std::int64_t row = begin + threadIdx.x % 32; row < end; row += 32) clear(row);
  }
  const std::int64_t used = args.groups.num_experts > 0 ? aligned(ends[args.groups.num_experts - 1]) : 0;
  const std::int64_t threads = static_cast<std::int64_t>(blocks) * blockDim.x;
  for (std::int64_t row = used + static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       row < args.groups.num_rows; row += threads)
    clear(row);
}

// The rows of a received row, by one warp: two entries a lane.
struct RowsOfEntries {
  std::int32_t row[2];
  unsigned mask[2];

  __device__ RowsOfEntries(const ExpertGroups& groups, std::int64_t received) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = threadIdx.x % 32 + 32 * i;
      row[i] = k < groups.topk ? groups.rows[received * groups.topk + k] : std::int32_t{-1};
      mask[i] = __ballot_sync(0xffffffffu, row[i] >= 0);
    }
  }
  __device__ __forceinline__ bool any() const { return (mask[0] | mask[1]) != 0; }
  // Calls f(row) in the order of the entries, on all lanes.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (unsigned left = mask[i]; left != 0; left &= left - 1)
        f(static_cast<std::int64_t>(__shfl_sync(0xffffffffu, row[i], __ffs(static_cast<int>(left)) - 1)));
    }
  }
};

// The pieces of rows of 16-byte vectors that warps of the grid take in turns.
struct RowPieces {
  static constexpr int kVectors = 32 * ExpertMajorTuning::kVectors;  // of a piece
  std::int64_t num_vectors;                                          // of a row
  int num_pieces;

  DM_HOST_DEVICE explicit RowPieces(std::int64_t row_bytes)
      : num_vectors(row_bytes / 16), num_pieces(static_cast<int>((num_vectors + kVectors - 1) / kVectors)) {}
};

__device__ __forceinline__ std::int64_t warp_of_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t warps_of_grid() {
  return static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
}

__device__ __forceinline__ void copy_piece(const GroupRowsArgs& args, const RowPieces& pieces, std::int64_t received,
                                           int piece, const RowsOfEntries& entries) {
  const std::int64_t first = static_cast<std::int64_t>(piece) * RowPieces::kVectors + threadIdx.x % 32;
  const char* from = static_cast<const char*>(args.x) + received * args.row_bytes + first * 16;
  uint4 values[ExpertMajorTuning::kVectors] = {};
#pragma unroll
  for (int i = 0; i < ExpertMajorTuning::kVectors; ++i)
    if (first + 32 * i < pieces.num_vectors) values[i] = ptx::ld_weak_16(from + 512 * i);
  entries.for_each([&](std::int64_t row) {
    char* to = static_cast<char*>(args.out) + row * args.row_bytes + first * 16;
#pragma unroll
    for (int i = 0; i < ExpertMajorTuning::kVectors; ++i)
      if (first + 32 * i < pieces.num_vectors) ptx::st_weak_16(to + 512 * i, values[i]);
  });
}

__device__ __forceinline__ void copy_scales(const GroupRowsArgs& args, std::int64_t received,
                                            const RowsOfEntries& entries) {
  const ScaleRows& scales = args.scales;
  for (std::int64_t base = 0; base < scales.num_items; base += 32) {
    const std::int64_t item = base + threadIdx.x % 32;
    const bool is_one = item < scales.num_items;
    const char* from = static_cast<const char*>(scales.data) + received * scales.row_stride + item * scales.item_stride;
    const std::uint64_t value = is_one ? load_item(from, scales.item_bytes) : 0;
    entries.for_each([&](std::int64_t row) {
      char* to = static_cast<char*>(args.out_scales) + row * args.out_row_stride + item * args.out_item_stride;
      if (is_one) store_item(to, value, scales.item_bytes);
    });
  }
}

__device__ __forceinline__ void clear_row(const GroupRowsArgs& args, std::int64_t row) {
  char* to = static_cast<char*>(args.out) + row * args.row_bytes;
  for (std::int64_t at = 16 * (threadIdx.x % 32); at < args.row_bytes; at += 512)
    ptx::st_weak_16(to + at, make_uint4(0, 0, 0, 0));
  char* scales = static_cast<char*>(args.out_scales) + row * args.out_row_stride;
  for (std::int64_t item = threadIdx.x % 32; item < args.scales.num_items; item += 32)
    store_item(scales + item * args.out_item_stride, 0, args.scales.item_bytes);
}

// The rows of padding, in their order, to the warps of the grid in turns.
__device__ __forceinline__ void clear_padding(const GroupRowsArgs& args) {
  const ExpertGroups& groups = args.groups;
  const std::int64_t warp = warp_of_grid(), warps = warps_of_grid();
  std::int64_t before = 0;  // rows of padding of earlier experts
  for (int base = 0; base < groups.num_experts; base += 32) {
    const int expert = base + static_cast<int>(threadIdx.x % 32);
    const bool is_one = expert < groups.num_experts;
    const std::int64_t begin = is_one ? groups.offsets[expert] + groups.counts[expert] : 0;
    const std::int64_t count = is_one ? groups.offsets[expert + 1] - begin : 0;
    const std::int64_t inclusive = sum_of_lanes(count);
    for (unsigned left = __ballot_sync(0xffffffffu, count > 0); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t first = __shfl_sync(0xffffffffu, begin, lane), rows = __shfl_sync(0xffffffffu, count, lane);
      const std::int64_t number = before + __shfl_sync(0xffffffffu, inclusive, lane) - rows;
      for (std::int64_t i = (warp + warps - number % warps) % warps; i < rows; i += warps) clear_row(args, first + i);
    }
    before += __shfl_sync(0xffffffffu, inclusive, 31);
  }
}

// A piece of the sum of a received row's rows. Products are rounded before they are added, as the CPU does it.
template <typename T>
__device__ __forceinline__ void sum_piece(const SumGroupsArgs& args, const RowPieces& pieces, int alignment,
                                          std::int64_t received, int piece, const RowsOfEntries& entries) {
  constexpr int kVectors = ExpertMajorTuning::kVectors, kSize = Vector<T>::kSize;
  const std::int64_t first = static_cast<std::int64_t>(piece) * RowPieces::kVectors + threadIdx.x % 32;
  float total[kVectors][kSize] = {};
  entries.for_each([&](std::int64_t row) {
    const char* from = static_cast<const char*>(args.x) + row * args.row_stride + first * 16;
    uint4 values[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + 32 * i < pieces.num_vectors)
        values[i] = alignment == 16 ? ptx::ld_weak_16(from + 512 * i) : load_16(from + 512 * i, alignment);
    }
    if (args.row_weights == nullptr) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) Vector<T>::add(total[i], values[i]);
      return;
    }
    const float weight = args.row_weights[row];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float numbers[kSize] = {};
      Vector<T>::add(numbers, values[i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) total[i][j] = __fadd_rn(total[i][j], __fmul_rn(weight, numbers[j]));
    }
  });
  char* to = static_cast<char*>(args.out) + (received * pieces.num_vectors + first) * 16;
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    if (first + 32 * i < pieces.num_vectors) ptx::st_weak_16(to + 512 * i, Vector<T>::round(total[i]));
}

}  // namespace deep_moe::kernels
