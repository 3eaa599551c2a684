// Low-latency combine at the owner of the tokens: what it waits for, the sum. README.md beside this file has the words
// and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine_hold.cuh"

namespace deep_moe::kernels {

// O2. What the owner of a token has to know: who sends sums; its own terms, or by expert all of them.
template <bool kByExpert>
__device__ __forceinline__ bool look_up_own(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                            std::int64_t token, EntryBuffer& entries, Term* terms, TokenInfo* info) {
  const LowLatencyCombineArgs& args = params.args;
  const int topk = args.ids.topk;
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  *info = {run.rank(), static_cast<std::int32_t>(token), 0, 0};
  if (run.is_whole()) {
    const RawIds raw(args.ids, token);
    HeldWords words(run, args, run.rank(), token);
    info->holders = TokenIds(raw, run.call.num_experts).ranks(experts);
    return look_up_held<kByExpert>(run, params, words, run.rank(), token, entries, terms, &info->num_terms);
  }
  const TopkIds kept{args.kept_ids, 4, topk, args.ids.num_tokens, topk};
  const RawIds raw(kept, token);
  float weight[RawIds::kPerLane] = {};
  if (kByExpert) {
#pragma unroll
    for (int i = 0; i < RawIds::kPerLane; ++i)
      if (lane_id() + 32 * i < topk) weight[i] = args.kept_weights[token * topk + lane_id() + 32 * i];
  }
  const TokenIds ids(raw, run.call.num_experts);
  info->holders = ids.ranks(experts);
  if constexpr (kByExpert) {
#pragma unroll
    for (int i = 0; i < TokenIds::kPerLane; ++i) {
      entries.keys[lane_id() + 32 * i] = ids.id[i];
      entries.weights[lane_id() + 32 * i] = weight[i];
    }
    __syncwarp();
    info->num_terms = make_terms<false>(
        ids.id, weight, entries, topk, terms, [&](std::int32_t expert) { return experts.rank_of(expert); },
        [](std::int32_t, int k) { return std::int64_t{k}; });
    __syncwarp();
  }
  return true;
}

// O3. A tile of a token's result.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ bool receive_tile(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                             const TokenInfo& info, const Term* terms, const LaneTile<Width>& tile) {
  const LowLatencyCombineArgs& args = params.args;
  const layout::LowLatencyCombineSlot& slot = params.slot;
  char* mine = run.my_slot();
  LaneSums<T, Width> sums;
  if constexpr (kByExpert) {
    if (!take_tiles(
            run.scope, tile, info.num_terms,
            [&](int n) { return slot.expert_row(mine, info.token, static_cast<int>(terms[n].at)); },
            [&](int n) { return terms[n].holder; }, [](int) { return false; },
            [&](int n, const LaneVectors<Width>& vectors) { sums.add(terms[n].weight, vectors); }))
      return false;
  } else {
    LaneVectors<Width> own{};
    if (info.num_terms > 0) own = sum_local_rows<T, Width>(params, terms, info.num_terms, tile);
    const auto holder = [&](int n) {  // the n-th in rank order
      std::uint64_t rest = info.holders;
      for (; n > 0; --n) rest &= rest - 1;
      return __ffsll(static_cast<long long>(rest)) - 1;
    };
    const auto is_mine = [&](int n) { return run.is_whole() && holder(n) == run.rank(); };
    if (!take_tiles(
            run.scope, tile, __popcll(info.holders),
            [&](int n) { return slot.reduced_row(mine, holder(n), info.token); }, holder, is_mine,
            [&](int n, LaneVectors<Width> vectors) {
              if (is_mine(n)) vectors = own;
              sums.add(vectors);
            }))
      return false;
  }
  const LaneVectors<Width> result = sums.rounded();
  char* out = static_cast<char*>(args.out) + info.token * args.out_stride;
  if (params.out_alignment == 16) {
    tile.store_vectors(out, result);
  } else {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (tile.has_vector(j)) store_16_unaligned(out + tile.vector_offset(j), result.v[j], params.out_alignment);
  }
  return true;
}

// The second half: this block's share of the tiles of this rank's tokens.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ void receive_own(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                            const BlockMemory& memory) {
  const LowLatencyCombineArgs& args = params.args;
  const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
  const int num_parts = params.num_parts, topk = args.ids.topk, carriers = run.num_carriers();
  const int total = static_cast<int>(args.ids.num_tokens) * num_parts;
  // Blocks that have sent nothing, or would have if all had as many tokens, are the first to receive.
  const int senders = run.is_whole() ? (total * (run.num_ranks() - 1) + warps - 1) / warps : 0;
  const int block = (static_cast<int>(blockIdx.x) + carriers - senders % carriers) % carriers;
  const TaskRange tasks(total, carriers, block);
  if (tasks.begin >= tasks.end) return;
  const int end_token = (tasks.end - 1) / num_parts + 1;
  bool ok = !run.failed;
#pragma unroll 1
  for (int first = tasks.begin / num_parts; first < end_token; first += warps) {
    if (first + warp < end_token) {
      TokenInfo info;
      ok = look_up_own<kByExpert>(run, params, first + warp, memory.entries, memory.chunk.terms + warp * topk, &info) &&
           ok;
      if (lane_id() == 0) memory.infos[warp] = info;
    }
    if (!__syncthreads_and(ok)) return;
    const int begin = max(tasks.begin, first * num_parts), end = min(tasks.end, (first + warps) * num_parts);
#pragma unroll 1
    for (int at = begin + warp; ok && at < end; at += warps) {
      const int i = at / num_parts - first;
      ok = receive_tile<T, Width, kByExpert>(run, params, memory.infos[i], memory.chunk.terms + i * topk,
                                             LaneTile<Width>(params.row_bytes, at % num_parts));
    }
    if (first + warps < end_token && !__syncthreads_and(ok)) return;
  }
}

}  // namespace deep_moe::kernels
