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

// Numbers of a lane that have travelled as codes.
struct LaneNumbers {
  float n[8];
};

// How what a lane has of a row travels: as it is.
template <typename T, class Width>
struct Wire {
  static constexpr bool kHasScales = false;  // every word of a unit is looked at by its tags
  using Coded = LaneVectors<Width>;
  __device__ __forceinline__ static const Coded& coded(const LaneVectors<Width>& vectors) { return vectors; }
  __device__ __forceinline__ static LaneUnits<Width> sent(const Coded& coded, std::uint32_t tag) {
    return to_units(coded, tag, tag);
  }
  __device__ __forceinline__ static LaneVectors<Width> received(const LaneUnits<Width>& units) {
    return to_vectors(units);
  }
  // The same of a row that does not travel.
  __device__ __forceinline__ static LaneVectors<Width> kept(const Coded& coded) { return coded; }
};

// Sums of what a lane has of a tile. Two roundings a number, as the CPU does it.
template <typename T, class Width>
struct LaneSums {
  static constexpr int kNumbers = 16 / static_cast<int>(sizeof(T));  // of a vector
  float total[Width::kVectors][kNumbers] = {};

  __device__ __forceinline__ void add(float weight, const LaneVectors<Width>& vectors) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i)
        total[j][i] = __fadd_rn(total[j][i], __fmul_rn(weight, number<T>(vectors.v[j], i)));
  }
  __device__ __forceinline__ void add(const LaneVectors<Width>& vectors) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) total[j][i] = __fadd_rn(total[j][i], number<T>(vectors.v[j], i));
  }
  __device__ __forceinline__ void add(float weight, const LaneNumbers& numbers) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i)
        total[j][i] = __fadd_rn(total[j][i], __fmul_rn(weight, numbers.n[j * kNumbers + i]));
  }
  __device__ __forceinline__ void add(const LaneNumbers& numbers) {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) total[j][i] = __fadd_rn(total[j][i], numbers.n[j * kNumbers + i]);
  }
  __device__ __forceinline__ LaneVectors<Width> rounded() const {
    LaneVectors<Width> vectors;
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j) vectors.v[j] = rounded_vector<T>(total[j]);
    return vectors;
  }
};

// H2, O2. What a warp has to know of half of a token's entries. Entries alike have one row, at the first of them, with
// the sum of their weights.
template <LowLatencyHalf kHalf_, bool kByExpert>
struct TokenWords {
  std::int32_t position = -1;  // of the packed row that this rank holds
  float weight = 0;            // as the dispatch has brought it, or of this rank's own tokens by expert
  std::int32_t id = -1;        // of this rank's own tokens, in the second half

  // Nothing that is loaded is waited for.
  __device__ __forceinline__ void load(const LowLatencyCombineArgs& args, int owner, int token, int half) {
    const int topk = args.ids.topk, k = entry_of_lane(half);
    position = -1, weight = 0, id = -1;
    if (k >= topk) return;
    if constexpr (kHalf_ == LowLatencyHalf::kReceive) {
      id = ptx::ld_relaxed_gpu(args.kept_ids + token * topk + k);
      if (kByExpert) weight = ptx::ld_relaxed_gpu(args.kept_weights + token * topk + k);
    } else {
      const std::uint32_t item = static_cast<std::uint32_t>(owner) * static_cast<std::uint32_t>(args.call.max_tokens) +
                                 static_cast<std::uint32_t>(token);
      const auto at = [&](std::uint32_t row) {
        return static_cast<std::uint64_t>(row) * static_cast<std::uint32_t>(topk) + static_cast<std::uint32_t>(k);
      };
      position = ptx::ld_relaxed_gpu(args.recv_pos + at(item + static_cast<std::uint32_t>(owner)));
      if (!kByExpert && args.recv_weights != nullptr) weight = ptx::ld_relaxed_gpu(args.recv_weights + at(item));
    }
  }
  __device__ __forceinline__ std::uint32_t rows() const { return __ballot_sync(0xffffffffu, position >= 0); }
};

// Address of packed row `position`.
template <bool kPlain>
__device__ __forceinline__ const char* packed_row(const LowLatencyCombineParams& params, std::int32_t position,
                                                  int num_ranks) {
  const LowLatencyCombineArgs& args = params.args;
  const char* x = static_cast<const char*>(args.x);
  if (kPlain || params.is_dense)
    return x + static_cast<std::uint64_t>(static_cast<std::uint32_t>(position)) *
                   static_cast<std::uint32_t>(args.row_stride);
  const std::int32_t expert_rows = static_cast<std::int32_t>(args.call.max_tokens) * num_ranks;
  const std::int32_t expert = position / expert_rows;
  return x + (expert * args.expert_stride + (position - expert * expert_rows) * args.row_stride);
}

// What a lane has of a tile of it.
template <class Width>
__device__ __forceinline__ void load_packed(const LowLatencyCombineParams& params, std::int32_t position, int num_ranks,
                                            const LaneTile<Width>& tile, LaneVectors<Width>* vectors) {
  const char* address = packed_row<Width::kPlain>(params, position, num_ranks) + tile.vector_offset(0);
#pragma unroll
  for (int j = 0; j < Width::kVectors; ++j) {
    if (!tile.has_vector(j)) continue;
    const char* vector = address + LaneTile<Width>::kVectorStride * j;
    vectors->v[j] = Width::kPlain || params.x_alignment == 16 ? ptx::ld_weak_16(vector) : load_16_anywhere(vector);
  }
}

// Adds a tile of each row of the lanes in `rows`, weighted, in their order; several are loaded at a time.
template <typename T, class Width>
__device__ __forceinline__ void add_rows(const LowLatencyCombineParams& params, std::int32_t position, float weight,
                                         std::uint32_t rows, int num_ranks, const LaneTile<Width>& tile,
                                         LaneSums<T, Width>* sums) {
  constexpr int kBatch = Width::kPlain ? LowLatencyTuning::kRowsInFlight : 1;
#pragma unroll 1
  for (int first = 0; first < 32 && rows >> first != 0; first += kBatch) {
    const std::uint32_t some = rows >> first;
    LaneVectors<Width> vectors[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const std::int32_t from = __shfl_sync(0xffffffffu, position, first + n);
      if ((some >> n & 1) != 0) load_packed(params, from, num_ranks, tile, &vectors[n]);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const float factor = __shfl_sync(0xffffffffu, weight, first + n);
      if ((some >> n & 1) != 0) sums->add(factor, vectors[n]);
    }
  }
}

// Tokens of an owner, as the dispatch has left them; none of a rank that takes no part.
__device__ __forceinline__ int num_tokens_of(const LowLatencyRun& run, const LowLatencyCombineArgs& args, int owner) {
  const std::uint64_t masked = ptx::ld_relaxed_gpu(&run.words().masked);
  const std::int32_t count = ptx::ld_relaxed_gpu(
      args.recv_pos +
      (static_cast<std::int64_t>(owner) * (args.call.max_tokens + 1) + args.call.max_tokens) * args.ids.topk);
  return ((args.call.live_ranks & ~masked) >> owner & 1) != 0 ? count : 0;
}

}  // namespace deep_moe::kernels
