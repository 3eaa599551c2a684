// Low-latency combine between nodes: sums, or rows by expert, into the messages to the owners of the tokens (P2), and
// the owner's sums of what has come (P4). README.md beside this file has the words and the order among them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/internode/direct_call.cuh"
#include "kernels/low_latency/combine_logfmt.cuh"

namespace deep_moe::kernels::internode {

struct DirectCombineParams {
  LowLatencyCombineParams rows;  // as far as there are no units in it
  layout::DirectMessage message;
  DirectTeams teams;
  std::int64_t part_room = 0;     // rows that fit a part
  bool by_expert = false;         // how rows travel
  bool rounds_by_holder = false;  // by expert: the owner rounds the sum of each holder's rows, as that would have done
};

inline constexpr int kDirectRowsInFlight = DirectTuning::kRowsInFlight;

// How a combine's rows travel: as they are, or as logarithms.
template <typename T>
using DirectLogfmt = Logfmt<T, false>;

// What a lane has of a row, in a message.
__device__ __forceinline__ void store_coded(const LaneTile<General>& tile, const LaneVectors<General>& coded,
                                            char* row) {
  tile.store_vectors(row, coded);
}
__device__ __forceinline__ void load_coded(const LaneTile<General>& tile, const char* row,
                                           LaneVectors<General>* coded) {
#pragma unroll
  for (int j = 0; j < General::kVectors; ++j)
    if (tile.has_vector(j)) coded->v[j] = ptx::ld_weak_16(row + tile.vector_offset(j));
}

// A block of logarithms: the two words of each lane, the half words, the smallest and the spacing.
struct DirectLogfmtBlock {
  std::uint64_t words[kLogfmtLanes];
  std::uint16_t halves[kLogfmtLanes];
  float least, step;
};
static_assert(sizeof(DirectLogfmtBlock) == kLogfmtBlockBytes);

template <typename T>
__device__ __forceinline__ void store_coded(const LaneTile<DirectLogfmt<T>>& tile, const LogfmtCodes& coded,
                                            char* row) {
  if (!tile.has_any) return;
  auto& block = reinterpret_cast<DirectLogfmtBlock*>(row)[tile.group / kLogfmtLanes];
  const int lane = tile.group % kLogfmtLanes;
  block.words[lane] = coded.word[0] | std::uint64_t{coded.word[1]} << 32;
  block.halves[lane] = static_cast<std::uint16_t>(coded.half);
  if (lane == 0) block.least = coded.least, block.step = coded.step;
}
template <typename T>
__device__ __forceinline__ void load_coded(const LaneTile<DirectLogfmt<T>>& tile, const char* row, LogfmtCodes* coded) {
  *coded = {};
  if (!tile.has_any) return;
  const auto& block = reinterpret_cast<const DirectLogfmtBlock*>(row)[tile.group / kLogfmtLanes];
  const int lane = tile.group % kLogfmtLanes;
  const std::uint64_t words = block.words[lane];
  coded->word[0] = static_cast<std::uint32_t>(words), coded->word[1] = static_cast<std::uint32_t>(words >> 32);
  coded->half = block.halves[lane];
  coded->least = block.least, coded->step = block.step;
}

// Tokens of one owner that have rows here, chunk by chunk: one a thread.
struct DirectHeld {
  DirectShared direct;
  int num_tokens;  // of the owner
  std::uint32_t warp_tokens[kDirectWarps], warp_rows[kDirectWarps];
  std::uint16_t token[kDirectThreads];  // in the chunk, of those that have rows
  std::uint32_t first_row[kDirectThreads];
  std::uint32_t num_found, num_rows;  // of the chunk
};

// All threads. Tokens from `first` on; `rows_before`: of earlier chunks; `first_rows` of the message, where the block
// writes it.
__device__ __forceinline__ void find_held(const DirectCombineParams& params, DirectHeld& held, int owner,
                                          std::int64_t first, std::uint32_t rows_before, std::int32_t* first_rows) {
  const LowLatencyCombineArgs& args = params.rows.args;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, topk = args.ids.topk;
  const std::int64_t token = first + thread;
  std::uint32_t rows = 0;
  if (token < held.num_tokens) {
    const std::int32_t* positions = args.recv_pos + (owner * (args.call.max_tokens + 1) + token) * topk;
#pragma unroll 4
    for (int k = 0; k < topk; ++k) rows += ptx::ld_relaxed_gpu(positions + k) >= 0 ? 1 : 0;
  }
  const bool found = rows > 0;
  if (found && !params.by_expert) rows = 1;
  const std::uint32_t tokens = __ballot_sync(0xffffffffu, found);
  std::uint32_t sum = rows;  // inclusive
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_sync(0xffffffffu, sum, lane_id() >= step ? lane_id() - step : lane_id());
    if (lane_id() >= step) sum += other;
  }
  __syncthreads();
  if (lane_id() == 31) held.warp_tokens[warp] = static_cast<std::uint32_t>(__popc(tokens)), held.warp_rows[warp] = sum;
  __syncthreads();
  std::uint32_t at = 0, row = 0;
  for (int i = 0; i < warp; ++i) at += held.warp_tokens[i], row += held.warp_rows[i];
  at += static_cast<std::uint32_t>(__popc(tokens & ((1u << lane_id()) - 1)));
  row += rows_before + sum - rows;
  if (found) held.token[at] = static_cast<std::uint16_t>(thread), held.first_row[at] = row;
  if (first_rows != nullptr && token < held.num_tokens) first_rows[token] = found ? static_cast<std::int32_t>(row) : -1;
  if (thread == kDirectThreads - 1) held.num_found = at + (found ? 1 : 0), held.num_rows = row + rows - rows_before;
  __syncthreads();
}

// P2. A tile of the rows of one token. The whole warp.
template <typename T, class Width, bool kByExpert>
__device__ __forceinline__ void write_held(const LowLatencyRun& run, const DirectCombineParams& params, int owner,
                                           std::int64_t token, int part, char* row) {
  const LowLatencyCombineParams& base = params.rows;
  const LaneTile<Width> tile(base.num_vectors, part);
  LaneSums<T, Width> sums;
#pragma unroll 1
  for (int half = 0; half < num_halves<false>(base.args.ids.topk); ++half) {
    TokenWords<LowLatencyHalf::kSend, kByExpert> words;
    words.load(base.args, owner, static_cast<int>(token), half);
#pragma unroll 1
    for (std::uint32_t rest = words.rows(); rest != 0;) {
      LaneVectors<Width> vectors[kDirectRowsInFlight];
      std::uint32_t some = rest;
#pragma unroll
      for (int n = 0; n < kDirectRowsInFlight; ++n) {
        const std::int32_t position = __shfl_sync(0xffffffffu, words.position, some != 0 ? first_of(some) : 0);
        if (some != 0) load_packed(base, position, run.num_ranks(), tile, &vectors[n]);
        some &= some - 1;
      }
#pragma unroll
      for (int n = 0; n < kDirectRowsInFlight; ++n) {
        const float weight = __shfl_sync(0xffffffffu, words.weight, rest != 0 ? first_of(rest) : 0);
        if (rest == 0) continue;
        rest &= rest - 1;
        if constexpr (kByExpert) {
          store_coded(tile, Wire<T, Width>::coded(vectors[n]), row);
          row += params.message.row_stride;
        } else {
          sums.add(weight, vectors[n]);
        }
      }
    }
  }
  if constexpr (!kByExpert) store_coded(tile, Wire<T, Width>::coded(sums.rounded()), row);
}

// P1 to P3 for one owner. All threads. False: leave.
template <typename T, class Width, bool kByExpert, class Network>
__device__ __forceinline__ bool send_sums(const DirectRun<Network>& direct, const DirectCombineParams& params,
                                          DirectHeld& held, int owner) {
  const int member = params.teams.member(), warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x == 0) held.num_tokens = num_tokens_of(direct.run, params.rows.args, owner);
  if (!await_slot(direct, owner)) return false;
  char* const message = direct.outgoing(owner);
  auto* const first_rows = reinterpret_cast<std::int32_t*>(message + params.message.first_rows);
  std::uint32_t rows = 0;
#pragma unroll 1
  for (std::int64_t first = 0; first < held.num_tokens; first += kDirectThreads) {
    find_held(params, held, owner, first, rows, member == 0 ? first_rows : nullptr);
    const int tasks = static_cast<int>(held.num_found) * params.rows.num_parts;
#pragma unroll 1
    for (int task = member * kDirectWarps + warp; task < tasks; task += params.teams.size * kDirectWarps) {
      const int item = task / params.rows.num_parts, part = task - item * params.rows.num_parts;
      write_held<T, Width, kByExpert>(
          direct.run, params, owner, first + held.token[item], part,
          message + params.message.rows + std::size_t{held.first_row[item]} * params.message.row_stride);
    }
    rows += held.num_rows;
    __syncthreads();
  }
  if (member == 0 && threadIdx.x == 0) fill_header(direct.run, message, params.rows.args.ids.num_tokens, rows);
  if (is_last_of(direct, direct.places().filled(owner), params.teams.size))
    direct.send(owner, params.message.bytes(rows));
  return true;
}

// What the second half needs of this rank's tokens: the ids of entries that have a row, and the weights, those of equal
// entries summed. The warps of all blocks.
__device__ __forceinline__ void keep_entries(const LowLatencyRun& run, const DirectCombineParams& params) {
  const LowLatencyCombineArgs& args = params.rows.args;
  const int topk = args.ids.topk;
#pragma unroll 1
  for (std::int64_t token = threadIdx.x / 32 * gridDim.x + blockIdx.x; token < args.ids.num_tokens;
       token += gridDim.x * kDirectWarps) {
#pragma unroll 1
    for (int half = 0; half < num_halves<false>(topk); ++half) {
      const int k = entry_of_lane(half);
      const std::int32_t id = checked_id(raw_id(args.ids, token, k), run.call.num_experts);
      const float weight = merged_weight(args.ids, token, half, id, args.topk_weights + token * args.weight_stride);
      const bool repeated = is_repeated(args.ids, token, half, id);
      if (k >= topk) continue;
      args.kept_ids[token * topk + k] = repeated ? -1 : id;
      args.kept_weights[token * topk + k] = weight;
    }
  }
}

// What has come, in shared memory.
struct DirectHolders {
  DirectShared direct;
  std::uint32_t num_rows[layout::kMaxKernelRanks];
};

// O2. A tile of one of this rank's tokens, from the rows of all holders in the order of ranks. The whole warp.
template <typename T, class Width, bool kByExpert, class Network>
__device__ __forceinline__ void sum_token(const DirectRun<Network>& direct, const DirectCombineParams& params,
                                          const DirectHolders& holders, std::int64_t token, int part) {
  const LowLatencyCombineArgs& args = params.rows.args;
  const int topk = args.ids.topk, halves = num_halves<false>(topk);
  const LaneTile<Width> tile(params.rows.num_vectors, part);
  const layout::DirectMessage& message = params.message;
  // By half: the holder of this lane's entry, -1: none; its row there.
  int holder[2] = {-1, -1};
  float weight[2] = {};
  const char* row[2] = {};
  std::uint64_t ranks = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = entry_of_lane(half);
    if (half >= halves || k >= topk) continue;
    const std::int32_t id = ptx::ld_relaxed_gpu(args.kept_ids + token * topk + k);
    if (kByExpert) weight[half] = ptx::ld_relaxed_gpu(args.kept_weights + token * topk + k);
    if (id < 0) continue;
    const int rank = params.rows.expert_ranks.rank_of(static_cast<std::uint32_t>(id));
    if (direct.run.is_live(rank)) holder[half] = rank, ranks |= std::uint64_t{1} << rank;
  }
  std::uint32_t before[2] = {};  // entries of the same holder in front
  if constexpr (kByExpert) {
    const std::uint32_t below = (1u << lane_id()) - 1;
    const std::uint32_t alike = __match_any_sync(0xffffffffu, holder[0]);
    before[0] = static_cast<std::uint32_t>(__popc(alike & below));
    if (halves > 1) {
      before[1] = static_cast<std::uint32_t>(__popc(__match_any_sync(0xffffffffu, holder[1]) & below));
#pragma unroll 1
      for (int lane = 0; lane < 32; ++lane) before[1] += __shfl_sync(0xffffffffu, holder[0], lane) == holder[1] ? 1 : 0;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (holder[half] < 0) continue;
    const char* from = direct.incoming(holder[half]);
    const std::int32_t first = holders.num_rows[holder[half]] == 0
                                   ? -1
                                   : reinterpret_cast<const std::int32_t*>(from + message.first_rows)[token];
    const std::uint32_t number = static_cast<std::uint32_t>(first) + before[half];
    if (first >= 0 && number < holders.num_rows[holder[half]])
      row[half] = from + message.rows + std::size_t{number} * message.row_stride;
  }
  ranks = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(ranks)) |
          std::uint64_t{__reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(ranks >> 32))} << 32;
  LaneSums<T, Width> sums;
  const auto add_rows = [&](int of_holder, LaneSums<T, Width>* to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
      std::uint32_t rest = __ballot_sync(0xffffffffu, holder[half] == of_holder && row[half] != nullptr);
      if (!kByExpert) rest &= ~(rest - 1);  // all have the same
#pragma unroll 1
      while (rest != 0) {
        std::remove_cvref_t<typename Wire<T, Width>::Coded> coded[kDirectRowsInFlight];
        std::uint32_t some = rest;
#pragma unroll
        for (int n = 0; n < kDirectRowsInFlight; ++n) {
          const auto from = reinterpret_cast<const char*>(
              __shfl_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(row[half]), some != 0 ? first_of(some) : 0));
          if (some != 0) load_coded(tile, from, &coded[n]);
          some &= some - 1;
        }
#pragma unroll
        for (int n = 0; n < kDirectRowsInFlight; ++n) {
          const float factor = __shfl_sync(0xffffffffu, weight[half], rest != 0 ? first_of(rest) : 0);
          if (rest == 0) continue;
          rest &= rest - 1;
          if constexpr (kByExpert)
            to->add(factor, Wire<T, Width>::kept(coded[n]));
          else
            to->add(Wire<T, Width>::kept(coded[n]));
        }
      }
      if (!kByExpert && __any_sync(0xffffffffu, holder[half] == of_holder)) break;
    }
  };
#pragma unroll 1
  for (; ranks != 0; ranks &= ranks - 1) {
    if (kByExpert && params.rounds_by_holder) {
      LaneSums<T, Width> of_holder;
      add_rows(first_of(ranks), &of_holder);
      sums.add(of_holder.rounded());
    } else {
      add_rows(first_of(ranks), &sums);
    }
  }
  char* out = static_cast<char*>(args.out) + token * args.out_stride;
  const LaneVectors<Width> result = sums.rounded();
  if (params.rows.out_alignment == 16) {
    tile.store_vectors(out, result);
  } else {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (tile.has_vector(j)) store_16_by_halves(out + tile.vector_offset(j), result.v[j]);
  }
}

}  // namespace deep_moe::kernels::internode
