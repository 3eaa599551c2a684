// From ids to ranks: the part of layout that get_dispatch_layout and notify share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/api.hpp"
#include "kernels/tuning.hpp"
#include "layout/experts.hpp"

namespace deep_moe::kernels {

inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kRanksPerLane = layout::kMaxKernelRanks / 32;

// Experts and their owners, with the owner found by multiplication: x / d is x * ceil(2^31 / d) / 2^31 for all x and d
// up to 2^15. Made by the host.
struct Owners {
  static_assert(layout::kMaxExperts <= 1 << 15);
  layout::ExpertBlocks blocks;
  int split;  // experts before it lie in blocks of base + 1
  std::uint32_t long_factor, short_factor;

  Owners(int num_experts, int num_ranks)
      : blocks(num_experts, num_ranks),
        split(blocks.extra * (blocks.base + 1)),
        long_factor(factor(blocks.base + 1)),
        short_factor(blocks.base > 0 ? factor(blocks.base) : 0) {}
  __device__ __forceinline__ int rank_of(int expert_idx) const {
    const bool is_long = expert_idx < split;
    const std::uint32_t in_part = static_cast<std::uint32_t>(is_long ? expert_idx : expert_idx - split);
    const int blocks_before = static_cast<int>(std::uint64_t{in_part} * (is_long ? long_factor : short_factor) >> 31);
    return is_long ? blocks_before : blocks.extra + blocks_before;
  }

 private:
  static std::uint32_t factor(int divisor) {
    const std::uint32_t d = static_cast<std::uint32_t>(divisor);
    return ((1u << 31) + d - 1) / d;
  }
};

// One block's counts of rows by rank, warp by warp; two sets, so that one barrier a chunk is enough.
using WarpCounts = std::uint32_t[2][NotifyTuning::kWarps][layout::kMaxKernelRanks];

// The tokens of one block: a contiguous range, in chunks of one token a thread.
struct TokenRange {
  std::int64_t begin, end;
  int num_chunks;

  __device__ TokenRange(std::int64_t num_tokens, int block, int num_blocks) {
    constexpr int kThreads = NotifyTuning::kThreads;
    const std::int64_t chunks = (num_tokens + kThreads - 1) / kThreads;
    const std::int64_t chunks_per_block = (chunks + num_blocks - 1) / num_blocks;
    begin = min(num_tokens, block * chunks_per_block * kThreads);
    end = min(num_tokens, begin + chunks_per_block * kThreads);
    num_chunks = static_cast<int>((end - begin + kThreads - 1) / kThreads);
  }
  __device__ std::int64_t token(int chunk) const {
    return begin + static_cast<std::int64_t>(chunk) * NotifyTuning::kThreads + threadIdx.x;
  }
};

// Loads kIdsInFlight ids from `row`, 16 bytes at a time; `row` is 16-byte aligned.
template <typename Id>
__device__ __forceinline__ void load_ids_aligned(const Id* row, Id (&ids)[NotifyTuning::kIdsInFlight]) {
  constexpr int kIdsPerLoad = 16 / sizeof(Id);
  union Load {
    int4 bits;
    Id ids[kIdsPerLoad];
  };
#pragma unroll
  for (int i = 0; i < NotifyTuning::kIdsInFlight; i += kIdsPerLoad) {
    Load load;
    load.bits = __ldg(reinterpret_cast<const int4*>(row + i));
#pragma unroll
    for (int j = 0; j < kIdsPerLoad; ++j) ids[i + j] = load.ids[j];
  }
}

// The ranks that token `t` goes to, as bits. With kCount every id in range is added to `expert_counts` (shared) as
// well.
template <typename Id, bool kCount>
__device__ std::uint64_t rank_mask(const TopkIds& args, const Owners& owners, std::int64_t t,
                                   std::uint32_t* expert_counts) {
  constexpr int kBatch = NotifyTuning::kIdsInFlight;
  using Unsigned = std::make_unsigned_t<Id>;
  const Id* row = static_cast<const Id*>(args.data) + t * args.row_stride;
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  std::uint64_t mask = 0;
  for (int k = 0; k < args.topk; k += kBatch) {
    Id ids[kBatch];
    if (aligned && k + kBatch <= args.topk) {
      load_ids_aligned(row + k, ids);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) ids[i] = k + i < args.topk ? __ldg(row + k + i) : Id{-1};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (static_cast<Unsigned>(ids[i]) >= static_cast<Unsigned>(owners.blocks.num_experts)) continue;
      const int expert_idx = static_cast<int>(ids[i]);
      mask |= std::uint64_t{1} << owners.rank_of(expert_idx);
      if constexpr (kCount) atomicAdd(expert_counts + expert_idx, 1u);
    }
  }
  return mask;
}

// Adds this warp's rows for rank `lane` and rank `lane + 32` to `counts`.
__device__ __forceinline__ void count_ranks(std::uint64_t mask, int num_ranks, std::uint32_t (&counts)[kRanksPerLane]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int r = 0; r < num_ranks; ++r) {
    const std::uint32_t rows = __popc(__ballot_sync(kFullWarp, (mask >> r) & 1));
    if (lane == r % 32) counts[0] += r < 32 ? rows : 0, counts[1] += r < 32 ? 0 : rows;
  }
}

// Puts each warp's counts where the block can add them up.
__device__ __forceinline__ void share_counts(
    const std::uint32_t (&counts)[kRanksPerLane],
    std::uint32_t (&warp_counts)[NotifyTuning::kWarps][layout::kMaxKernelRanks]) {
#pragma unroll
  for (int i = 0; i < kRanksPerLane; ++i) warp_counts[threadIdx.x / 32][threadIdx.x % 32 + 32 * i] = counts[i];
}

// Rows of the first `num_warps` warps for `rank`.
__device__ __forceinline__ std::uint32_t sum_warps(
    const std::uint32_t (&warp_counts)[NotifyTuning::kWarps][layout::kMaxKernelRanks], int rank, int num_warps) {
  std::uint32_t sum = 0;
  for (int w = 0; w < num_warps; ++w) sum += warp_counts[w][rank];
  return sum;
}

// Where tokens go, by their experts' ids.
template <typename Id>
struct RouteByIds {
  const TopkIds& ids;
  const Owners& owners;

  // The ranks of token `t`; with kCount its entries are added to `expert_counts` (shared).
  template <bool kCount>
  __device__ std::uint64_t ranks(std::int64_t t, std::uint32_t* expert_counts) const {
    return rank_mask<Id, kCount>(ids, owners, t, expert_counts);
  }
  // What the block's sum for an expert starts from.
  __device__ std::uint32_t first_count(int, int) const { return 0; }
};

// The same from a mask [T, R] and a count [E] for each expert, which the first block takes as its own.
struct RouteByMask {
  const bool* token_in_rank;
  const std::int32_t* expert_counts;
  int num_ranks;

  template <bool kCount>
  __device__ std::uint64_t ranks(std::int64_t t, std::uint32_t*) const {
    const auto* row = reinterpret_cast<const std::uint8_t*>(token_in_rank) + t * num_ranks;
    std::uint64_t mask = 0;
#pragma unroll 8
    for (int r = 0; r < num_ranks; ++r) mask |= std::uint64_t{__ldg(row + r) != 0} << r;
    return mask;
  }
  __device__ std::uint32_t first_count(int block, int expert_idx) const {
    return block == 0 ? static_cast<std::uint32_t>(__ldg(expert_counts + expert_idx)) : 0;
  }
};

// Counts the tokens of a block: experts into `expert_counts` (shared, set here), ranks into warp_counts[0]. Calls
// each(chunk, t, mask) in every thread for every chunk; the mask of a token past the range is 0. Ends without a
// barrier.
template <typename Route, typename Each>
__device__ void count_tokens(const Route& route, const layout::ExpertBlocks& experts, int block,
                             const TokenRange& range, std::uint32_t* expert_counts, WarpCounts& warp_counts,
                             Each each) {
  for (int e = threadIdx.x; e < experts.num_experts; e += NotifyTuning::kThreads)
    expert_counts[e] = route.first_count(block, e);
  __syncthreads();
  std::uint32_t counts[kRanksPerLane] = {};
  for (int chunk = 0; chunk < range.num_chunks; ++chunk) {
    const std::int64_t t = range.token(chunk);
    const std::uint64_t mask = t < range.end ? route.template ranks<true>(t, expert_counts) : 0;
    each(chunk, t, mask);
    count_ranks(mask, experts.num_ranks, counts);
  }
  share_counts(counts, warp_counts[0]);
}

}  // namespace deep_moe::kernels
