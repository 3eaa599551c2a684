// Combine, as parts: which rows a token's sum takes, how they get here with the copy engine and without, the sum.
// README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/api.hpp"
#include "kernels/protocol/bytes.cuh"
#include "kernels/protocol/call.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tuning.hpp"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct CombineParams {
  CombineArgs args;
  std::int64_t row_bytes = 0;
  int chunk_bytes = 16;  // of a row, but for its last chunk
  int num_chunks = 1;
  int last_bytes = 16;  // of the last chunk
  int stage_shift = 2;  // a warp's ring holds 1 << stage_shift chunks; with the copy engine
  int out_alignment = 16;
  int bias_alignment[2] = {16, 16};

  DM_HOST_DEVICE std::int64_t chunk_begin(int chunk) const { return static_cast<std::int64_t>(chunk) * chunk_bytes; }
  DM_HOST_DEVICE int bytes_of(int chunk) const { return chunk + 1 < num_chunks ? chunk_bytes : last_bytes; }
};

// A rank that holds rows of this rank's tokens.
struct Holder {
  const char* x;
  const float* weights;
  std::int64_t first_row;  // of this rank's rows there
};

// The rows of one token, in rank order.
struct TokenRows {
  const char** rows;      // in shared memory, [R]
  const float** weights;  // in shared memory, [R]
  int count = 0;
};

// Dynamic shared memory. The same struct on both sides.
struct CombineShared {
  std::size_t barriers, holders, rows, total;

  DM_HOST_DEVICE CombineShared(bool tma, int num_warps, int num_ranks) {
    const std::size_t warps = static_cast<std::size_t>(num_warps), ranks = static_cast<std::size_t>(num_ranks);
    barriers = tma ? warps * CombineTuning::kRingBytes : 0;
    holders = barriers + (tma ? warps * CombineTuning::kMaxStages * sizeof(std::uint64_t) : 0);
    rows = holders + sizeof(Holder) * ranks;
    total = rows + sizeof(char*) * 4 * warps * ranks;  // of rows and of weights, for a token and the next
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
  holder->x = place_address(scope, args.segment_bases, peer, record.place);
  if (holder->x == nullptr || args.topk == 0) return holder->x != nullptr;
  holder->weights = reinterpret_cast<const float*>(place_address(scope, args.segment_bases, peer, record.weight_place));
  return holder->weights != nullptr;
}

// A token's positions, two ranks a lane.
struct TokenPositions {
  static constexpr int kPerLane = 2;
  static_assert(layout::kMaxKernelRanks <= 32 * kPerLane && layout::kMaxTopk <= 32 * kPerLane);
  std::int32_t position[kPerLane];

  __device__ TokenPositions(const CombineArgs& args, int num_ranks, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = threadIdx.x % 32 + 32 * i;
      position[i] =
          token < args.num_tokens && n < num_ranks ? args.send_position[token * num_ranks + n] : std::int32_t{-1};
    }
  }
  __device__ std::uint64_t mask() const {
    return __ballot_sync(0xffffffffu, position[0] >= 0) |
           static_cast<std::uint64_t>(__ballot_sync(0xffffffffu, position[1] >= 0)) << 32;
  }
};

// C3: the addresses of a token's rows, and of their weights. The whole warp.
__device__ __forceinline__ void list_rows(const CombineParams& params, const Holder* holders,
                                          const TokenPositions& words, TokenRows* list) {
  const int topk = params.args.topk;
  const std::uint64_t mask = words.mask();
#pragma unroll
  for (int i = 0; i < TokenPositions::kPerLane; ++i) {
    if (words.position[i] < 0) continue;
    const int rank = threadIdx.x % 32 + 32 * i, place = __popcll(mask & ((std::uint64_t{1} << rank) - 1));
    const std::int64_t row = holders[rank].first_row + words.position[i];
    list->rows[place] = holders[rank].x + row * params.row_bytes;
    if (topk > 0) list->weights[place] = holders[rank].weights + row * topk;
  }
  list->count = __popcll(mask);
  __syncwarp();
}

// C5: the sums of a token's weights, in rank order. Those of the first holders are loaded a token ahead. The whole
// warp.
class WeightSums {
 public:
  __device__ __forceinline__ void load(const TokenRows& list, int topk) {
    const int lane = threadIdx.x % 32;
    if (lane >= topk) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (i < list.count) ahead_[i] = list.weights[i][lane];
  }
  __device__ __forceinline__ void store(const TokenRows& list, const CombineArgs& args, std::int64_t token) const {
    float* out = args.combined_topk_weights + token * args.topk;
    for (int k = threadIdx.x % 32; k < args.topk; k += 32) {
      float sum = 0;
      int i = 0;
      if (k < 32) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (j < list.count) sum += ahead_[j];
        i = kBatch;
      }
      for (; i < list.count; ++i) sum += list.weights[i][k];
      out[k] = sum;
    }
  }

 private:
  static constexpr int kBatch = CombineTuning::kWeightsInFlight;
  float ahead_[kBatch] = {};
};

// 16 bytes as fp32 numbers, and back with one rounding.
template <typename T>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kSize = 4;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    sum[0] += __uint_as_float(bits.x), sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z), sum[3] += __uint_as_float(bits.w);
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
  }
};

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kSize = 8;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    union {
      uint4 bits;
      __nv_bfloat162 pairs[4];
    } out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    return out.bits;
  }
};

template <>
struct Vector<__half> {
  static constexpr int kSize = 8;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    union {
      uint4 bits;
      __half2 pairs[4];
    } in;
    in.bits = bits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(in.pairs[i]);
      sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;
    }
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    union {
      uint4 bits;
      __half2 pairs[4];
    } out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    return out.bits;
  }
};

// C4 without the copy engine: a token's sum by plain loads, kBatch vectors of a row before the next row. The whole
// warp.
template <typename T, int kBatch>
__device__ void sum_by_loads(const CombineParams& params, const TokenRows& list, std::int64_t token) {
  constexpr int kStep = 32 * 16;
  const CombineArgs& args = params.args;
  char* out = static_cast<char*>(args.out) + token * args.out_stride;
  for (std::int64_t first = (threadIdx.x % 32) * 16; first < params.row_bytes; first += kBatch * kStep) {
    float sums[kBatch][Vector<T>::kSize] = {};
    const auto add = [&](const char* row, int alignment) {
      uint4 vectors[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < params.row_bytes) vectors[v] = load_16(row + first + v * kStep, alignment);
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < params.row_bytes) Vector<T>::add(sums[v], vectors[v]);
    };
    for (int b = 0; b < 2; ++b) {
      if (args.bias[b] != nullptr)
        add(static_cast<const char*>(args.bias[b]) + token * args.bias_stride[b], params.bias_alignment[b]);
    }
    for (int i = 0; i < list.count; ++i) add(list.rows[i], 16);
#pragma unroll
    for (int v = 0; v < kBatch; ++v)
      if (first + v * kStep < params.row_bytes)
        store_16(out + first + v * kStep, Vector<T>::round(sums[v]), params.out_alignment);
  }
}

__device__ __noinline__ bool wait_longer(const WaitScope& scope, std::uint64_t* barrier, std::uint32_t parity) {
  std::uint64_t seen;
  return wait_until(
      scope, layout::WaitPhase::kRowLoad, scope.domain.rank, 1,
      [&] { return std::uint64_t{ptx::mbarrier_try_wait_acquire_cta(barrier, parity)}; },
      [](std::uint64_t complete) { return complete != 0; }, &seen);
}

// C4 with the copy engine: chunks of rows on their way into a warp's ring in shared memory, in the order token, chunk,
// holder. Each lane starts the load of one chunk; all wait for all.
class PullPipe {
 public:
  __device__ PullPipe(const WaitScope& scope, const CombineParams& params, char* ring, std::uint64_t* barriers)
      : scope_(scope),
        params_(params),
        ring_(ring),
        barriers_(barriers),
        num_stages_(1u << params.stage_shift),
        stage_bytes_(CombineTuning::kRingBytes >> params.stage_shift) {}

  // Whether the ring has room for a chunk of each of the token's rows; if not, they do not come this way.
  __device__ bool holds(const TokenRows& list) const { return list.count <= static_cast<int>(num_stages_); }

  // Loads as far ahead as the ring allows: the rest of `current`, then `next`. Puts it off while half of the ring is
  // loaded, and enough to go on with.
  __device__ void load_ahead(const TokenRows& current, const TokenRows& next) {
    const int lane = threadIdx.x % 32, num_loaded = static_cast<int>(loaded_ - used_);
    const int num_free = static_cast<int>(num_stages_) - num_loaded;
    if (num_free < static_cast<int>(num_stages_ / 2) && num_loaded >= max(current.count, next.count)) return;
    const int of_current = units_of(current), num = min(num_free, of_current + units_of(next) - ahead_);
    if (lane < num) {
      int unit = ahead_ + lane;
      const bool is_next = unit >= of_current;
      const int count = is_next ? next.count : current.count;
      const char* const* rows = is_next ? next.rows : current.rows;
      if (is_next) unit -= of_current;
      const int chunk = count <= 2 ? unit >> (count - 1) : unit / count, row = unit - chunk * count;
      const unsigned stage = (loaded_ + static_cast<unsigned>(lane)) & (num_stages_ - 1);
      const std::uint32_t bytes = static_cast<std::uint32_t>(params_.bytes_of(chunk));
      ptx::mbarrier_arrive_expect_tx(barriers_ + stage, bytes);
      ptx::bulk_load(ring_ + stage * stage_bytes_, rows[row] + params_.chunk_begin(chunk), bytes, barriers_ + stage);
    }
    loaded_ += static_cast<unsigned>(num), ahead_ += num;
    __syncwarp();
  }

  // Waits for the next `num` chunks in order. False: the block must leave.
  __device__ bool wait(int num) const {
    bool ok = true;
    for (int i = 0; i < num; ++i) {
      const unsigned unit = used_ + static_cast<unsigned>(i);
      std::uint64_t* barrier = barriers_ + (unit & (num_stages_ - 1));
      const std::uint32_t parity = unit >> params_.stage_shift & 1;
      if (!ptx::mbarrier_try_wait_acquire_cta(barrier, parity)) ok = wait_longer(scope_, barrier, parity) && ok;
    }
    return __all_sync(0xffffffffu, ok);
  }
  // The chunk that is `index` behind the next one in order.
  __device__ const char* chunk(int index) const {
    return ring_ + ((used_ + static_cast<unsigned>(index)) & (num_stages_ - 1)) * stage_bytes_;
  }
  // All lanes are through with the next `num`.
  __device__ void release(int num) {
    __syncwarp();
    used_ += static_cast<unsigned>(num);
  }
  // What was next is current.
  __device__ void advance(const TokenRows& current) { ahead_ -= units_of(current); }

 private:
  __device__ int units_of(const TokenRows& list) const { return holds(list) ? list.count * params_.num_chunks : 0; }

  const WaitScope& scope_;
  const CombineParams& params_;
  char* ring_;
  std::uint64_t* barriers_;
  unsigned num_stages_;
  int stage_bytes_;
  unsigned loaded_ = 0, used_ = 0;  // chunks
  int ahead_ = 0;                   // chunks loaded, from the first of the current token
};

// C4: sums one chunk of a token whose parts are in the ring, and stores it.
template <typename T>
__device__ __forceinline__ void sum_chunk(const CombineParams& params, const PullPipe& pipe, const TokenRows& list,
                                          std::int64_t token, int chunk) {
  constexpr int kBatch = 2, kStep = 32 * 16;  // vectors a lane sums at the same time
  const CombineArgs& args = params.args;
  const int bytes = params.bytes_of(chunk);
  const std::int64_t begin = params.chunk_begin(chunk);
  char* out = static_cast<char*>(args.out) + token * args.out_stride + begin;
  for (int first = 16 * static_cast<int>(threadIdx.x % 32); first < bytes; first += kBatch * kStep) {
    float sums[kBatch][Vector<T>::kSize] = {};
    const auto add = [&](auto load) {
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        if (first + v * kStep < bytes) Vector<T>::add(sums[v], load(first + v * kStep));
    };
    for (int b = 0; b < 2; ++b) {
      if (args.bias[b] == nullptr) continue;
      const char* bias = static_cast<const char*>(args.bias[b]) + token * args.bias_stride[b] + begin;
      add([&](int offset) { return ptx::ld_weak_16(bias + offset); });
    }
    for (int i = 0; i < list.count; ++i) {
      const char* row = pipe.chunk(i);
      add([&](int offset) { return *reinterpret_cast<const uint4*>(row + offset); });
    }
#pragma unroll
    for (int v = 0; v < kBatch; ++v)
      if (first + v * kStep < bytes) ptx::st_weak_16(out + first + v * kStep, Vector<T>::round(sums[v]));
  }
}

// The same for the case of two ranks: a chunk of full length, two rows, no bias.
template <typename T>
__device__ __forceinline__ void sum_full_pair(const CombineParams& params, const PullPipe& pipe, std::int64_t token,
                                              int chunk) {
  constexpr int kVectors = CombineTuning::kVectors, kBatch = 4, kStep = 32 * 16;
  const int first = 16 * static_cast<int>(threadIdx.x % 32);
  const char* rows[2] = {pipe.chunk(0) + first, pipe.chunk(1) + first};
  char* out = static_cast<char*>(params.args.out) + token * params.args.out_stride + params.chunk_begin(chunk) + first;
#pragma unroll
  for (int v = 0; v < kVectors; v += kBatch) {
    uint4 vectors[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch && v + i < kVectors; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) vectors[i][row] = *reinterpret_cast<const uint4*>(rows[row] + (v + i) * kStep);
    }
#pragma unroll
    for (int i = 0; i < kBatch && v + i < kVectors; ++i) {
      float sums[Vector<T>::kSize] = {};
      Vector<T>::add(sums, vectors[i][0]);
      Vector<T>::add(sums, vectors[i][1]);
      ptx::st_weak_16(out + (v + i) * kStep, Vector<T>::round(sums));
    }
  }
}

}  // namespace deep_moe::kernels
