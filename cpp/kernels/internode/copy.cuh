// How a warp takes a row from memory to several places: through shared memory by the copy engine, or through registers.
#pragma once

#include <cstdint>

#include "kernels/internode/ring.cuh"
#include "kernels/internode/tuning.hpp"
#include "kernels/protocol/call.cuh"
#include "kernels/ptx/tma.cuh"

namespace deep_moe::kernels::internode {

// Of one warp, in dynamic shared memory.
struct alignas(128) CopyStages {
  char bytes[RailTuning::kPieces][RailTuning::kPieceBytes];
  std::uint64_t barriers[RailTuning::kPieces];
};

// The whole warp: a row once from memory, to each of the destinations.
__device__ __forceinline__ void copy_through_registers(const char* row, std::int64_t bytes, char* const* destinations,
                                                       int count) {
  constexpr int kBatch = RailTuning::kVectorsInFlight, kStep = 32 * 16;
  for (std::int64_t first = lane_id() * 16; first < bytes; first += kBatch * kStep) {
    uint4 vectors[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kStep < bytes) vectors[i] = ptx::ld_weak_16(row + first + i * kStep);
    for (int d = 0; d < count; ++d) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i * kStep < bytes) ptx::st_weak_16(destinations[d] + first + i * kStep, vectors[i]);
    }
  }
}

// Of one warp, for all its rows.
class RowCopier {
 public:
  // `stages` null: no copy engine.
  __device__ explicit RowCopier(CopyStages* stages) : stages_(stages) {
    if constexpr (ptx::kHasTma) {
      if (stages_ == nullptr || lane_id() != 0) return;
      for (std::uint64_t& barrier : stages_->barriers) ptx::mbarrier_init(&barrier, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // The whole warp. `words()` stores what goes with the row, meanwhile. Behind it the row has been read, and stored
  // once complete() has been called. False: the block must leave.
  template <typename Words>
  __device__ bool copy(const WaitScope& scope, const char* row, std::int64_t bytes, char* const* destinations,
                       int count, Words words) {
    if constexpr (ptx::kHasTma) {
      if (stages_ != nullptr) {
        const int num_pieces = static_cast<int>((bytes + kPieceBytes - 1) / kPieceBytes);
        if (lane_id() == 0) {
          ptx::bulk_wait_group_read<0>();  // stores of the row before have left their stages
          ptx::fence_proxy_async();        // the row may have been acquired just now, by generic loads
          for (int piece = 0; piece < min(num_pieces, RailTuning::kPieces); ++piece) load(row, bytes, piece);
        }
        words();
        bool ok = true;
        if (lane_id() == 0) ok = store(scope, row, bytes, num_pieces, destinations, count);
        first_use_ += static_cast<std::uint32_t>(num_pieces);
        return from_first_lane(ok);
      }
    }
    copy_through_registers(row, bytes, destinations, count);
    words();
    return true;
  }

  // The whole warp: behind a __syncwarp, all rows before the last load have been stored.
  __device__ void complete() {
    if constexpr (ptx::kHasTma) {
      if (stages_ != nullptr && lane_id() == 0) ptx::bulk_wait_group<0>();
    }
  }

 private:
  static constexpr int kPieceBytes = RailTuning::kPieceBytes;

  __device__ static std::uint32_t size_of(std::int64_t bytes, int piece) {
    const std::int64_t left = bytes - static_cast<std::int64_t>(piece) * kPieceBytes;
    return static_cast<std::uint32_t>(left < kPieceBytes ? left : kPieceBytes);
  }
  // Stages go round, from row to row: a stage's barrier changes phase with each
  // use.
  __device__ int stage_of(int piece) const {
    return static_cast<int>((first_use_ + static_cast<std::uint32_t>(piece)) % RailTuning::kPieces);
  }
  __device__ void load(const char* row, std::int64_t bytes, int piece) {
    if constexpr (ptx::kHasTma) {
      const int stage = stage_of(piece);
      ptx::mbarrier_arrive_expect_tx(stages_->barriers + stage, size_of(bytes, piece));
      ptx::bulk_load(stages_->bytes[stage], row + static_cast<std::int64_t>(piece) * kPieceBytes, size_of(bytes, piece),
                     stages_->barriers + stage);
    }
  }
  __device__ bool store(const WaitScope& scope, const char* row, std::int64_t bytes, int num_pieces,
                        char* const* destinations, int count) {
    if constexpr (ptx::kHasTma) {
      for (int piece = 0; piece < num_pieces; ++piece) {
        const int stage = stage_of(piece);
        const std::uint32_t use = first_use_ + static_cast<std::uint32_t>(piece);
        std::uint64_t* barrier = stages_->barriers + stage;
        const std::uint32_t parity = use / RailTuning::kPieces % 2;
        if (!ptx::mbarrier_try_wait_acquire_cta(barrier, parity) && !wait_longer_for_load(scope, barrier, parity))
          return false;
        for (int d = 0; d < count; ++d)
          ptx::bulk_store(destinations[d] + static_cast<std::int64_t>(piece) * kPieceBytes, stages_->bytes[stage],
                          size_of(bytes, piece));
        ptx::bulk_commit_group();
        if (piece + RailTuning::kPieces < num_pieces) {
          ptx::bulk_wait_group_read<0>();
          load(row, bytes, piece + RailTuning::kPieces);
        }
      }
    }
    return true;
  }

  CopyStages* stages_;
  std::uint32_t first_use_ = 0;  // pieces of the rows before
};

}  // namespace deep_moe::kernels::internode
