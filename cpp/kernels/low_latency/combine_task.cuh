// A task of a low-latency combine: a part of a token's row, for the peer that owns it or as the owner's result.
// README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine_weights.cuh"

namespace deep_moe::kernels {

// A tile of a row that a peer sends; `*units` holds an earlier try. Where the peer has been masked meanwhile, `*there`
// says whether it has come. False: leave.
template <bool kHasScales, class Width>
__device__ __forceinline__ bool take_tile(const LowLatencyRun& run, int holder, const char* row,
                                          const LaneTile<Width>& tile, LaneUnits<Width>* units, bool* there) {
  if (!await_units<kHasScales>(run, layout::WaitPhase::kUnits, holder, row, tile, units)) return false;
  *there = !run.may_be_masked() || __all_sync(0xffffffffu, are_there<kHasScales>(run.tag(), tile, *units));
  return true;
}

template <typename T, class Width, LowLatencyHalf kHalf_, bool kByExpert>
struct CombineTask {
  static constexpr bool kPlain = Width::kPlain;
  static constexpr bool kMayBeOwn = kHalf_ != LowLatencyHalf::kSend, kMayBeHeld = kHalf_ != LowLatencyHalf::kReceive;
  using Ranks = RankBits<kPlain>;
  using Wire = kernels::Wire<T, Width>;
  // What it is of, and what there is to know about that.
  struct Item {
    int owner = 0, token = 0, part = 0;
    bool is_own = false;                    // the owner's result
    TokenWords<kHalf_, kByExpert> words{};  // of the first half

    __device__ __forceinline__ void load(const LowLatencyCombineArgs& args) { words.load(args, owner, token, 0); }
  };

  const LowLatencyRun& run;
  const LowLatencyCombineParams& params;
  Item item;

  // H3, O3. False: leave.
  __device__ __forceinline__ bool work() {
    // Of an own token: not waited for before its rows have been summed.
    const std::int64_t raw = kMayBeHeld && item.is_own ? raw_id(params.args.ids, item.token, lane_id()) : item.words.id;
    if constexpr (kByExpert && kMayBeHeld) {
      send_rows();
      return true;
    }
    if constexpr (kMayBeHeld && kPlain) {
      if (!item.is_own && item.words.rows() == 0) return true;
      if (!find_weights(0, raw)) return false;
    }
    const LaneTile<Width> tile(params.num_vectors, item.part);
    typename Wire::Coded here{};
    bool any = false, ok = true;
    if constexpr (kMayBeHeld) {
      here = Wire::coded(sum_here(tile, &any, &ok));
      if (!ok) return false;
      if (!item.is_own) {
        if (any)
          tile.store_units(params.slot.reduced_row(run.slot_of(item.owner), run.rank(), item.token),
                           Wire::sent(here, run.tag()));
        return true;
      }
    }
    const LowLatencyCombineArgs& args = params.args;
    const TopkIds ids =
        kMayBeHeld ? args.ids : TopkIds{args.kept_ids, 4, args.ids.topk, args.ids.num_tokens, args.ids.topk};
    LaneSums<T, Width> sums;
#pragma unroll 1
    for (Ranks rest =
             ranks_of<kPlain>(run, ids, item.token, checked_id(raw, run.call.num_experts), params.expert_ranks);
         rest != 0; rest &= rest - 1) {
      const int holder = first_of(rest);
      if (kMayBeHeld && holder == run.rank()) {
        if (any) sums.add(Wire::kept(here));
        continue;
      }
      if constexpr (kByExpert)
        ok = add_sent_rows(tile, holder, &sums);
      else
        ok = add_sent_row(tile, holder, &sums);
      if (!ok) return false;
    }
    char* out = static_cast<char*>(args.out) + item.token * args.out_stride;
    const LaneVectors<Width> result = sums.rounded();
    if (kPlain || params.out_alignment == 16) {
      tile.store_vectors(out, result);
    } else {
#pragma unroll
      for (int j = 0; j < Width::kVectors; ++j)
        if (tile.has_vector(j)) store_16_by_halves(out + tile.vector_offset(j), result.v[j]);
    }
    return true;
  }

 private:
  __device__ __forceinline__ void load_half(int half) {
    if (!kPlain && params.args.ids.topk > kHalf) item.words.load(params.args, item.owner, item.token, half);
  }
  // Weights that the dispatch has not brought. False: leave.
  __device__ __forceinline__ bool find_weights(int half, std::int64_t raw) {
    const LowLatencyCombineArgs& args = params.args;
    if (args.recv_weights != nullptr) return true;
    if (!item.is_own) return await_weight(run, params, item.owner, item.token, half, &item.words.weight);
    item.words.weight = merged_weight(args.ids, item.token, half, checked_id(raw, run.call.num_experts),
                                      args.topk_weights + item.token * args.weight_stride);
    return true;
  }
  // The weighted sum, rounded, of the rows that this rank has, in the order of the entries; `*any`: there is one.
  __device__ __forceinline__ LaneVectors<Width> sum_here(const LaneTile<Width>& tile, bool* any, bool* ok) {
    LaneSums<T, Width> sums;
#pragma unroll 1
    for (int half = 0; half < num_halves<kPlain>(params.args.ids.topk); ++half) {
      load_half(half);
      const std::uint32_t rows = item.words.rows();
      if (rows == 0) continue;
      *any = true;
      if (!kPlain && !find_weights(half, item.is_own ? raw_id(params.args.ids, item.token, entry_of_lane(half)) : -1))
        *ok = false;
      add_rows(params, item.words.position, item.words.weight, rows, run.num_ranks(), tile, &sums);
    }
    return sums.rounded();
  }
  // By expert: each row by itself, known to its owner by its first entry.
  __device__ __forceinline__ void send_rows() {
    const LaneTile<Width> tile(params.num_vectors, item.part);
#pragma unroll 1
    for (int half = 0; half < num_halves<kPlain>(params.args.ids.topk); ++half) {
      load_half(half);
      constexpr int kBatch = LowLatencyTuning::kRowsAwaited;
      std::uint32_t rows = item.words.rows();
#pragma unroll 1
      while (rows != 0) {
        LaneVectors<Width> vectors[kBatch];
        std::uint32_t rest = rows;
#pragma unroll
        for (int n = 0; n < kBatch; ++n, rest &= rest - 1)
          if (rest != 0)
            load_packed(params, __shfl_sync(0xffffffffu, item.words.position, first_of(rest)), run.num_ranks(), tile,
                        &vectors[n]);
#pragma unroll
        for (int n = 0; n < kBatch; ++n, rows &= rows - 1)
          if (rows != 0)
            tile.store_units(params.slot.expert_row(run.slot_of(item.owner), item.token, half * kHalf + first_of(rows)),
                             Wire::sent(Wire::coded(vectors[n]), run.tag()));
      }
    }
  }
  // The row that one holder sends.
  __device__ __forceinline__ bool add_sent_row(const LaneTile<Width>& tile, int holder,
                                               LaneSums<T, Width>* sums) const {
    const char* row = params.slot.reduced_row(run.my_slot(), holder, item.token);
    LaneUnits<Width> units = no_units<Width>(run.tag());
    tile.load_units(row, &units);
    bool there;
    if (!take_tile<Wire::kHasScales>(run, holder, row, tile, &units, &there)) return false;
    if (there) sums->add(Wire::received(units));
    return true;
  }
  // The rows, by expert, that one holder sends.
  __device__ __forceinline__ bool add_sent_rows(const LaneTile<Width>& tile, int holder, LaneSums<T, Width>* sums) {
    constexpr int kBatch = LowLatencyTuning::kRowsAwaited;
    char* const mine = run.my_slot();
#pragma unroll 1
    for (int half = 0; half < num_halves<kPlain>(params.args.ids.topk); ++half) {
      load_half(half);
      const std::int32_t id = checked_id(item.words.id, run.call.num_experts);
      std::uint32_t rows =
          __ballot_sync(0xffffffffu, id >= 0 && params.expert_ranks.rank_of(static_cast<std::uint32_t>(id)) == holder);
#pragma unroll 1
      while (rows != 0) {
        LaneUnits<Width> units[kBatch];
        std::uint32_t rest = rows;
        const auto row_of = [&](std::uint32_t bits) {
          return params.slot.expert_row(mine, item.token, half * kHalf + first_of(bits));
        };
#pragma unroll
        for (int n = 0; n < kBatch; ++n, rest &= rest - 1)
          if (rest != 0) tile.load_units(row_of(rest), &units[n]);
#pragma unroll
        for (int n = 0; n < kBatch; ++n, rows &= rows - 1) {
          if (rows == 0) break;
          bool there;
          if (!take_tile<Wire::kHasScales>(run, holder, row_of(rows), tile, &units[n], &there)) return false;
          const float weight = __shfl_sync(0xffffffffu, item.words.weight, first_of(rows));
          if (there) sums->add(weight, Wire::received(units[n]));
        }
      }
    }
    return true;
  }
};

}  // namespace deep_moe::kernels
