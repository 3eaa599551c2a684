// Low-latency combine at the rank that holds rows: which of a token's it has, their sum, or each by itself. README.md
// beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/combine.cuh"

namespace deep_moe::kernels {

// One token as a rank knows it.
struct TokenInfo {
  std::int32_t owner, token, num_terms;
  std::uint64_t holders;  // ranks that send its sums to the owner
};

struct BlockMemory {
  CombineChunk chunk;
  TokenInfo* infos;      // [CombineChunk::kTokens]
  EntryBuffer& entries;  // of the warp
};

__device__ __forceinline__ PackedRows packed_rows(const LowLatencyRun& run, const LowLatencyCombineArgs& args) {
  return {args.expert_stride, args.row_stride, static_cast<std::int32_t>(run.call.max_tokens) * run.num_ranks()};
}

// What came with a row that this rank holds: the packed rows of its entries, and their weights, if they are known.
struct HeldWords {
  static constexpr int kPerLane = TokenIds::kPerLane;
  std::int32_t position[kPerLane];
  float weight[kPerLane];

  __device__ __forceinline__ HeldWords(const LowLatencyRun& run, const LowLatencyCombineArgs& args, int owner,
                                       std::int64_t token) {
    const int topk = args.ids.topk;
    const std::int32_t* positions = args.recv_pos + (owner * (run.call.max_tokens + 1) + token) * topk;
    const float* weights = nullptr;
    if (!args.by_expert && args.recv_weights != nullptr)
      weights = args.recv_weights + (owner * run.call.max_tokens + token) * topk;
    else if (!args.by_expert && owner == run.rank())
      weights = args.topk_weights + token * args.weight_stride;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int k = lane_id() + 32 * i;
      position[i] = k < topk ? positions[k] : -1;
      weight[i] = k < topk && weights != nullptr ? weights[k] : 0.0f;
    }
  }
  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, position[0] >= 0 || position[1] >= 0); }
};

// Weights that their owner sends ahead.
__device__ __forceinline__ bool await_weights(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                              int owner, std::int64_t token, EntryBuffer& entries) {
  bool ok = true;
  if (lane_id() < params.slot.num_weight_units) {
    uint4 unit = no_unit(run.tag);
    ok = await_unit(run.scope, layout::WaitPhase::kWeights, owner,
                    params.slot.weights(run.my_slot(), owner, token) + lane_id() * layout::kUnitBytes, &unit);
    float* weights = entries.weights + layout::kFloatsPerUnit * lane_id();
    weights[0] = __uint_as_float(unit.x), weights[1] = __uint_as_float(unit.y), weights[2] = __uint_as_float(unit.z);
  }
  return __all_sync(0xffffffffu, ok);
}

// H2. Terms of a token whose rows this rank holds, with their weights if those are needed here. The whole warp.
template <bool kByExpert>
__device__ __forceinline__ bool look_up_held(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                             HeldWords& words, int owner, std::int64_t token, EntryBuffer& entries,
                                             Term* terms, int* num_terms) {
  const LowLatencyCombineArgs& args = params.args;
  *num_terms = 0;
  if (!words.any()) return true;
#pragma unroll
  for (int i = 0; i < HeldWords::kPerLane; ++i) {
    entries.keys[lane_id() + 32 * i] = words.position[i];
    entries.weights[lane_id() + 32 * i] = words.weight[i];
  }
  __syncwarp();
  if (!kByExpert && args.recv_weights == nullptr && owner != run.rank()) {
    if (!await_weights(run, params, owner, token, entries)) return false;
#pragma unroll
    for (int i = 0; i < HeldWords::kPerLane; ++i) words.weight[i] = entries.weights[lane_id() + 32 * i];
  }
  const PackedRows rows = packed_rows(run, args);
  *num_terms = make_terms<true>(
      words.position, words.weight, entries, args.ids.topk, terms, [](std::int32_t) { return 0; },
      [&](std::int32_t position, int k) {
        // By expert a row is known to its owner by its first entry.
        return kByExpert ? static_cast<std::int64_t>(k) << 32 | position : rows.offset(position);
      });
  __syncwarp();
  return true;
}

// H3. A tile of a token's row, for its owner.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ void send_held_tile(const LowLatencyRun& run, const LowLatencyCombineParams& params,
                                               const TokenInfo& info, const Term* terms, const LaneTile<Width>& tile) {
  const layout::LowLatencyCombineSlot& slot = params.slot;
  char* to = run.slot_of(info.owner);
  if constexpr (kByExpert) {
    const PackedRows rows = packed_rows(run, params.args);
    constexpr int kBatch = LowLatencyTuning::kRowsInFlight;
#pragma unroll 1
    for (int first = 0; first < info.num_terms; first += kBatch) {
      LaneVectors<Width> vectors[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (first + n >= info.num_terms) continue;
        const std::int32_t position = static_cast<std::int32_t>(terms[first + n].at);
        const char* row = static_cast<const char*>(params.args.x) + rows.offset(position);
        if (params.x_alignment == 16)
          load_vectors(row, tile, &vectors[n]);
        else
          load_vectors(row, tile, params.x_alignment, &vectors[n]);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (first + n >= info.num_terms) continue;
        const int k = static_cast<int>(terms[first + n].at >> 32);
        tile.store_units(slot.expert_row(to, info.token, k), to_units(vectors[n], run.tag));
      }
    }
  } else {
    const LaneVectors<Width> sum = sum_local_rows<T, Width>(params, terms, info.num_terms, tile);
    tile.store_units(slot.reduced_row(to, run.rank(), info.token), to_units(sum, run.tag));
  }
}

// Tokens of all owners but perhaps this rank, in order.
struct HeldTokens {
  const int* num_tokens;  // [R], in shared memory; null: `each` of every owner
  int each, num_ranks;
  int without;  // this rank, or -1
  __device__ int total() const {
    if (num_tokens == nullptr) return each * (num_ranks - (without >= 0 ? 1 : 0));
    int sum = 0;
#pragma unroll 1
    for (int owner = 0; owner < num_ranks; ++owner) sum += owner == without ? 0 : num_tokens[owner];
    return sum;
  }
  __device__ void find(int i, int* owner, int* token) const {
    int at = 0;
    for (;; ++at) {
      if (at == without) continue;
      const int here = num_tokens == nullptr ? each : num_tokens[at];
      if (i < here) break;
      i -= here;
    }
    *owner = at, *token = i;
  }
};

// The first half: this block's share of the tiles of tokens whose rows this rank holds. False: leave.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ bool send_held(LowLatencyRun& run, const LowLatencyCombineParams& params,
                                          const BlockMemory& memory) {
  __shared__ int num_tokens[layout::kMaxKernelRanks];
  const LowLatencyCombineArgs& args = params.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, warps = static_cast<int>(blockDim.x / 32);
  const int num_parts = params.num_parts, topk = args.ids.topk;
  if (thread < run.num_ranks())
    num_tokens[thread] = args.recv_pos[(thread * (run.call.max_tokens + 1) + run.call.max_tokens) * topk];
  const int guess = static_cast<int>(args.ids.num_tokens);
  HeldTokens held{nullptr, guess, run.num_ranks(), run.is_whole() ? run.rank() : -1};
  TaskRange tasks(held.total() * num_parts, run.num_carriers(), static_cast<int>(blockIdx.x));
  bool ok = !run.failed;
  const auto end_token = [&] { return tasks.begin < tasks.end ? (tasks.end - 1) / num_parts + 1 : 0; };
  const auto look_up = [&](int first) {  // this warp's token of the chunk
    if (first + warp >= end_token()) return;
    TokenInfo info{};
    held.find(first + warp, &info.owner, &info.token);
    HeldWords words(run, args, info.owner, info.token);
    ok = ok && look_up_held<kByExpert>(run, params, words, info.owner, info.token, memory.entries,
                                       memory.chunk.terms + warp * topk, &info.num_terms);
    if (lane_id() == 0) memory.infos[warp] = info;
  };
  // Guesses that all owners have as many tokens as this rank, and looks the first ones up before it is known.
  const bool may_guess = kByExpert || args.recv_weights != nullptr;
  bool guessing = true;
  int first = tasks.begin / num_parts;
#pragma unroll 1
  while (guessing || first < end_token()) {
    if (!guessing || may_guess) look_up(first);
    ok = await_slot(run) && ok;
    if (!__syncthreads_and(ok)) return false;
    if (guessing) {
      guessing = false;
      bool right = may_guess;
      for (int owner = 0; owner < run.num_ranks(); ++owner)
        right = right && (owner == held.without || num_tokens[owner] == guess);
      if (!right) {
        held.num_tokens = num_tokens;
        tasks = TaskRange(held.total() * num_parts, run.num_carriers(), static_cast<int>(blockIdx.x));
        first = tasks.begin / num_parts;
        continue;
      }
      if (first >= end_token()) break;
    }
    const int begin = max(tasks.begin, first * num_parts), end = min(tasks.end, (first + warps) * num_parts);
#pragma unroll 1
    for (int at = begin + warp; at < end; at += warps) {
      const int i = at / num_parts - first;
      const TokenInfo info = memory.infos[i];
      if (info.num_terms > 0)
        send_held_tile<T, Width, kByExpert>(run, params, info, memory.chunk.terms + i * topk,
                                            LaneTile<Width>(params.row_bytes, at % num_parts));
    }
    __syncthreads();
    first += warps;
  }
  return ok;
}

// W1. This rank's weights to the holders of its rows, ahead of everything else; and what the second half will need.
__device__ __forceinline__ bool send_weights(LowLatencyRun& run, const LowLatencyCombineParams& params) {
  const LowLatencyCombineArgs& args = params.args;
  const bool ahead = !args.by_expert && args.recv_weights == nullptr;
  if (run.is_whole() && !ahead) return true;
  const layout::ExpertBlocks experts(run.call.num_experts, run.num_ranks());
  const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
  const int topk = args.ids.topk;
#pragma unroll 1
  for (std::int64_t token = warp * run.num_carriers() + static_cast<int>(blockIdx.x); token < args.ids.num_tokens;
       token += run.num_carriers() * warps) {
    const float* weights = args.topk_weights + token * args.weight_stride;
    const TokenIds ids(RawIds(args.ids, token), run.call.num_experts);
    if (!run.is_whole()) {
#pragma unroll
      for (int i = 0; i < TokenIds::kPerLane; ++i) {
        const int k = lane_id() + 32 * i;
        if (k >= topk) continue;
        args.kept_ids[token * topk + k] = ids.id[i];
        args.kept_weights[token * topk + k] = weights[k];
      }
    }
    if (!ahead) continue;
    std::uint64_t ranks = ids.ranks(experts) & ~(std::uint64_t{1} << run.rank());
    uint4 unit = make_uint4(0, 0, 0, run.tag);
    if (!await_slot(run)) return false;
#pragma unroll 1
    for (int u = lane_id(); u < params.slot.num_weight_units; u += 32) {
      std::uint32_t words[3];
#pragma unroll
      for (int w = 0; w < 3; ++w) {
        const int k = layout::kFloatsPerUnit * u + w;
        words[w] = k < topk ? __float_as_uint(weights[k]) : 0;
      }
      unit = make_uint4(words[0], words[1], words[2], run.tag);
      for_each_rank(ranks, [&](int holder) {
        ptx::st_relaxed_sys_16(params.slot.weights(run.slot_of(holder), run.rank(), token) + u * layout::kUnitBytes,
                               unit);
      });
    }
  }
  return true;
}

}  // namespace deep_moe::kernels
