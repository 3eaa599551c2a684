// Dispatch, as parts: where rows go, how a row gets there with the copy engine and without, what travels with it.
// README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"
#include "kernels/protocol/bytes.cuh"
#include "kernels/protocol/call.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tuning.hpp"
#include "layout/experts.hpp"
#include "layout/rows.hpp"

namespace deep_moe::kernels {

// The arguments, and what the host derives from them.
struct DispatchParams {
  DispatchArgs args;
  layout::RowFormat format;
  Units units;
  int chunk_bytes = 16;  // of a row, but for its last chunk
  int x_alignment = 16;
  int wide_item_bytes = 0;  // size of the items as which scales without gaps may travel, if no receiver wants columns

  // Of a row, as they travel without columns.
  std::int64_t num_scale_items() const {
    return wide_item_bytes > args.scales.item_bytes ? format.scale_bytes / wide_item_bytes : args.scales.num_items;
  }
};

// Where one destination takes rows.
struct Target {
  char* x;
  char* scales;
  char* ids;
  float* weights;
  std::int32_t* src_idx;
  std::int64_t block_rows;   // rows that its block is laid out for
  std::int64_t filled_rows;  // of its block: rows from here on are its own to fill
  std::int32_t first_row;    // of this rank's rows, in its block
  std::int32_t num_rows;     // rows from num_rows on, and before 0, are not taken by this launch
  std::int32_t first_expert;
  std::int32_t num_local_experts;
  std::int32_t column_scales;
};

// Dynamic shared memory. The same struct on both sides.
struct DispatchShared {
  std::size_t barriers, targets, destinations, total;

  DM_HOST_DEVICE DispatchShared(bool tma, int num_warps, int num_ranks) {
    const std::size_t stages = tma ? static_cast<std::size_t>(num_warps) * DispatchTuning::kStages : 0;
    barriers = stages * DispatchTuning::kChunkBytes;
    targets = barriers + stages * sizeof(std::uint64_t);
    destinations = targets + sizeof(Target) * static_cast<std::size_t>(num_ranks);
    total = destinations + sizeof(char*) * static_cast<std::size_t>(num_warps * num_ranks);
  }
};

// What a handle's matrix and a peer's announcement say of one destination; behind notify its last block has written it.
__device__ __forceinline__ layout::Route find_route(const WaitScope& scope, const std::int32_t* prefix, int dst) {
  const int rank = scope.domain.rank, num_ranks = scope.domain.num_ranks;
  layout::Route route;
  route.place = announcement(scope, dst).place;
  route.first_row = rank > 0 ? prefix[(rank - 1) * num_ranks + dst] : 0;
  route.end_row = prefix[rank * num_ranks + dst];
  route.total_rows = prefix[(num_ranks - 1) * num_ranks + dst];
  return route;
}

// R1: from a route to addresses, for one destination. False: its segment has no address here.
__device__ __forceinline__ bool aim(const WaitScope& scope, const DispatchParams& params, int dst,
                                    const layout::Route& route, Target* target) {
  const DispatchArgs& args = params.args;
  const layout::Place& place = route.place;
  const bool is_window = (place.flags & layout::kPlaceWindow) != 0, is_hard = (place.flags & layout::kPlaceHard) != 0;
  // Rows in the order of the destination's block: ours from `first` to `end`.
  const std::int64_t skipped = is_window ? place.first_row : 0;
  const std::int64_t first = route.first_row - skipped, end = route.end_row - skipped;
  const std::int64_t total_rows = route.total_rows - skipped;
  *target = Target{};
  target->first_row = static_cast<std::int32_t>(first);
  target->num_rows = is_window ? static_cast<std::int32_t>(min(place.capacity, std::int64_t{INT32_MAX})) : INT32_MAX;
  if (args.ids.topk > 0) {
    const layout::ExpertBlocks experts(args.num_experts, scope.domain.num_ranks);
    target->first_expert = experts.first_expert(dst);
    target->num_local_experts = experts.num_local_experts(dst);
  }
  target->column_scales = (place.flags & layout::kPlaceColumnScales) != 0;
  target->block_rows = is_hard || is_window ? place.capacity : total_rows;
  target->filled_rows = is_hard ? min(max(total_rows, std::int64_t{0}), place.capacity) : target->block_rows;
  const bool has_tail = dst == scope.domain.rank && target->filled_rows < target->block_rows;
  const bool sends = max(first, std::int64_t{0}) < min(end, std::int64_t{target->num_rows});
  if (!sends && !has_tail) return true;

  const layout::RecvBlock block(params.format, target->block_rows);
  char* base = route.base != 0 ? reinterpret_cast<char*>(route.base) + place.offset
                               : place_address(scope, args.segment_bases, dst, place);
  if (base == nullptr) return false;
  target->x = base + block.x;
  target->scales = base + block.scales;
  target->ids = base + block.topk_idx;
  target->weights = reinterpret_cast<float*>(base + block.topk_weights);
  target->src_idx = reinterpret_cast<std::int32_t*>(base + block.src_idx);
  return true;
}

// Whether the places of a cached dispatch hold the rows that its handle promises. A window takes what fits. `route` in
// the first threads, one a destination.
__device__ __forceinline__ layout::NotifyOutcome check_places(int num_ranks, const layout::Route& route) {
  using layout::NotifyOutcome;
  const layout::Place& place = route.place;
  const bool too_small = static_cast<int>(threadIdx.x) < num_ranks && route.total_rows > place.capacity &&
                         (place.flags & layout::kPlaceWindow) == 0;
  const bool hard = too_small && (place.flags & layout::kPlaceHard);
  if (__syncthreads_or(hard)) return NotifyOutcome::kTooSmallHard;
  return __syncthreads_or(too_small) ? NotifyOutcome::kTooSmall : NotifyOutcome::kRowsFit;
}

// Scales as items, narrow ones where some receiver wants columns.
struct ScaleItems {
  const char* data;
  std::int64_t row_stride, item_stride;
  int item_bytes, num_items;

  __device__ ScaleItems(const DispatchParams& params, bool any_columns) {
    const ScaleRows& scales = params.args.scales;
    data = static_cast<const char*>(scales.data);
    row_stride = scales.row_stride;
    const bool wide = params.wide_item_bytes > scales.item_bytes && !any_columns;
    item_bytes = wide ? params.wide_item_bytes : scales.item_bytes;
    item_stride = wide ? params.wide_item_bytes : scales.item_stride;
    num_items = wide ? static_cast<int>(params.format.scale_bytes / params.wide_item_bytes)
                     : static_cast<int>(scales.num_items);
  }
  __device__ std::uint64_t load(std::int64_t token, int item) const {
    return load_item(data + token * row_stride + item * item_stride, item_bytes);
  }
  __device__ void store(const Target& target, std::int64_t row, std::int64_t row_bytes, int item,
                        std::uint64_t value) const {
    const std::int64_t offset =
        target.column_scales ? (item * target.block_rows + row) * item_bytes : row * row_bytes + item * item_bytes;
    store_item(target.scales + offset, value, item_bytes);
  }
};

// What a warp has read of a token ahead of sending it, up to two entries a lane.
static_assert(layout::kMaxTopk <= 32 * 2 && layout::kMaxKernelRanks <= 32 * 2);
template <int kPerLane>
struct TokenWords {
  std::int32_t position[kPerLane];
  std::int64_t id[kPerLane];
  float weight[kPerLane];
  std::uint64_t scale[kPerLane];

  // What is there before notify; then what notify has written; then scales. What goes with a token goes with the first
  // part of its row.
  __device__ void load_inputs(const DispatchArgs& args, const Unit& unit) {
    const std::int64_t token = unit.token;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = threadIdx.x % 32 + 32 * i;
      id[i] = -1, weight[i] = 0;
      if (token >= args.num_tokens || n >= args.ids.topk || !unit.is_first_part()) continue;
      const std::int64_t at = token * args.ids.row_stride + n;
      id[i] = args.ids.id_bytes == 8 ? static_cast<const std::int64_t*>(args.ids.data)[at]
                                     : static_cast<const std::int32_t*>(args.ids.data)[at];
      if (args.topk_weights) weight[i] = args.topk_weights[token * args.weight_stride + n];
    }
  }
  __device__ void load_positions(const DispatchArgs& args, int num_ranks, std::int64_t token) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = threadIdx.x % 32 + 32 * i;
      position[i] =
          token < args.num_tokens && n < num_ranks ? args.send_position[token * num_ranks + n] : std::int32_t{-1};
    }
  }
  __device__ void load_scales(const DispatchArgs& args, const ScaleItems& scales, const Unit& unit) {
    const bool wanted = unit.token < args.num_tokens && unit.is_first_part();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = threadIdx.x % 32 + 32 * i;
      scale[i] = wanted && n < scales.num_items ? scales.load(unit.token, n) : 0;
    }
  }
  // From positions among this rank's rows to indices in the destinations' blocks; -1 where the row is not taken.
  __device__ void place_rows(const Target* targets) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (position[i] < 0) continue;
      const Target& target = targets[threadIdx.x % 32 + 32 * i];
      position[i] += target.first_row;
      if (position[i] >= target.num_rows) position[i] = -1;
    }
  }
  // The destinations as bits.
  __device__ std::uint64_t mask() const {
    std::uint64_t mask = __ballot_sync(0xffffffffu, position[0] >= 0);
    if constexpr (kPerLane > 1) mask |= std::uint64_t{__ballot_sync(0xffffffffu, position[1] >= 0)} << 32;
    return mask;
  }
  __device__ std::int32_t position_at(int rank) const {
    return __shfl_sync(0xffffffffu, kPerLane == 1 || rank < 32 ? position[0] : position[kPerLane - 1], rank % 32);
  }
};

// R3: all of a token but its row, to one destination. The whole warp.
template <int kPerLane>
__device__ __forceinline__ void store_words(const DispatchParams& params, const ScaleItems& scales,
                                            const Target& target, const TokenWords<kPerLane>& words, std::int64_t token,
                                            std::int64_t row) {
  const DispatchArgs& args = params.args;
  const int lane = threadIdx.x % 32, topk = args.ids.topk;
  if (lane == 0) target.src_idx[row] = static_cast<std::int32_t>(token);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int n = lane + 32 * i;
    if (n < topk) {
      const std::int64_t local = words.id[i] - target.first_expert;
      const bool is_here = local >= 0 && local < target.num_local_experts;
      const std::int64_t at = row * topk + n;
      if (args.ids.id_bytes == 8) {
        reinterpret_cast<std::int64_t*>(target.ids)[at] = is_here ? local : -1;
      } else {
        reinterpret_cast<std::int32_t*>(target.ids)[at] = is_here ? static_cast<std::int32_t>(local) : -1;
      }
      if (args.topk_weights) target.weights[at] = is_here ? words.weight[i] : 0.0f;
    }
    if (n < scales.num_items) scales.store(target, row, params.format.scale_bytes, n, words.scale[i]);
  }
#pragma unroll 1
  for (int n = lane + 32 * kPerLane; n < scales.num_items; n += 32)
    scales.store(target, row, params.format.scale_bytes, n, scales.load(token, n));
}

// R2 with the copy engine: rows pass through a ring of chunks in shared memory, loads ahead of stores. One lane a warp.
class RowPipe {
 public:
  __device__ RowPipe(const DispatchParams& params, char* stages, std::uint64_t* barriers)
      : params_(params), stages_(stages), barriers_(barriers) {}

  // Loads as far ahead as the ring allows: the rest of `current`, then `next`.
  __device__ void load_ahead(const Unit& current, const Unit& next) {
    const DispatchArgs& args = params_.args;
#pragma unroll 1
    while (loaded_ - stored_ < DispatchTuning::kStages - 1) {
      const bool of_next = ahead_ >= current.num_chunks();
      const Unit unit = of_next ? next : current;
      const int chunk = unit.first_chunk + (of_next ? ahead_ - current.num_chunks() : ahead_);
      if (chunk >= unit.end_chunk) return;
      const int stage = static_cast<int>(loaded_ % DispatchTuning::kStages);
      ptx::mbarrier_arrive_expect_tx(barriers_ + stage, bytes_of(chunk));
      ptx::bulk_load(stage_at(stage),
                     static_cast<const char*>(args.x) + unit.token * args.row_stride + offset_of(chunk),
                     bytes_of(chunk), barriers_ + stage);
      ++loaded_, ++ahead_;
    }
  }

  // Stores `current` at all destinations. Not `live`: goes through the motions for its first chunk. False: the block
  // must leave.
  __device__ bool send(const WaitScope& scope, const Unit& current, const Unit& next, char* const* destinations,
                       int num_destinations) {
    load_ahead(current, next);
#pragma unroll 1
    for (int chunk = current.first_chunk; chunk < current.end_chunk; ++chunk) {
      if (!wait(scope)) return false;
      const int stage = static_cast<int>(stored_ % DispatchTuning::kStages);
#pragma unroll 1
      for (int i = 0; i < num_destinations; ++i)
        ptx::bulk_store(destinations[i] + offset_of(chunk), stage_at(stage), bytes_of(chunk));
      ptx::bulk_commit_group();
      ++stored_;
      // The group before this one has let go of its chunk, which the next load fills.
      ptx::bulk_wait_group_read<1>();
      load_ahead(current, next);
    }
    ahead_ -= current.num_chunks();
    return true;
  }

  // Waits for what was loaded and will not be stored.
  __device__ void drain(const WaitScope& scope) {
    while (stored_ != loaded_ && wait(scope)) ++stored_;
  }

 private:
  // For the next chunk in order.
  __device__ bool wait(const WaitScope& scope) const {
    std::uint64_t* barrier = barriers_ + stored_ % DispatchTuning::kStages;
    const std::uint32_t parity = stored_ / DispatchTuning::kStages % 2;
    return ptx::mbarrier_try_wait_acquire_cta(barrier, parity) || wait_longer_for_load(scope, barrier, parity);
  }
  __device__ char* stage_at(int stage) const { return stages_ + stage * DispatchTuning::kChunkBytes; }
  __device__ std::int64_t offset_of(int chunk) const { return static_cast<std::int64_t>(chunk) * params_.chunk_bytes; }
  __device__ std::uint32_t bytes_of(int chunk) const {
    return static_cast<std::uint32_t>(
        min(static_cast<std::int64_t>(params_.chunk_bytes),
            params_.args.row_bytes - static_cast<std::int64_t>(chunk) * params_.chunk_bytes));
  }

  const DispatchParams& params_;
  char* stages_;
  std::uint64_t* barriers_;
  std::uint32_t loaded_ = 0, stored_ = 0;  // chunks
  int ahead_ = 0;                          // chunks loaded, from the first of the current unit
};

// R2 without it: the whole warp, through registers.
__device__ __forceinline__ void copy_unit(const DispatchParams& params, const Unit& unit, char* const* destinations,
                                          int num_destinations) {
  constexpr int kBatch = DispatchTuning::kVectorsInFlight, kStep = 32 * 16;
  const char* row = static_cast<const char*>(params.args.x) + unit.token * params.args.row_stride;
  const std::int64_t end = min(params.args.row_bytes, static_cast<std::int64_t>(unit.end_chunk) * params.chunk_bytes);
  for (std::int64_t first = static_cast<std::int64_t>(unit.first_chunk) * params.chunk_bytes + (threadIdx.x % 32) * 16;
       first < end; first += kBatch * kStep) {
    uint4 vectors[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i * kStep < end) vectors[i] = load_16(row + first + i * kStep, params.x_alignment);
    for (int d = 0; d < num_destinations; ++d) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i * kStep < end) ptx::st_weak_16(destinations[d] + first + i * kStep, vectors[i]);
    }
  }
}

// R4: rows of a hard place that nobody sends: ids -1, weights 0, source index -1. All threads of the grid.
__device__ __forceinline__ void fill_tail(const DispatchParams& params, const Target& mine) {
  const std::int64_t arrived = mine.filled_rows;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t topk = params.args.ids.topk;
  const std::int64_t id_words = topk * params.format.idx_bytes / 4;  // -1 is all ones, also in halves
  std::int32_t* ids = reinterpret_cast<std::int32_t*>(mine.ids);
  for (std::int64_t i = arrived * id_words + first; i < mine.block_rows * id_words; i += step) ids[i] = -1;
  if (params.format.weight_bytes > 0)
    for (std::int64_t i = arrived * topk + first; i < mine.block_rows * topk; i += step) mine.weights[i] = 0.0f;
  for (std::int64_t i = arrived + first; i < mine.block_rows; i += step) mine.src_idx[i] = -1;
}

}  // namespace deep_moe::kernels
