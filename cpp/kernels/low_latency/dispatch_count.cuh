// Where rows of a low-latency dispatch go, worked out together by all ranks: each counts its own tokens. README.md
// beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/dispatch_send.cuh"

namespace deep_moe::kernels {

// Shared memory of a block: how many of this rank's tokens go to each expert, all of them and those ahead of the
// block's; of the latter a bit for each; how many of each other source's tokens go to each expert here, in a second
// half of this rank's own as well.
class ExpertCounts {
 public:
  __device__ ExpertCounts(char* base, const LowLatencyDispatchParams& params, bool sends,
                          const layout::ExpertBlocks& experts, int rank)
      : sums_(reinterpret_cast<std::uint32_t*>(base)),
        bits_(sums_ + (sends ? params.args.call.num_experts : 0)),
        here_(bits_ + (sends ? params.args.call.num_experts * bit_words(params) : 0)),
        bit_words_(bit_words(params)),
        num_local_(experts.num_local_experts(rank)),
        own_rank_(sends ? rank : -1),
        own_first_(experts.first_expert(rank)) {}
  static DM_HOST_DEVICE int bit_words(const LowLatencyDispatchParams& params) { return (params.per_block + 31) / 32; }
  static std::int64_t num_bytes(const LowLatencyDispatchParams& params, bool sends, int num_ranks, int num_local) {
    const std::int64_t sent = sends ? std::int64_t{params.args.call.num_experts} * (1 + bit_words(params)) : 0;
    return 4 * (sent + std::int64_t{num_ranks} * num_local);
  }

  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = thread; i < here_ - sums_; i += threads) sums_[i] = 0;
  }
  // A token of this rank's, once for each expert of its.
  __device__ __forceinline__ void add(const BlockShare& share, int token, int expert) const {
    atomicAdd(&sums_[expert], token < share.begin ? 0x10001u : 0x10000u);
    if (token >= share.begin && token < share.end)
      atomicOr(&bits_[expert * bit_words_ + (token - share.begin) / 32], 1u << (token - share.begin) % 32);
  }
  __device__ __forceinline__ std::uint32_t all(int expert) const { return sums_[expert] >> 16; }
  // How many tokens of this rank before this one go to the expert; it is one of the block's.
  __device__ __forceinline__ std::uint32_t before(const BlockShare& share, int token, int expert) const {
    const int bit = token - share.begin;
    const std::uint32_t* bits = bits_ + expert * bit_words_;
    std::uint32_t sum = sums_[expert] & 0xffffu;
#pragma unroll 1
    for (int i = 0; i < bit / 32; ++i) sum += static_cast<std::uint32_t>(__popc(bits[i]));
    return sum + static_cast<std::uint32_t>(__popc(bits[bit / 32] & ((1u << bit % 32) - 1)));
  }
  __device__ __forceinline__ std::uint32_t& here(int src, int local) const { return here_[src * num_local_ + local]; }
  __device__ __forceinline__ std::uint32_t from(int src, int local) const {
    return src == own_rank_ ? all(own_first_ + local) : here(src, local);
  }
  // The place of a source's first row.
  __device__ __forceinline__ std::uint32_t begin(int src, int local) const {
    std::uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < src; ++i) sum += from(i, local);
    return sum;
  }

 private:
  std::uint32_t *sums_, *bits_, *here_;
  int bit_words_, num_local_, own_rank_, own_first_;
};

// Entries of several tokens in the lanes of a warp, at most 32 of a token.
class TokenGroup {
 public:
  __device__ explicit TokenGroup(int topk)
      : width_(topk <= 8    ? 8
               : topk <= 16 ? 16
                            : 32),
        k_(lane_id() & (width_ - 1)) {}
  __device__ int width() const { return width_; }
  __device__ int size() const { return 32 / width_; }  // tokens
  __device__ int k() const { return k_; }
  __device__ __forceinline__ int token(int first) const { return first + lane_id() / width_; }
  // Lanes with entries alike, among those of one token. The whole warp.
  __device__ __forceinline__ std::uint32_t alike(std::int32_t id) const {
    return __match_any_sync(0xffffffffu, id < 0 ? lane_id() - 64 : lane_id() / width_ * (layout::kMaxExperts + 1) + id);
  }

 private:
  const int width_, k_;
};
__device__ __forceinline__ bool is_first(std::uint32_t alike) { return (alike & ((1u << lane_id()) - 1)) == 0; }

// S0. This rank's tokens into the counts of the block; the warps that carry rows take turns, from the last one on,
// which sends the least.
template <bool kPlain>
class TokenCounter {
 public:
  __device__ TokenCounter(const LowLatencyDispatchParams& params)
      : params_(params),
        group_(params.args.ids.topk),
        step_(is_many() ? 1 : group_.size()),
        first_((params.num_carriers - 1 - static_cast<int>(threadIdx.x / 32)) * step_) {}
  // The first ids; nothing waits for them.
  __device__ __forceinline__ void load() { raw_ = raw_of(first_); }
  __device__ __forceinline__ void count(const BlockShare& share, const ExpertCounts& counts) {
    const TopkIds& ids = params_.args.ids;
    const int num_tokens = static_cast<int>(params_.args.num_tokens), num_experts = params_.args.call.num_experts;
#pragma unroll 1
    for (int first = first_; first < num_tokens; first += params_.num_carriers * step_) {
      if (first != first_) raw_ = raw_of(first);
      if (is_many()) {
#pragma unroll 1
        for (int half = 0; half < num_halves<kPlain>(ids.topk); ++half) {
          const std::int32_t id = checked_id(raw_id(ids, first, entry_of_lane(half)), num_experts);
          if (!is_repeated(ids, first, half, id) && id >= 0) counts.add(share, first, id);
        }
      } else {
        const std::int32_t id = checked_id(raw_, num_experts);
        const std::uint32_t alike = group_.alike(id);
        if (id >= 0 && is_first(alike)) counts.add(share, group_.token(first), id);
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_many() const { return !kPlain && params_.args.ids.topk > kHalf; }
  __device__ __forceinline__ std::int64_t raw_of(int first) const {
    const int token = group_.token(first);
    return token < params_.args.num_tokens ? raw_id(params_.args.ids, token, group_.k()) : -1;
  }
  const LowLatencyDispatchParams& params_;
  const TokenGroup group_;
  const int step_, first_;
  std::int64_t raw_ = -1;
};

// S2. How many tokens go to each expert of a rank, to that rank: each block a part of it. One warp.
template <bool kToItself>
__device__ __forceinline__ void send_counts(const LowLatencyRun& run, const LowLatencyDispatchParams& params,
                                            const ExpertCounts& counts) {
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int total = run.num_ranks() * params.slot.num_count_units;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) + lane_id() * static_cast<int>(gridDim.x); i < total;
       i += 32 * static_cast<int>(gridDim.x)) {
    std::uint32_t unit;
    const int dst = static_cast<int>(params.by_count_units.divide(static_cast<std::uint32_t>(i), &unit));
    if (!run.is_live(dst) || (!kToItself && dst == run.rank())) continue;
    const int first = experts.first_expert(dst), num_local = experts.num_local_experts(dst);
    const auto count = [&](int w) {
      const int local = static_cast<int>(unit) * layout::kUnitWords + w;
      return local < num_local ? counts.all(first + local) : 0u;
    };
    ptx::st_relaxed_sys_16(params.slot.counts(run.slot_of(dst), run.rank()) + unit * layout::kUnitBytes,
                           make_uint4(count(0), count(1), count(2), run.tag()));
  }
}

__device__ __forceinline__ std::uint32_t encoded(std::int32_t id, std::uint32_t before) {
  return id < 0 ? layout::kNoExpert : static_cast<std::uint32_t>(id) | before << layout::kExpertBits;
}

// S2. Entries of the block's tokens to every rank, and their weights to the ranks of their experts; in one launch to
// the peers alone. One warp.
template <bool kPlain, bool kToItself>
class WordSender {
 public:
  __device__ WordSender(const LowLatencyDispatchParams& params, const BlockShare& share)
      : params_(params), share_(share), group_(params.args.ids.topk) {}

  // What the first tokens need; nothing waits for it.
  __device__ __forceinline__ void load() {
    if (!is_many()) load(share_.begin);
  }
  __device__ __forceinline__ void send(const LowLatencyRun& run, const ExpertCounts& counts) {
    if (is_many()) {
#pragma unroll 1
      for (int token = share_.begin; token < share_.end; ++token) send_many(run, counts, token);
      return;
    }
#pragma unroll 1
    for (int first = share_.begin; first < share_.end; first += group_.size()) {
      if (first != share_.begin) load(first);
      send_group(run, counts, group_.token(first));
    }
  }

 private:
  __device__ __forceinline__ bool is_many() const { return !kPlain && params_.args.ids.topk > kHalf; }
  __device__ __forceinline__ void load(int first) {
    const LowLatencyDispatchArgs& args = params_.args;
    const int token = group_.token(first);
    raw_ = -1, weight_ = 0;
    if (token >= share_.end || group_.k() >= args.ids.topk) return;
    raw_ = raw_id(args.ids, token, group_.k());
    if (args.with_weights) weight_ = ptx::ld_relaxed_gpu(args.topk_weights + token * args.weight_stride + group_.k());
  }
  __device__ __forceinline__ void send_group(const LowLatencyRun& run, const ExpertCounts& counts, int token) const {
    const layout::LowLatencyDispatchSlot& slot = params_.slot;
    const int width = group_.width(), k = group_.k();
    const std::int32_t id = checked_id(raw_, run.call.num_experts);
    const std::uint32_t alike = group_.alike(id);
    const bool is_row = id >= 0 && is_first(alike);
    float weight = __fadd_rn(0.0f, weight_);
    if (__any_sync(0xffffffffu, id >= 0 && !is_row)) {
#pragma unroll 1
      for (int i = 0; i < width; ++i) {
        const float other = __shfl_sync(0xffffffffu, weight_, i, width);
        const int lane = lane_id() - k + i;
        if (id >= 0 && lane > lane_id() && (alike >> lane & 1) != 0) weight = __fadd_rn(weight, other);
      }
    }
    RankBits<kPlain> ranks = 0;
    if (id >= 0) ranks = RankBits<kPlain>{1} << params_.expert_ranks.rank_of(static_cast<std::uint32_t>(id));
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      if (step < width) ranks |= __shfl_xor_sync(0xffffffffu, ranks, step);
    const std::uint32_t entry = encoded(is_row ? id : -1, is_row ? counts.before(share_, token, id) : 0);
    const uint4 entries = row_unit(entry, layout::kNoExpert, run.tag());
    const uint4 weights = row_unit(__float_as_uint(weight), 0, run.tag());
    if (token >= share_.end || k >= params_.args.ids.topk || k % layout::kUnitWords != 0) return;
#pragma unroll 1
    for (int dst = 0; dst < run.num_ranks(); ++dst) {
      if (!run.is_live(dst) || (!kToItself && dst == run.rank())) continue;
      char* at = slot.words(run.slot_of(dst), run.rank(), token) + k / layout::kUnitWords * layout::kUnitBytes;
      ptx::st_relaxed_sys_16(at, entries);
      if (slot.num_weight_units > 0 && (ranks >> dst & 1) != 0)
        ptx::st_relaxed_sys_16(at + slot.num_entry_units * layout::kUnitBytes, weights);
    }
  }
  // A word of each of three lanes. The whole warp.
  __device__ __forceinline__ uint4 row_unit(std::uint32_t word, std::uint32_t none, std::uint32_t tag) const {
    const std::uint32_t second = __shfl_down_sync(0xffffffffu, word, 1), third = __shfl_down_sync(0xffffffffu, word, 2);
    return make_uint4(word, group_.k() + 1 < group_.width() ? second : none,
                      group_.k() + 2 < group_.width() ? third : none, tag);
  }
  // More than 32 entries: unit u in lane u, word by word.
  __device__ __forceinline__ void send_many(const LowLatencyRun& run, const ExpertCounts& counts, int token) const {
    const LowLatencyDispatchArgs& args = params_.args;
    const layout::LowLatencyDispatchSlot& slot = params_.slot;
    std::uint32_t entry[2], weight[2] = {};
    std::int32_t id[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      id[half] = checked_id(raw_id(args.ids, token, entry_of_lane(half)), run.call.num_experts);
      const bool is_row = !is_repeated(args.ids, token, half, id[half]) && id[half] >= 0;
      entry[half] = encoded(is_row ? id[half] : -1, is_row ? counts.before(share_, token, id[half]) : 0);
    }
    if (slot.num_weight_units > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[half] = __float_as_uint(
            merged_weight(args.ids, token, half, id[half], args.topk_weights + token * args.weight_stride));
    }
    const auto unit_of = [&](const std::uint32_t* words, std::uint32_t none) {
      std::uint32_t unit[layout::kUnitWords];
#pragma unroll
      for (int w = 0; w < layout::kUnitWords; ++w) {
        const int k = lane_id() * layout::kUnitWords + w;
        const std::uint32_t low = __shfl_sync(0xffffffffu, words[0], k & 31),
                            high = __shfl_sync(0xffffffffu, words[1], k & 31);
        unit[w] = k >= args.ids.topk ? none : k < kHalf ? low : high;
      }
      return make_uint4(unit[0], unit[1], unit[2], run.tag());
    };
    const uint4 entries = unit_of(entry, layout::kNoExpert), weights = unit_of(weight, 0);
    const auto ranks = ranks_of<kPlain>(run, args.ids, token, id[0], params_.expert_ranks);
    if (lane_id() >= slot.num_entry_units) return;
#pragma unroll 1
    for (int dst = 0; dst < run.num_ranks(); ++dst) {
      if (!run.is_live(dst) || (!kToItself && dst == run.rank())) continue;
      char* at = slot.words(run.slot_of(dst), run.rank(), token) + lane_id() * layout::kUnitBytes;
      ptx::st_relaxed_sys_16(at, entries);
      if (slot.num_weight_units > 0 && (ranks >> dst & 1) != 0)
        ptx::st_relaxed_sys_16(at + slot.num_entry_units * layout::kUnitBytes, weights);
    }
  }

  const LowLatencyDispatchParams& params_;
  const BlockShare& share_;
  const TokenGroup group_;
  std::int64_t raw_ = -1;
  float weight_ = 0;
};

}  // namespace deep_moe::kernels
