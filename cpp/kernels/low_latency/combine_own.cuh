// Low-latency combine at the owner of the tokens: what it waits for, the sum. README.md beside this file has the words
// and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine_hold.cuh"

namespace deep_moe::kernels {

// O2. What the owner of a token has to know of half of its entries. Nothing that is loaded is waited for.
struct OwnEntry {
  HeldRow held;  // in one launch
  std::int64_t id = -1;
  float weight = 0;  // by expert

  __device__ __forceinline__ void load(const LowLatencyCombineArgs& args, const HeldRow::Address& at,
                                       std::int64_t token, int half) {
    const int topk = args.ids.topk, k = entry_of_lane(half);
    id = -1, weight = 0;
    if (args.call.half == LowLatencyHalf::kBoth) {
      held.load(at, topk, half);
      id = raw_id(args.ids, token, k);
    } else if (k < topk) {
      id = ptx::ld_relaxed_gpu(args.kept_ids + token * topk + k);
      if (args.by_expert) weight = ptx::ld_relaxed_gpu(args.kept_weights + token * topk + k);
    }
  }
};

// Tiles of rows that a peer sends, several asked for at a time: take(n, vectors) gets those of rows 0 to count - 1 in
// order. Row n lies at address(n). False: leave.
template <class Width, typename Address, typename Take>
__device__ __forceinline__ bool take_tiles(const WaitScope& scope, const LaneTile<Width>& tile, int holder, int count,
                                           Address address, Take take) {
  constexpr int kBatch = Width::kVectors == 1 ? LowLatencyTuning::kRowsAwaited : 1;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    LaneUnits<Width> units[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n)
      if (first + n < count) tile.load_units(address(first + n), &units[n]);
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (first + n >= count) break;
      if (!await_units(scope, layout::WaitPhase::kUnits, holder, address(first + n), tile, &units[n])) return false;
      if (scope.masked != nullptr && !are_there(scope, tile, units[n])) continue;  // masked meanwhile
      take(first + n, to_vectors(units[n]));
    }
  }
  return true;
}

// The n-th bit that is set.
__device__ __forceinline__ int bit_number(std::uint64_t bits, int n) {
#pragma unroll 1
  for (; n > 0; --n) bits &= bits - 1;
  return __ffsll(static_cast<long long>(bits)) - 1;
}

// O3. A part of a token's result; `own` is the first half. False: leave.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ bool receive_own(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                            RowBuffer* buffer, OwnEntry own, int token, int part) {
  const LowLatencyCombineArgs& args = params.args;
  const layout::LowLatencyCombineSlot& slot = params.slot;
  const int topk = args.ids.topk, num_experts = run.call.num_experts;
  const bool is_whole = run.is_whole();
  const LaneTile<Width> tile(params.num_vectors, part);
  char* const mine = run.my_slot();
  const TopkIds ids = is_whole ? args.ids : TopkIds{args.kept_ids, 4, topk, args.ids.num_tokens, topk};
  const std::uint64_t ranks =
      ranks_of<Width::kPlain>(run, ids, token, checked_id(own.id, num_experts), params.expert_ranks);
  LaneVectors<Width> result;
  if constexpr (kByExpert) {
    LaneSums<T, Width> sums;
    // By rank, then by entry.
#pragma unroll 1
    for (std::uint64_t rest = ranks; rest != 0; rest &= rest - 1) {
      const int holder = __ffsll(static_cast<long long>(rest)) - 1;
#pragma unroll 1
      for (int half = 0; half < num_halves<Width::kPlain>(topk); ++half) {
        if (!Width::kPlain && topk > kHalf) own.load(args, HeldRow::Address(args, run.rank(), token), token, half);
        const std::int32_t id = checked_id(own.id, num_experts);
        const std::uint32_t entries = __ballot_sync(
            0xffffffffu, id >= 0 && params.expert_ranks.rank_of(static_cast<std::uint32_t>(id)) == holder);
        if (!take_tiles(
                run.scope, tile, holder, __popc(entries),
                [&](int n) { return slot.expert_row(mine, token, half * kHalf + bit_number(entries, n)); },
                [&](int n, const LaneVectors<Width>& vectors) {
                  sums.add(__shfl_sync(0xffffffffu, own.weight, bit_number(entries, n)), vectors);
                }))
          return false;
      }
    }
    result = sums.rounded();
  } else {
    // What the first peer sends is asked for ahead, if that takes few registers.
    std::uint64_t peers = ranks;
    if (is_whole) peers &= ~(std::uint64_t{1} << run.rank());
    const int first_peer = Width::kVectors > 1 ? -1 : __ffsll(static_cast<long long>(peers)) - 1;
    LaneUnits<Width> ahead = no_units<Width>(run.tag);
    if (first_peer >= 0) tile.load_units(slot.reduced_row(mine, first_peer, token), &ahead);
    LaneVectors<Width> here{};
    if (is_whole && (ranks >> run.rank() & 1) != 0) {
      LaneSums<T, Width> held;
#pragma unroll 1
      for (int half = 0; half < num_halves<Width::kPlain>(topk); ++half) {
        if (half > 0) own.load(args, HeldRow::Address(args, run.rank(), token), token, half);
        const std::uint32_t entries = own.held.entries();
        if (entries == 0) continue;
        if (args.recv_weights == nullptr)
          own.held.weight = merged_weight(args.ids, token, half, checked_id(own.id, num_experts),
                                          args.topk_weights + token * args.weight_stride);
        add_held(params, buffer, own.held, entries, run.num_ranks(), tile, &held);
      }
      here = held.rounded();
    }
    LaneSums<T, Width> sums;
#pragma unroll 1
    for (std::uint64_t rest = ranks; rest != 0; rest &= rest - 1) {
      const int holder = __ffsll(static_cast<long long>(rest)) - 1;
      if (is_whole && holder == run.rank()) {
        sums.add(here);
        continue;
      }
      const char* row = slot.reduced_row(mine, holder, token);
      if (holder != first_peer) tile.load_units(row, &ahead);
      if (!await_units(run.scope, layout::WaitPhase::kUnits, holder, row, tile, &ahead)) return false;
      if (run.scope.masked != nullptr && !are_there(run.scope, tile, ahead)) continue;  // masked meanwhile
      sums.add(to_vectors(ahead));
    }
    result = sums.rounded();
  }
  char* out = static_cast<char*>(args.out) + token * args.out_stride;
  if (Width::kPlain || params.out_alignment == 16) {
    tile.store_vectors(out, result);
  } else {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (tile.has_vector(j)) store_16_by_halves(out + tile.vector_offset(j), result.v[j]);
  }
  return true;
}

}  // namespace deep_moe::kernels
