// Low-latency combine, as parts: sums of a holder, sums of an owner, what both have to know of a token. README.md
// beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/call.cuh"
#include "kernels/low_latency/cast.cuh"
#include "layout/experts.hpp"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct LowLatencyCombineParams {
  LowLatencyCombineArgs args;
  layout::LowLatencyCombineSlot slot;
  std::int64_t row_bytes = 0;
  int num_parts = 1;  // of a row
  int x_alignment = 16;
  int out_alignment = 16;
};

// One row of a sum: where it lies (in x, or the entry of topk_idx by which it travels) and its weight.
struct Term {
  std::int64_t at;
  float weight;
  std::int32_t holder;
};

// Shared memory of a block: the terms of a chunk of tokens.
struct CombineChunk {
  static constexpr int kTokens = LowLatencyTuning::kThreads / 32;  // a warp looks one up
  Term* terms;                                                     // [tokens][K]
  __device__ explicit CombineChunk(char* base) : terms(reinterpret_cast<Term*>(base)) {}
  static std::size_t bytes(int topk) { return sizeof(Term) * static_cast<std::size_t>(kTokens * topk); }
};

// What a warp needs to make terms of K entries.
struct alignas(16) EntryBuffer {
  std::int32_t keys[layout::kMaxTopk];  // entries alike have the same one; -1: none
  float weights[layout::kMaxTopk + layout::kFloatsPerUnit];
};

// Terms of the distinct keys, by (rank, entry), each with the sum of the weights of its entries. With kOneRank by entry
// alone. Entry k lies in lane k % 32, and if there are more than one a lane, in `entries` as well. The whole warp;
// returns the number of terms.
template <bool kOneRank, typename Rank, typename Place>
__device__ __forceinline__ int make_terms(const std::int32_t (&keys)[2], const float (&weights)[2],
                                          const EntryBuffer& entries, int topk, Term* terms, Rank rank_of,
                                          Place place_of) {
  const std::uint32_t below = (1u << lane_id()) - 1;
  bool first[2];
  std::uint64_t firsts = 0;
  std::uint32_t alike = __match_any_sync(0xffffffffu, keys[0]);
  first[0] = keys[0] >= 0 && (alike & below) == 0;
  firsts = __ballot_sync(0xffffffffu, first[0]);
  first[1] = false;
  if (topk > 32) {
    const std::uint32_t upper = __match_any_sync(0xffffffffu, keys[1]);
    first[1] = keys[1] >= 0 && (upper & below) == 0;
#pragma unroll 1
    for (int k = 0; k < 32; ++k) first[1] = first[1] && entries.keys[k] != keys[1];
    firsts |= static_cast<std::uint64_t>(__ballot_sync(0xffffffffu, first[1])) << 32;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!first[i]) continue;
    const int k = lane_id() + 32 * i;
    float weight = __fadd_rn(0.0f, weights[i]);
    if (topk > 32 || (alike & ~below) != (1u << lane_id())) {
#pragma unroll 1
      for (int other = k + 1; other < topk; ++other)
        if (entries.keys[other] == keys[i]) weight = __fadd_rn(weight, entries.weights[other]);
    }
    const int rank = rank_of(keys[i]);
    int before = 0;
    if (kOneRank) {
      before = __popcll(firsts & ((std::uint64_t{1} << k) - 1));
    } else {
#pragma unroll 1
      for (std::uint64_t rest = firsts; rest != 0; rest &= rest - 1) {
        const int other = __ffsll(static_cast<long long>(rest)) - 1, other_rank = rank_of(entries.keys[other]);
        before += other_rank < rank || (other_rank == rank && other < k) ? 1 : 0;
      }
    }
    terms[before] = {place_of(keys[i], k), weight, rank};
  }
  return __popcll(firsts);
}

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
template <class Width>
__device__ __forceinline__ void load_vectors(const char* row, const LaneTile<Width>& tile, int alignment,
                                             LaneVectors<Width>* vectors) {
#pragma unroll
  for (int j = 0; j < Width::kVectors; ++j)
    if (tile.has_vector(j)) vectors->v[j] = load_16_unaligned(row + tile.vector_offset(j), alignment);
}

// A tile of the weighted sum of rows of x, in fp32, in the order of the terms.
template <typename T, class Width>
__device__ __forceinline__ LaneVectors<Width> sum_local_rows(const LowLatencyCombineParams& params, const Term* terms,
                                                             int num_terms, const LaneTile<Width>& tile) {
  constexpr int kBatch = LowLatencyTuning::kRowsInFlight;
  const char* x = static_cast<const char*>(params.args.x);
  LaneSums<T, Width> sums;
#pragma unroll 1
  for (int first = 0; first < num_terms; first += kBatch) {
    LaneVectors<Width> vectors[kBatch];
    if (params.x_alignment == 16) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n)
        if (first + n < num_terms) load_vectors(x + terms[first + n].at, tile, &vectors[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kBatch; ++n)
        if (first + n < num_terms) load_vectors(x + terms[first + n].at, tile, params.x_alignment, &vectors[n]);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n)
      if (first + n < num_terms) sums.add(terms[first + n].weight, vectors[n]);
  }
  return sums.rounded();
}

// Offset in x of a packed row.
struct PackedRows {
  std::int64_t expert_stride, row_stride;
  std::int32_t expert_rows;
  __device__ std::int64_t offset(std::int32_t position) const {
    const std::int32_t expert = position / expert_rows;
    return expert * expert_stride + (position - expert * expert_rows) * row_stride;
  }
};

// A tile of rows that peers send, several asked for at a time: row n of `count` lies at address(n), comes from
// holder(n) and is given to take(n, vectors) in order; one that skip(n) is not waited for. False: leave.
template <class Width, typename Address, typename Holder, typename Skip, typename Take>
__device__ __forceinline__ bool take_tiles(const WaitScope& scope, const LaneTile<Width>& tile, int count,
                                           Address address, Holder holder, Skip skip, Take take) {
  constexpr int kBatch = LowLatencyTuning::kRowsAwaited;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    LaneUnits<Width> units[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n)
      if (first + n < count && !skip(first + n)) tile.load_units(address(first + n), &units[n]);
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (first + n >= count) break;
      if (!skip(first + n) &&
          !await_units(scope, layout::WaitPhase::kUnits, holder(first + n), address(first + n), tile, &units[n]))
        return false;
      take(first + n, to_vectors(units[n]));
    }
  }
  return true;
}

}  // namespace deep_moe::kernels
