// Low-latency dispatch between nodes: rows into the messages to all ranks (P2), and out of those that have come into
// packed blocks (P4). README.md beside this file has the words and the order among them.
#pragma once

#include <cstdint>

#include "kernels/internode/direct_call.cuh"
#include "kernels/low_latency/dispatch_receive.cuh"

namespace deep_moe::kernels::internode {

// Rows go by whole tiles, of calls of any kind.
using DirectWidth = General;

struct DirectDispatchParams {
  LowLatencyDispatchParams rows;  // as far as there are no units in it
  layout::DirectMessage message;
  DirectTeams teams;
  int chunk = 32;              // tokens that a block looks at together, a multiple of 32
  std::int64_t part_room = 0;  // rows that fit a part
};

// Tokens that go to one rank, chunk by chunk, in shared memory.
class DirectRows {
 public:
  __device__ DirectRows(char* base, const DirectDispatchParams& params, const LowLatencyRun& run, int dst)
      : params_(params),
        num_experts_(run.call.num_experts),
        first_expert_(layout::ExpertBlocks(num_experts_, run.num_ranks()).first_expert(dst)),
        num_local_(layout::ExpertBlocks(num_experts_, run.num_ranks()).num_local_experts(dst)),
        words_(params.chunk / 32),
        before_(reinterpret_cast<std::uint32_t*>(base)),
        bits_(before_ + num_local_),
        row_bits_(bits_ + num_local_ * words_),
        tokens_(row_bits_ + words_) {}
  static std::int64_t num_bytes(int num_local, int chunk) {
    return 4 * (num_local * (1 + std::int64_t{chunk / 32}) + chunk / 32 + chunk);
  }

  // All threads.
  __device__ __forceinline__ void clear() {
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < num_local_; e += static_cast<int>(blockDim.x)) before_[e] = 0;
    num_before_ = num_rows_ = 0;
  }
  // All threads. The tokens from `first` on; `first_rows` of the message, where the block writes it.
  __device__ __forceinline__ void find(std::int64_t first, std::int32_t* first_rows) {
    const TopkIds& ids = params_.rows.args.ids;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int count = static_cast<int>(min(std::int64_t{params_.chunk}, params_.rows.args.num_tokens - first));
    for (int i = thread; i < (num_local_ + 1) * words_; i += threads) bits_[i] = 0;
    __syncthreads();
    for (int i = thread; i < count * ids.topk; i += threads) {
      const int token = i / ids.topk, k = i - token * ids.topk;
      const int local = checked_id(raw_id(ids, first + token, k), num_experts_) - first_expert_;
      if (local < 0 || local >= num_local_) continue;
      const std::uint32_t bit = 1u << token % 32;
      atomicOr(&bits_[local * words_ + token / 32], bit);
      atomicOr(&row_bits_[token / 32], bit);
    }
    __syncthreads();
    num_rows_ = count_bits(row_bits_, 32 * words_);
    for (int token = thread; token < count; token += threads) {
      const bool goes = (row_bits_[token / 32] >> token % 32 & 1) != 0;
      const int row = count_bits(row_bits_, token);
      if (goes) tokens_[row] = static_cast<std::uint32_t>(token);
      if (first_rows != nullptr) first_rows[first + token] = goes ? num_before_ + row : -1;
    }
    first_ = first;
    __syncthreads();
  }
  // All threads, when the chunk's rows have been sent.
  __device__ __forceinline__ void advance() {
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < num_local_; e += static_cast<int>(blockDim.x))
      before_[e] += static_cast<std::uint32_t>(count_bits(bits_ + e * words_, 32 * words_));
    num_before_ += num_rows_;
    __syncthreads();
  }

  __device__ int num_before() const { return num_before_; }  // rows of earlier chunks
  __device__ int num_rows() const { return num_rows_; }      // of this one
  __device__ int token(int row) const { return static_cast<int>(first_ + tokens_[row]); }
  __device__ int num_local() const { return num_local_; }
  // Of the tokens in front of the chunk.
  __device__ std::uint32_t count(int local) const { return before_[local]; }
  // An entry as it travels: `id` has a row for this rank and none of the same token is in front of it.
  __device__ __forceinline__ std::uint32_t entry(int row, std::int32_t id) const {
    const int local = id - first_expert_;
    if (id < 0 || local < 0 || local >= num_local_) return layout::kNoExpert;
    return encoded(id, before_[local] + static_cast<std::uint32_t>(
                                            count_bits(bits_ + local * words_, static_cast<int>(tokens_[row]))));
  }

 private:
  // Of the first so many.
  __device__ __forceinline__ static int count_bits(const std::uint32_t* bits, int end) {
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < end / 32; ++i) sum += __popc(bits[i]);
    return end % 32 == 0 ? sum : sum + __popc(bits[end / 32] & ((1u << end % 32) - 1));
  }

  const DirectDispatchParams& params_;
  const int num_experts_, first_expert_, num_local_, words_;
  std::uint32_t *before_, *bits_, *row_bits_, *tokens_;
  std::int64_t first_ = 0;
  int num_before_ = 0, num_rows_ = 0;
};

// P2. One task of a row: a tile of it, or of the scales that it brings along. The whole warp.
template <class Rows>
__device__ __forceinline__ void write_tile(const DirectDispatchParams& params, std::int64_t token, int part, char* row,
                                           TileBuffer* buffer) {
  const LowLatencyDispatchParams& base = params.rows;
  if constexpr (!kCasts<Rows>) {
    if (part >= base.num_parts) {
      const ScaleRows& scales = base.args.scales;
      const ScaleTile items(scales, part - base.num_parts);
      gather_scales(scales, token, items, *buffer);
      char* to = row + params.message.scales + items.first * scales.item_bytes;
      for (int i = lane_id(); 16 * i < items.count * scales.item_bytes; i += 32)
        ptx::st_weak_16(to + 16 * i, reinterpret_cast<const uint4*>(buffer->bytes)[i]);
      __syncwarp();
      return;
    }
  }
  const LaneTile<DirectWidth> tile(base.num_vectors, part);
  TileInput<Rows, DirectWidth> input;
  LaneVectors<DirectWidth> vectors;
  std::uint32_t scale = 0;
  input.load(base, static_cast<int>(token), tile);
  input.finish(base, &vectors, &scale);
  tile.store_vectors(row, vectors);
  if (kCasts<Rows> && tile.has_scale())
    reinterpret_cast<std::uint32_t*>(row + params.message.scales)[tile.scale_block()] = scale;
}

// P2. What a row says besides. The whole warp.
__device__ __forceinline__ void write_words(const DirectDispatchParams& params, const DirectRows& rows, int row,
                                            char* to) {
  const LowLatencyDispatchArgs& args = params.rows.args;
  const std::int64_t token = rows.token(row);
#pragma unroll 1
  for (int half = 0; half < num_halves<false>(args.ids.topk); ++half) {
    const int k = entry_of_lane(half);
    const std::int32_t id = checked_id(raw_id(args.ids, token, k), args.call.num_experts);
    const bool repeated = is_repeated(args.ids, token, half, id);
    const float weight = args.with_weights
                             ? merged_weight(args.ids, token, half, id, args.topk_weights + token * args.weight_stride)
                             : 0.0f;
    if (k >= args.ids.topk) continue;
    reinterpret_cast<std::uint32_t*>(to + params.message.entries)[k] =
        repeated ? layout::kNoExpert : rows.entry(row, id);
    if (args.with_weights) reinterpret_cast<float*>(to + params.message.weights)[k] = weight;
  }
  if (lane_id() == 0) *reinterpret_cast<std::int32_t*>(to + params.message.token) = static_cast<std::int32_t>(token);
}

// P1 to P3 for one rank. All threads. False: leave.
template <class Rows, class Network>
__device__ __forceinline__ bool send_message(const DirectRun<Network>& direct, const DirectDispatchParams& params,
                                             char* memory, TileBuffer* buffer, int dst) {
  const int member = params.teams.member(), warp = static_cast<int>(threadIdx.x / 32);
  if (!await_slot(direct, dst)) return false;
  const LowLatencyDispatchArgs& args = params.rows.args;
  char* const message = direct.outgoing(dst);
  auto* const first_rows = reinterpret_cast<std::int32_t*>(message + params.message.first_rows);
  DirectRows rows(memory, params, direct.run, dst);
  rows.clear();
#pragma unroll 1
  for (std::int64_t first = 0; first < args.num_tokens; first += params.chunk) {
    rows.find(first, member == 0 ? first_rows : nullptr);
#pragma unroll 1
    for (int task = member * kDirectWarps + warp; task < rows.num_rows() * params.rows.num_row_tasks;
         task += params.teams.size * kDirectWarps) {
      const int row = task / params.rows.num_row_tasks, part = task - row * params.rows.num_row_tasks;
      char* to = message + params.message.rows + (rows.num_before() + row) * params.message.row_stride;
      write_tile<Rows>(params, rows.token(row), part, to, buffer);
      if (part == 0) write_words(params, rows, row, to);
    }
    rows.advance();
  }
  if (member == 0) {
    auto* const counts = reinterpret_cast<std::uint32_t*>(message + params.message.counts);
    for (int e = static_cast<int>(threadIdx.x); e < rows.num_local(); e += static_cast<int>(blockDim.x))
      counts[e] = rows.count(e);
    if (threadIdx.x == 0)
      fill_header(direct.run, message, args.num_tokens, static_cast<std::uint32_t>(rows.num_before()));
  }
  if (is_last_of(direct, direct.places().filled(dst), params.teams.size))
    direct.send(dst, params.message.bytes(rows.num_before()));
  return true;
}

// What has come, in shared memory.
struct DirectSources {
  DirectShared direct;
  kernels::DispatchShared unused;  // by what Receiver refers to
  std::uint32_t num_tokens[layout::kMaxKernelRanks];
  std::uint32_t rows_before[layout::kMaxKernelRanks + 1], tokens_before[layout::kMaxKernelRanks + 1];
};

// P4. All messages, and what they count, into shared memory. All threads. False in all of them: leave.
template <class Network>
__device__ __forceinline__ bool await_sources(const DirectRun<Network>& direct, const DirectDispatchParams& params,
                                              const ExpertCounts& counts, DirectSources& sources, int num_local,
                                              bool* ok) {
  const LowLatencyRun& run = direct.run;
  const int thread = static_cast<int>(threadIdx.x), num_ranks = run.num_ranks();
  if (thread < num_ranks) {
    std::uint32_t tokens, rows;
    *ok = await_message(direct, thread, &tokens, &rows);
    sources.num_tokens[thread] = tokens;
    sources.rows_before[thread + 1] = min(rows, static_cast<std::uint32_t>(params.part_room));
  }
  if (!__syncthreads_and(*ok)) return false;
  if (thread == 0) {
    std::uint32_t rows = 0, tokens = 0;
    for (int src = 0; src < num_ranks; ++src) {
      sources.rows_before[src] = rows, sources.tokens_before[src] = tokens;
      rows += sources.rows_before[src + 1], tokens += sources.num_tokens[src];
    }
    sources.rows_before[num_ranks] = rows, sources.tokens_before[num_ranks] = tokens;
  }
  for (int i = thread; i < num_ranks * num_local; i += static_cast<int>(blockDim.x)) {
    const int src = i / num_local, local = i - src * num_local;
    const auto* said = reinterpret_cast<const std::uint32_t*>(direct.incoming(src) + params.message.counts);
    counts.here(src, local) = sources.num_tokens[src] == 0 ? 0 : min(said[local], sources.num_tokens[src]);
  }
  __syncthreads();
  return true;
}
// Whose of `before` a number is; they grow from call to call of a thread.
__device__ __forceinline__ int source_of(const std::uint32_t* before, std::uint32_t number, int from) {
  while (before[from + 1] <= number) ++from;
  return from;
}

// R3, R4. One task of a row that has come. The whole warp.
template <class Rows>
__device__ __forceinline__ void place_tile(const Receiver& at, const DirectDispatchParams& params, const char* row,
                                           int src, std::uint32_t num_tokens, int part, TileBuffer* buffer) {
  const std::int32_t token = *reinterpret_cast<const std::int32_t*>(row + params.message.token);
  if (token < 0 || token >= static_cast<std::int32_t>(num_tokens)) return;
  const int topk = params.rows.args.ids.topk;
  PlacedPart<Rows, DirectWidth>{at, buffer, src, token, part}.place(
      [&](int half, int* expert, std::uint32_t* before) {
        if (entry_of_lane(half) >= topk) return true;
        const std::uint32_t entry =
            reinterpret_cast<const std::uint32_t*>(row + params.message.entries)[entry_of_lane(half)];
        *expert = static_cast<int>(entry & layout::kNoExpert);
        *before = entry >> layout::kExpertBits;
        return true;
      },
      [&](int half, float* weight) {
        if (entry_of_lane(half) < topk)
          *weight = reinterpret_cast<const float*>(row + params.message.weights)[entry_of_lane(half)];
        return true;
      },
      [&](const LaneTile<DirectWidth>& tile, LaneVectors<DirectWidth>* vectors, std::uint32_t* scale) {
#pragma unroll
        for (int j = 0; j < DirectWidth::kVectors; ++j)
          if (tile.has_vector(j)) vectors->v[j] = ptx::ld_weak_16(row + tile.vector_offset(j));
        if (kCasts<Rows> && tile.has_scale())
          *scale = reinterpret_cast<const std::uint32_t*>(row + params.message.scales)[tile.scale_block()];
        return true;
      },
      [&] {
        const ScaleRows& scales = params.rows.args.scales;
        const ScaleTile items(scales, part - params.rows.num_parts);
        const char* from = row + params.message.scales + items.first * scales.item_bytes;
        for (int i = lane_id(); 16 * i < items.count * scales.item_bytes; i += 32)
          reinterpret_cast<uint4*>(buffer->bytes)[i] = ptx::ld_weak_16(from + 16 * i);
        __syncwarp();
        return true;
      });
}

// Tokens of which no row has come have no place, and how many tokens each source has; the threads of all blocks.
template <class Network>
__device__ __forceinline__ void write_places(const DirectRun<Network>& direct, const DirectDispatchParams& params,
                                             const DirectSources& sources) {
  const LowLatencyDispatchArgs& args = params.rows.args;
  const int num_ranks = direct.run.num_ranks(), topk = args.ids.topk;
  const auto place = [&](int src, std::int64_t token) {
    return args.recv_pos + (src * (args.call.max_tokens + 1) + token) * topk;
  };
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < num_ranks)
    *place(static_cast<int>(threadIdx.x), args.call.max_tokens) =
        static_cast<std::int32_t>(sources.num_tokens[threadIdx.x]);
  int src = 0;
#pragma unroll 1
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < sources.tokens_before[num_ranks];
       i += gridDim.x * blockDim.x) {
    src = source_of(sources.tokens_before, i, src);
    const std::int64_t token = i - sources.tokens_before[src];
    if (reinterpret_cast<const std::int32_t*>(direct.incoming(src) + params.message.first_rows)[token] >= 0) continue;
#pragma unroll 1
    for (int k = 0; k < topk; ++k) place(src, token)[k] = -1;
  }
}

}  // namespace deep_moe::kernels::internode
