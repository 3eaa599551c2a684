// Low-latency combine, as parts: rows that a rank holds for a token, sums of rows. README.md beside this file has the
// words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/call.cuh"
#include "kernels/low_latency/cast.cuh"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct LowLatencyCombineParams {
  LowLatencyCombineArgs args;
  layout::LowLatencyCombineSlot slot;
  ExpertRanks expert_ranks;
  std::int64_t row_bytes = 0;
  int num_parts = 1;  // of a row
  int x_alignment = 16;
  int out_alignment = 16;
  int num_carriers = 0;          // warps of a block that carry rows
  bool is_dense = false;         // expert blocks follow each other without a gap
  bool early = false;            // the next launch may start at once
};

// Sums of what a lane has of a tile.
template <typename T, class Width>
struct LaneSums {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));  // numbers of a vector
  float total[Width::kVectors][kWidth] = {};

  // Two roundings a number, as the CPU does it.
  __device__ __forceinline__ void add(float weight, const LaneVectors<Width>& vectors) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        total[j][i] = __fadd_rn(total[j][i], __fmul_rn(weight, number<T>(vectors.v[j], i)));
  }
  __device__ __forceinline__ void add(const LaneVectors<Width>& vectors) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[j][i] = __fadd_rn(total[j][i], number<T>(vectors.v[j], i));
  }
  __device__ __forceinline__ LaneVectors<Width> rounded() const {
    constexpr int kPerWord = Numbers<T>::kPerWord;
    LaneVectors<Width> vectors;
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      vectors.v[j] = make_uint4(Numbers<T>::put(total[j]), Numbers<T>::put(total[j] + kPerWord),
                                Numbers<T>::put(total[j] + 2 * kPerWord), Numbers<T>::put(total[j] + 3 * kPerWord));
    return vectors;
  }
};

template <class Width>
__device__ __forceinline__ void load_vectors(const char* row, const LaneTile<Width>& tile,
                                             LaneVectors<Width>* vectors) {
#pragma unroll
  for (int j = 0; j < Width::kVectors; ++j)
    if (tile.has_vector(j)) vectors->v[j] = ptx::ld_weak_16(row + tile.vector_offset(j));
}

// H2. Rows that this rank holds for half of a token's entries: where this lane's lies and its weight; entries alike have
// one row, at the first of them, with the sum of their weights. Nothing that is loaded is waited for.
struct HeldRow {
  std::int32_t position = -1;
  float weight = 0;  // where the dispatch has brought it

  __device__ __forceinline__ void load(const LowLatencyCombineArgs& args, int owner, std::int64_t token, int half) {
    const int topk = args.ids.topk, k = entry_of_lane(half);
    const std::int64_t item = owner * args.call.max_tokens + token;
    position = -1, weight = 0;
    if (k >= topk) return;
    position = args.recv_pos[(item + owner) * topk + k];
    if (!args.by_expert && args.recv_weights != nullptr) weight = args.recv_weights[item * topk + k];
  }
  __device__ __forceinline__ std::uint32_t entries() const { return __ballot_sync(0xffffffffu, position >= 0); }
};

// Offset in x of this lane's row.
__device__ __forceinline__ std::int64_t row_offset(const LowLatencyCombineParams& params, std::int32_t position,
                                                   int num_ranks) {
  const LowLatencyCombineArgs& args = params.args;
  if (params.is_dense) return position * args.row_stride;
  const std::int32_t expert_rows = static_cast<std::int32_t>(args.call.max_tokens) * num_ranks;
  const std::int32_t expert = position / expert_rows;
  return expert * args.expert_stride + (position - expert * expert_rows) * args.row_stride;
}

// Calls take(lane, tile's vectors) for the rows of the lanes in `entries` in their order, several of them loaded at a
// time.
template <class Width, typename Take>
__device__ __forceinline__ void for_each_row(const LowLatencyCombineParams& params,
                                             std::int64_t offset, std::uint32_t entries,
                                             const LaneTile<Width>& tile, Take take) {
  constexpr int kBatch = Width::kVectors == 1 ? 4 : LowLatencyTuning::kVectorsInFlight / Width::kVectors;
  const char* x = static_cast<const char*>(params.args.x);
  if (!Width::kPlain && params.x_alignment != 16) {
#pragma unroll 1
    for (; entries != 0; entries &= entries - 1) {
      const int k = __ffs(static_cast<int>(entries)) - 1;
      const char* row = x + __shfl_sync(0xffffffffu, offset, k);
      LaneVectors<Width> vectors;
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = load_16_anywhere(row + tile.vector_offset(j));
      take(k, vectors);
    }
    return;
  }
#pragma unroll 1
  while (entries != 0) {
    LaneVectors<Width> vectors[kBatch];
    int entry[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      entry[n] = __ffs(static_cast<int>(entries)) - 1;
      entries &= entries - 1;
      if (entry[n] >= 0) load_vectors(x + __shfl_sync(0xffffffffu, offset, entry[n]), tile, &vectors[n]);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n)
      if (entry[n] >= 0) take(entry[n], vectors[n]);
  }
}

// Adds what a lane has of a tile of a token's rows here, weighted, in the order of the entries.
template <typename T, class Width>
__device__ __forceinline__ void add_held(const LowLatencyCombineParams& params, const HeldRow& held,
                                         std::uint32_t entries, int num_ranks, const LaneTile<Width>& tile,
                                         LaneSums<T, Width>* sums) {
  for_each_row(params, row_offset(params, held.position, num_ranks), entries, tile,
               [&](int k, const LaneVectors<Width>& vectors) {
                 sums->add(__shfl_sync(0xffffffffu, held.weight, k), vectors);
               });
}

// Tokens of each owner, as the dispatch has left them: of rank r and r + 32 in lane r.
struct TokenCounts {
  std::int32_t count[2] = {};

  __device__ __forceinline__ void load(const LowLatencyCombineArgs& args, int num_ranks) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t rank = lane_id() + 32 * i;
      if (rank < num_ranks && (args.call.live_ranks >> rank & 1) != 0)
        count[i] = args.recv_pos[(rank * (args.call.max_tokens + 1) + args.call.max_tokens) * args.ids.topk];
    }
  }
  __device__ __forceinline__ int most() const { return __reduce_max_sync(0xffffffffu, max(count[0], count[1])); }
  __device__ __forceinline__ int of(int rank) const {
    return __shfl_sync(0xffffffffu, rank < 32 ? count[0] : count[1], rank % 32);
  }
};

}  // namespace deep_moe::kernels
