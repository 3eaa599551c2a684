// Combine, as parts: which rows a token's sum takes, how they get here with the copy engine and without, the sum.
// README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"
#include "kernels/intranode/numbers.cuh"
#include "kernels/protocol/bytes.cuh"
#include "kernels/protocol/call.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tuning.hpp"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct CombineParams {
  CombineArgs args;
  Units units;
  CombineRing ring;
  std::int64_t row_bytes = 0;
  int chunk_bytes = 16;  // of a row, but for its last chunk
  int last_bytes = 16;   // of the last chunk
  int num_biases = 0;    // summed before the rows
  int out_alignment = 16;
  int bias_alignment[2] = {16, 16};

  DM_HOST_DEVICE std::int64_t chunk_begin(int chunk) const { return static_cast<std::int64_t>(chunk) * chunk_bytes; }
  DM_HOST_DEVICE int bytes_of(int chunk) const { return chunk + 1 < units.num_chunks ? chunk_bytes : last_bytes; }
};

// A rank that holds rows of this rank's tokens.
struct Holder {
  const char* x;
  const float* weights;
  std::int64_t first_row;  // of this rank's rows there
};

// Dynamic shared memory. The same struct on both sides.
struct CombineShared {
  std::size_t barriers, holders, total;

  DM_HOST_DEVICE CombineShared(const CombineRing& ring, int num_ranks) {
    const std::size_t warps = static_cast<std::size_t>(ring.num_warps);
    barriers = warps * static_cast<std::size_t>(ring.bytes());
    holders = barriers + warps * CombineRing::kSets * sizeof(std::uint64_t);
    total = holders + sizeof(Holder) * static_cast<std::size_t>(num_ranks);
  }
};

// C2: from places to addresses, for one holder. False: its segment has no address here.
__device__ __forceinline__ bool find_holder(const WaitScope& scope, const CombineArgs& args, int peer, Holder* holder) {
  const int rank = scope.domain.rank, num_ranks = scope.domain.num_ranks;
  const std::int32_t* prefix = args.rank_prefix_matrix;
  const layout::Announce& record = announcement(scope, peer);
  const std::int32_t first_row = rank > 0 ? prefix[(rank - 1) * num_ranks + peer] : 0;
  *holder = Holder{nullptr, nullptr, first_row};
  if (prefix[rank * num_ranks + peer] == first_row) return true;  // none of ours
  holder->x = peer == rank && args.own_rows != nullptr ? static_cast<const char*>(args.own_rows)
                                                       : place_address(scope, args.segment_bases, peer, record.place);
  if (holder->x == nullptr || args.topk == 0) return holder->x != nullptr;
  holder->weights = reinterpret_cast<const float*>(place_address(scope, args.segment_bases, peer, record.weight_place));
  return holder->weights != nullptr;
}

// A token's positions, up to two ranks a lane.
static_assert(layout::kMaxKernelRanks <= 32 * 2);
template <int kPerLane>
struct TokenPositions {
  std::int32_t position[kPerLane];

  __device__ TokenPositions(const CombineArgs& args, int num_ranks, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = threadIdx.x % 32 + 32 * i;
      position[i] =
          token < args.num_tokens && n < num_ranks ? args.send_position[token * num_ranks + n] : std::int32_t{-1};
    }
  }
};

// C3: what a unit sums. A lane knows the rows of its ranks, and the bias of its number.
template <int kPerLane>
struct RowList {
  Unit unit;
  int count = 0;  // biases and rows, in the order of the sum: biases, then rows by rank
  std::uint64_t mask = 0;
  const char* row[kPerLane] = {};
  int index[kPerLane];  // among them, or -1
  const char* bias = nullptr;

  __device__ explicit RowList(const Unit& unit_) : unit(unit_) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) index[i] = -1;
  }
  __device__ RowList(const CombineParams& params, const Holder* holders, const TokenPositions<kPerLane>& words,
                     const Unit& unit_)
      : unit(unit_) {
    const int lane = threadIdx.x % 32;
    mask = __ballot_sync(0xffffffffu, words.position[0] >= 0);
    if constexpr (kPerLane > 1) mask |= std::uint64_t{__ballot_sync(0xffffffffu, words.position[1] >= 0)} << 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int rank = lane + 32 * i;
      index[i] = -1;
      if (words.position[i] < 0) continue;
      index[i] = params.num_biases + __popcll(mask & ((std::uint64_t{1} << rank) - 1));
      row[i] = holders[rank].x + (holders[rank].first_row + words.position[i]) * params.row_bytes;
    }
    if (lane < params.num_biases)
      bias = static_cast<const char*>(params.args.bias[lane]) + unit.token * params.args.bias_stride[lane];
    count = unit.token < params.args.num_tokens ? params.num_biases + __popcll(mask) : 0;
  }
};

// C5: the sums of top-k weights, in rank order, by warps of their own: `warp` of `num_warps` of all blocks. Several
// tokens a warp where their weights are few.
__device__ __forceinline__ void add_weights(const CombineArgs& args, int num_ranks, const Holder* holders, int warp,
                                            int num_warps) {
  constexpr int kTokens = CombineTuning::kWeightTokens, kRanks = CombineTuning::kWeightRanks;
  const int lane = threadIdx.x % 32, per_warp = max(1, 32 / args.topk);
  const int lane_token = args.topk < 32 ? lane / args.topk : 0, lane_k = lane - lane_token * args.topk;
  if (lane_token >= per_warp) return;
  for (std::int64_t first = std::int64_t{warp} * per_warp + lane_token; first < args.num_tokens;
       first += std::int64_t{kTokens} * num_warps * per_warp) {
    for (int k = lane_k; k < args.topk; k += 32) {
      float sums[kTokens] = {};
      for (int rank = 0; rank < num_ranks; rank += kRanks) {
        std::int32_t position[kTokens][kRanks];
        float weight[kTokens][kRanks];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const std::int64_t token = first + std::int64_t{t} * num_warps * per_warp;
#pragma unroll
          for (int r = 0; r < kRanks; ++r)
            position[t][r] = token < args.num_tokens && rank + r < num_ranks
                                 ? args.send_position[token * num_ranks + rank + r]
                                 : std::int32_t{-1};
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int r = 0; r < kRanks; ++r) {
            const Holder& holder = holders[min(rank + r, num_ranks - 1)];
            weight[t][r] =
                position[t][r] >= 0 ? holder.weights[(holder.first_row + position[t][r]) * args.topk + k] : 0.0f;
          }
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int r = 0; r < kRanks; ++r)
            if (position[t][r] >= 0) sums[t] += weight[t][r];
        }
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const std::int64_t token = first + std::int64_t{t} * num_warps * per_warp;
        if (token < args.num_tokens) args.combined_topk_weights[token * args.topk + k] = sums[t];
      }
    }
  }
}

__device__ __forceinline__ const char* shuffle(const char* pointer, int lane) {
  return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), lane));
}

// C4 without the copy engine: a unit's sum by plain loads, kBatch vectors of a row before the next row. The whole warp.
template <typename T, int kBatch, int kPerLane>
__device__ void sum_by_loads(const CombineParams& params, const RowList<kPerLane>& list) {
  constexpr int kStep = 32 * 16;
  const CombineArgs& args = params.args;
  char* out = static_cast<char*>(args.out) + list.unit.token * args.out_stride;
  const std::int64_t end = min(params.row_bytes, params.chunk_begin(list.unit.end_chunk));
  for (std::int64_t begin = params.chunk_begin(list.unit.first_chunk); begin < end; begin += kBatch * kStep) {
    const std::int64_t first = begin + (threadIdx.x % 32) * 16;
    float sums[kBatch][Vector<T>::kSize] = {};
    const auto add = [&](const char* row, int alignment) {
      uint4 vectors[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < end) vectors[v] = load_16(row + first + v * kStep, alignment);
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < end) Vector<T>::add(sums[v], vectors[v]);
    };
    for (int b = 0; b < params.num_biases; ++b) add(shuffle(list.bias, b), params.bias_alignment[b]);
    for (std::uint64_t rest = list.mask; rest != 0; rest &= rest - 1) {
      const int rank = __ffsll(static_cast<long long>(rest)) - 1;
      add(shuffle(kPerLane == 1 || rank < 32 ? list.row[0] : list.row[kPerLane - 1], rank % 32), 16);
    }
#pragma unroll
    for (int v = 0; v < kBatch; ++v)
      if (first + v * kStep < end) store_16(out + first + v * kStep, Vector<T>::round(sums[v]), params.out_alignment);
  }
}

// C4 with the copy engine: chunks of rows on their way into a warp's sets in shared memory, in the order unit, chunk.
// The lane that knows a row starts its load.
template <int kPerLane, int kRows>
class PullPipe {
 public:
  using List = RowList<kPerLane>;

  __device__ PullPipe(const CombineParams& params, char* sets, std::uint64_t* barriers)
      : params_(params), sets_(sets), barriers_(barriers) {}

  // Whether a set has room for a chunk of each of the unit's rows; if not, they do not come this way.
  __device__ bool holds(const List& list) const { return list.count <= kRows; }

  // Loads as far ahead as there are free sets: the rest of `current`, then `next`.
  __device__ void load_ahead(const List& current, const List& next) {
    const int of_current = sets_of(current), of_both = of_current + sets_of(next);
#pragma unroll 1
    while (loaded_ - used_ < CombineRing::kSets && ahead_ < of_both) {
      const bool is_next = ahead_ >= of_current;
      const int chunk = is_next ? next.unit.first_chunk + ahead_ - of_current : current.unit.first_chunk + ahead_;
      const std::uint32_t bytes = static_cast<std::uint32_t>(params_.bytes_of(chunk));
      const std::int64_t begin = params_.chunk_begin(chunk);
      const int lane = threadIdx.x % 32;
      char* set = set_of(loaded_);
      std::uint64_t* barrier = barriers_ + loaded_ % CombineRing::kSets;
      if (lane == 0)
        ptx::mbarrier_arrive_expect_tx(barrier,
                                       bytes * static_cast<std::uint32_t>(is_next ? next.count : current.count));
      const auto load = [&](int index, const char* row) {
        ptx::bulk_load(set + index * kRing.chunk_bytes(), row + begin, bytes, barrier);
      };
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int index = is_next ? next.index[i] : current.index[i];
        if (index >= 0) load(index, is_next ? next.row[i] : current.row[i]);
      }
      if (lane < params_.num_biases) load(lane, is_next ? next.bias : current.bias);
      ++loaded_, ++ahead_;
    }
  }

  // Waits for the next set. False: the block must leave.
  __device__ bool wait(const WaitScope& scope) const {
    std::uint64_t* barrier = barriers_ + used_ % CombineRing::kSets;
    const std::uint32_t parity = used_ / CombineRing::kSets % 2;
    const bool there = ptx::mbarrier_try_wait_acquire_cta(barrier, parity);
    if (__all_sync(0xffffffffu, there)) return true;
    return __all_sync(0xffffffffu, wait_longer_for_load(scope, barrier, parity));
  }
  __device__ const char* set() const { return set_of(used_); }
  // All lanes are through with the set.
  __device__ void release() {
    __syncwarp();
    ++used_;
  }
  // What was next is current.
  __device__ void advance(const List& current) { ahead_ -= sets_of(current); }

 private:
  __device__ int sets_of(const List& list) const { return list.count > 0 && holds(list) ? list.unit.num_chunks() : 0; }
  __device__ char* set_of(unsigned number) const {
    return sets_ + number % CombineRing::kSets * static_cast<unsigned>(kRing.set_bytes());
  }

  static constexpr CombineRing kRing = CombineTuning::ring(kRows);
  const CombineParams& params_;
  char* sets_;
  std::uint64_t* barriers_;
  unsigned loaded_ = 0, used_ = 0;  // sets
  int ahead_ = 0;                   // sets loaded, from the first chunk of the current unit
};

// C4: sums the rows of a set into `bytes` of `out`. All is read before the first is added; `read` is called then.
template <typename T, int kRows, typename Read>
__device__ __forceinline__ void sum_set(const char* set, int count, char* out, int bytes, Read read) {
  constexpr int kStep = 32 * 16, kVectors = CombineTuning::ring(kRows).vectors;
  const int lane_offset = 16 * static_cast<int>(threadIdx.x % 32);
  set += lane_offset, out += lane_offset;
  uint4 rows[kRows][kVectors];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (row < count) {
        rows[row][v] = *reinterpret_cast<const uint4*>(set + (row * kVectors + v) * kStep);
      } else if (kRows == 2) {
        rows[row][v] = uint4{0, 0, 0, 0};
      }
    }
  }
  read();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    uint4 sum;
    if constexpr (kRows == 2) {
      sum = Vector<T>::add_two(rows[0][v], rows[1][v]);
    } else {
      float sums[Vector<T>::kSize] = {};
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= count) break;
        Vector<T>::add(sums, rows[row][v]);
      }
      sum = Vector<T>::round(sums);
    }
    if (lane_offset + v * kStep < bytes) ptx::st_weak_16(out + v * kStep, sum);
  }
}

}  // namespace deep_moe::kernels
