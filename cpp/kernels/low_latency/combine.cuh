// Low-latency combine, as parts: rows that a rank holds for a token, sums of rows. README.md beside this file has the
// words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/call.cuh"
#include "kernels/low_latency/cast.cuh"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct LowLatencyCombineParams {
  LowLatencyHot hot;
  LowLatencyCombineArgs args;
  layout::LowLatencyCombineSlot slot;
  ExpertRanks expert_ranks;
  Divisor by_parts, by_owners;
  std::int64_t row_bytes = 0;
  int num_vectors = 0;  // of a row
  int num_parts = 1;    // of a row
  int x_alignment = 16;
  int out_alignment = 16;
  int num_carriers = 0;   // warps of a block that carry rows
  bool is_dense = false;  // expert blocks follow each other without a gap
  bool early = false;     // the next launch may start at once
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

// H2. Rows that this rank holds for half of a token's entries: where this lane's lies and its weight; entries alike
// have one row, at the first of them, with the sum of their weights.
struct HeldRow {
  std::int32_t position = -1;
  float weight = 0;  // where the dispatch has brought it

  // Where the first half's lies; to be worked out before the launch in front has ended.
  struct Address {
    const std::int32_t* position;
    const float* weight;
    __device__ __forceinline__ Address(const LowLatencyCombineArgs& args, int owner, int token) {
      const std::uint32_t item = static_cast<std::uint32_t>(owner) * static_cast<std::uint32_t>(args.call.max_tokens) +
                                 static_cast<std::uint32_t>(token);
      const std::uint32_t topk = static_cast<std::uint32_t>(args.ids.topk);
      position = args.recv_pos + (static_cast<std::uint64_t>(item + static_cast<std::uint32_t>(owner)) * topk +
                                  static_cast<std::uint32_t>(lane_id()));
      weight =
          args.by_expert || args.recv_weights == nullptr
              ? nullptr
              : args.recv_weights + (static_cast<std::uint64_t>(item) * topk + static_cast<std::uint32_t>(lane_id()));
    }
  };
  // Nothing that is loaded is waited for.
  __device__ __forceinline__ void load(const Address& at, int topk, int half) {
    position = -1, weight = 0;
    if (entry_of_lane(half) >= topk) return;
    position = ptx::ld_relaxed_gpu(at.position + half * kHalf);
    if (at.weight != nullptr) weight = ptx::ld_relaxed_gpu(at.weight + half * kHalf);
  }
  __device__ __forceinline__ std::uint32_t entries() const { return __ballot_sync(0xffffffffu, position >= 0); }
};

// Offset in x of this lane's row.
__device__ __forceinline__ std::int64_t row_offset(const LowLatencyCombineParams& params, std::int32_t position,
                                                   int num_ranks) {
  const LowLatencyCombineArgs& args = params.args;
  if (params.is_dense)
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(position)) *
                                     static_cast<std::uint32_t>(args.row_stride));
  const std::int32_t expert_rows = static_cast<std::int32_t>(args.call.max_tokens) * num_ranks;
  const std::int32_t expert = position / expert_rows;
  return expert * args.expert_stride + (position - expert * expert_rows) * args.row_stride;
}

// Rows on their way, past the registers: of a lane that has three vectors of each.
struct RowBuffer {
  static constexpr int kRows = LowLatencyTuning::kRowsInFlight;
  uint4 vectors[kRows][layout::kLaneVectors][32];
};

// Calls take(lane, tile's vectors) for the rows of the lanes in `entries` in their order, several of them loaded at a
// time.
template <class Width, typename Take>
__device__ __forceinline__ void for_each_row(const LowLatencyCombineParams& params, RowBuffer* buffer,
                                             std::int64_t offset, std::uint32_t entries, const LaneTile<Width>& tile,
                                             Take take) {
  constexpr int kBatch = RowBuffer::kRows;
  const char* x = static_cast<const char*>(params.args.x) + tile.vector_offset(0);
  if (!Width::kPlain && params.x_alignment != 16) {
#pragma unroll 1
    for (; entries != 0; entries &= entries - 1) {
      const int k = __ffs(static_cast<int>(entries)) - 1;
      const char* row = x + __shfl_sync(0xffffffffu, offset, k);
      LaneVectors<Width> vectors;
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) vectors.v[j] = load_16_anywhere(row + 32 * 16 * j);
      take(k, vectors);
    }
    return;
  }
#pragma unroll 1
  while (entries != 0) {
    LaneVectors<Width> vectors[Width::kVectors == 1 ? kBatch : 1];
    int entry[kBatch];
    const char* row[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      entry[n] = __ffs(static_cast<int>(entries)) - 1;
      entries &= entries - 1;
      row[n] = x + __shfl_sync(0xffffffffu, offset, entry[n] & 31);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (entry[n] < 0) continue;
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j) {
        if (!tile.has_vector(j)) continue;
        if constexpr (Width::kVectors == 1)
          vectors[n].v[j] = ptx::ld_weak_16(row[n] + 32 * 16 * j);
        else
          ptx::cp_async_16(&buffer->vectors[n][j][lane_id()], row[n] + 32 * 16 * j);
      }
    }
    if constexpr (Width::kVectors > 1) ptx::cp_async_wait_all();
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (entry[n] < 0) continue;
      if constexpr (Width::kVectors == 1) {
        take(entry[n], vectors[n]);
      } else {
#pragma unroll
        for (int j = 0; j < Width::kVectors; ++j) vectors[0].v[j] = buffer->vectors[n][j][lane_id()];
        take(entry[n], vectors[0]);
      }
    }
  }
}

// Adds what a lane has of a tile of a token's rows here, weighted, in the order of the entries.
template <typename T, class Width>
__device__ __forceinline__ void add_held(const LowLatencyCombineParams& params, RowBuffer* buffer, const HeldRow& held,
                                         std::uint32_t entries, int num_ranks, const LaneTile<Width>& tile,
                                         LaneSums<T, Width>* sums) {
  for_each_row(
      params, buffer, row_offset(params, held.position, num_ranks), entries, tile,
      [&](int k, const LaneVectors<Width>& vectors) { sums->add(__shfl_sync(0xffffffffu, held.weight, k), vectors); });
}

// Tokens of each owner, as the dispatch has left them: of rank r and r + 32 in lane r.
struct TokenCounts {
  std::int32_t count[2] = {};

  __device__ __forceinline__ static const std::int32_t* address(const LowLatencyCombineArgs& args) {
    return args.recv_pos +
           (static_cast<std::int64_t>(lane_id()) * (args.call.max_tokens + 1) + args.call.max_tokens) * args.ids.topk;
  }
  __device__ __forceinline__ void load(const LowLatencyCombineArgs& args, const std::int32_t* address, int num_ranks) {
    if (lane_id() < num_ranks && (args.call.live_ranks >> lane_id() & 1) != 0) count[0] = ptx::ld_relaxed_gpu(address);
    if (num_ranks > 32 && lane_id() + 32 < num_ranks && (args.call.live_ranks >> (lane_id() + 32) & 1) != 0)
      count[1] = ptx::ld_relaxed_gpu(address + 32 * (args.call.max_tokens + 1) * args.ids.topk);
  }
  // None of ranks that do not take part.
  __device__ __forceinline__ void leave_out_masked(const LowLatencyRun& run) {
    if (!run.is_live(lane_id())) count[0] = 0;
    if (!run.is_live(lane_id() + 32)) count[1] = 0;
  }
  __device__ __forceinline__ int most() const { return __reduce_max_sync(0xffffffffu, max(count[0], count[1])); }
  __device__ __forceinline__ int of(int rank) const {
    return __shfl_sync(0xffffffffu, rank < 32 ? count[0] : count[1], rank % 32);
  }
};

}  // namespace deep_moe::kernels
