// The receiving side of low-latency dispatch: what it makes of ids, and a row's tasks. README.md beside this file has
// the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/dispatch_send.cuh"

namespace deep_moe::kernels {

// Tokens of all sources in order, as items: which (source, token) is one.
struct Items {
  const std::uint32_t* num_tokens;  // [R], in shared memory; null: `each` of every source
  int each;
  int num_ranks;
  __device__ int total() const {
    if (num_tokens == nullptr) return each * num_ranks;
    int sum = 0;
#pragma unroll 1
    for (int src = 0; src < num_ranks; ++src) sum += static_cast<int>(num_tokens[src]);
    return sum;
  }
  __device__ void find(int item, int* src, int* token) const {
    if (num_tokens == nullptr) {
      *src = item / each, *token = item - *src * each;
      return;
    }
    int at = 0;
#pragma unroll 1
    while (item >= static_cast<int>(num_tokens[at])) item -= static_cast<int>(num_tokens[at++]);
    *src = at, *token = item;
  }
};

// Loads a unit of a token's ids until it is there, or the source's header says that there is no such token. False:
// leave.
__device__ __forceinline__ bool await_ids(const LowLatencyRun& run, const char* header, int src, int token,
                                          const void* address, uint4* unit) {
  if (unit->w == run.tag) return true;
  uint4 found, head;
  std::uint64_t seen;
  const bool there = wait_until(
      run.scope, layout::WaitPhase::kRouting, src, run.tag,
      [&] {
        head = ptx::ld_relaxed_sys_16(header);
        found = ptx::ld_relaxed_sys_16(address);
        return std::uint64_t{found.w};
      },
      [&](std::uint64_t now) {
        return now == run.tag || (head.w == run.tag && head.x <= static_cast<std::uint32_t>(token));
      },
      &seen);
  *unit = found;
  return there;
}

// Calls `body(item, src, unit index, unit)` for the units of ids of items [begin, end), all threads of the block taking
// turns; those of tokens that are not there are left out. False: leave.
template <typename Body>
__device__ __forceinline__ bool for_each_id_unit(const LowLatencyRun& run, const layout::LowLatencyDispatchSlot& slot,
                                                 const Items& items, int begin, int end, Body body) {
  constexpr int kBatch = LowLatencyTuning::kIdUnitsInFlight;
  const int num_units = slot.num_id_units, last = end * num_units, step = static_cast<int>(blockDim.x);
  char* const mine = run.my_slot();
  bool ok = true;
#pragma unroll 1
  for (int first = begin * num_units + static_cast<int>(threadIdx.x); ok && first < last; first += kBatch * step) {
    uint4 unit[kBatch];
    int src[kBatch], token[kBatch];
    const char* address[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step >= last) continue;
      items.find((first + i * step) / num_units, &src[i], &token[i]);
      address[i] = slot.ids(mine, src[i], token[i]) + (first + i * step) % num_units * layout::kUnitBytes;
      unit[i] = ptx::ld_relaxed_sys_16(address[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * step;
      if (at >= last) continue;
      ok = ok && await_ids(run, slot.header(mine, src[i]), src[i], token[i], address[i], &unit[i]);
      if (ok && unit[i].w == run.tag) body(at / num_units, src[i], at % num_units, unit[i]);
    }
  }
  return ok;
}

__device__ __forceinline__ std::uint32_t id_of_unit(const uint4& unit, int i) {
  const std::uint32_t word = i < 2 ? unit.x : i < 4 ? unit.y : unit.z;
  return word >> 16 * (i % 2) & 0xffffu;
}

// Shared memory of a block that receives rows; ids and places are those of a chunk of items.
struct ReceiveShared {
  static constexpr int kItems = LowLatencyTuning::kItemsPerChunk;
  std::uint32_t* counts;    // [L] rows of each local expert before the chunk
  std::int32_t* positions;  // [items][K] packed row or -1
  std::int32_t* experts;    // [items][K] local expert of the item's n-th copy
  std::int32_t* copies;     // [items][K] packed row of the same
  std::uint16_t* ids;       // [items][K]

  __device__ ReceiveShared(char* base, int num_local, int topk) {
    counts = reinterpret_cast<std::uint32_t*>(base);
    positions = reinterpret_cast<std::int32_t*>(counts + num_local);
    experts = positions + kItems * topk;
    copies = experts + kItems * topk;
    ids = reinterpret_cast<std::uint16_t*>(copies + kItems * topk);
  }
  static std::size_t bytes(int num_local, int topk) {
    return 4 * static_cast<std::size_t>(num_local) + 14 * static_cast<std::size_t>(kItems * topk);
  }
};

// R3. Places of the chunk's rows, item after item, for the counts go on from one to the next. One warp; then whoever
// calls has to wait for all threads.
__device__ __forceinline__ void place_rows(const ReceiveShared& shared, int num_items, int topk, int first_expert,
                                           int num_local, std::int32_t expert_rows, int* num_copies) {
#pragma unroll 1
  for (int item = 0; item < num_items; ++item) {
    int copies = 0;
#pragma unroll 1
    for (int first = 0; first < topk; first += 32) {
      const int k = first + lane_id(), entry = item * topk + k;
      const std::uint32_t id = k < topk ? shared.ids[entry] : layout::kNoExpert;
      const int local = static_cast<int>(id & ~layout::kRepeatedExpert) - first_expert;
      const bool is_here = local >= 0 && local < num_local, is_first = (id & layout::kRepeatedExpert) == 0;
      std::uint32_t row = 0;
      if (is_here && is_first) {
        row = shared.counts[local];
        shared.counts[local] = row + 1;
      }
      __syncwarp();
      if (is_here && !is_first) row = shared.counts[local] - 1;
      __syncwarp();
      const bool fits = is_here && row < static_cast<std::uint32_t>(expert_rows);
      const std::int32_t position = fits ? local * expert_rows + static_cast<std::int32_t>(row) : -1;
      if (k < topk) shared.positions[entry] = position;
      const std::uint32_t copied = __ballot_sync(0xffffffffu, fits && is_first);
      if (fits && is_first) {
        const int copy = item * topk + copies + __popc(copied & ((1u << lane_id()) - 1));
        shared.copies[copy] = position;
        shared.experts[copy] = local;
      }
      copies += __popc(copied);
    }
    if (lane_id() == 0) num_copies[item] = copies;
  }
}

// R4. One task of an item that has rows here.
struct RowTask {
  int item, src, token, part, num_copies;
};

template <class Rows, class Width>
class RowReceiver {
 public:
  __device__ RowReceiver(const LowLatencyRun& run, const LowLatencyDispatchParams& params, const ReceiveShared& shared,
                         TileBuffer& buffer)
      : run_(run),
        params_(params),
        shared_(shared),
        buffer_(buffer),
        expert_rows_(static_cast<std::int32_t>(run.call.max_tokens) * run.num_ranks()) {}

  // What a task waits for, asked for ahead.
  struct Ahead {
    LaneUnits<Width> units;
    uint4 scales;
  };
  __device__ __forceinline__ Ahead nothing() const { return {no_units<Width>(run_.tag), no_unit(run_.tag)}; }
  __device__ __forceinline__ Ahead load_ahead(const RowTask& task) const {
    Ahead ahead = nothing();
    if (is_mine(task) || task.part >= params_.num_parts) return ahead;
    const LaneTile<Width> tile(params_.args.row_bytes, task.part);
    tile.load_units(row(task), &ahead.units);
    if (params_.slot.num_scale_units > 0 && tile.has_scale_unit())
      ahead.scales = ptx::ld_relaxed_sys_16(row(task) + scale_unit_offset(params_.slot, tile));
    return ahead;
  }

  // The whole warp. False: leave.
  __device__ __forceinline__ bool run(const RowTask& task, Ahead& ahead) const {
    const layout::LowLatencyDispatchSlot& slot = params_.slot;
    if (task.part >= params_.num_parts + slot.num_scale_tiles) return receive_words(task);
    if (task.num_copies == 0) return true;
    if (task.part >= params_.num_parts) return receive_scale_tile(task, task.part - params_.num_parts);
    return receive_tile(task, ahead);
  }

 private:
  __device__ bool is_mine(const RowTask& task) const { return run_.is_whole() && task.src == run_.rank(); }
  __device__ char* row(const RowTask& task) const { return params_.slot.row(run_.my_slot(), task.src, task.token); }
  __device__ std::int32_t copy_of(const RowTask& task, int copy) const {
    return shared_.copies[task.item * params_.args.ids.topk + copy];
  }
  // Where scale `scale` of a copy goes, in items.
  __device__ std::int64_t scale_index(const RowTask& task, int copy, int scale, int num_scales) const {
    const std::int64_t expert = shared_.experts[task.item * params_.args.ids.topk + copy];
    return (expert * num_scales + scale) * expert_rows_ + (copy_of(task, copy) - expert * expert_rows_);
  }

  __device__ __forceinline__ bool receive_tile(const RowTask& task, Ahead& ahead) const {
    const LowLatencyDispatchArgs& args = params_.args;
    const LaneTile<Width> tile(args.row_bytes, task.part);
    LaneVectors<Width> vectors;
    if (is_mine(task)) {
      TileInput<Rows, Width> input(params_, task.token, tile);
      vectors = input.finish(params_, &ahead.scales);
    } else {
      const bool has_scales = params_.slot.num_scale_units > 0 && tile.has_scale_unit();
      const char* from = row(task);
      if (!await_units(run_.scope, layout::WaitPhase::kUnits, task.src, from, tile, &ahead.units,
                       has_scales ? from + scale_unit_offset(params_.slot, tile) : nullptr, &ahead.scales))
        return false;
      vectors = to_vectors(ahead.units);
    }
#pragma unroll 1
    for (int copy = 0; copy < task.num_copies; ++copy)
      tile.store_vectors(static_cast<char*>(args.recv_x) + copy_of(task, copy) * args.row_bytes, vectors);
    if (params_.slot.num_scale_units > 0) store_scales(task, tile, ahead.scales);
    return true;
  }

  // Each of the lanes that share scales takes a copy.
  __device__ __forceinline__ void store_scales(const RowTask& task, const LaneTile<Width>& tile,
                                               const uint4& scales) const {
    constexpr int kGroups = layout::kScaleUnitsPerTile, kSharers = 32 * Width::kParts / kGroups;
    const int holder = tile.lane_with_scales();
    const std::uint32_t bits[] = {__shfl_sync(0xffffffffu, scales.x, holder),
                                  __shfl_sync(0xffffffffu, scales.y, holder),
                                  __shfl_sync(0xffffffffu, scales.z, holder)};
    const std::int64_t num_blocks = params_.args.row_bytes / kCastBlock;
#pragma unroll 1
    for (int copy = lane_id() % kSharers; copy < task.num_copies; copy += kSharers) {
#pragma unroll
      for (int j = 0; j < layout::kLaneVectors; ++j) {
        const int block = (tile.tile * layout::kLaneVectors + j) * kGroups + tile.scale_group();
        if (block >= num_blocks) break;
        if (params_.args.ue8m0) {
          const std::int64_t word = scale_index(task, copy, block / 4, params_.num_scales);
          static_cast<std::uint8_t*>(params_.args.recv_scales)[4 * word + block % 4] =
              static_cast<std::uint8_t>(bits[j] >> 23);
        } else {
          static_cast<std::uint32_t*>(params_.args.recv_scales)[scale_index(task, copy, block, params_.num_scales)] =
              bits[j];
        }
      }
    }
  }

  __device__ __forceinline__ bool receive_scale_tile(const RowTask& task, int tile) const {
    const ScaleRows& scales = params_.args.scales;
    const ScaleTile items(scales, tile);
    if (is_mine(task)) {
      gather_scales(scales, task.token, items, buffer_);
    } else {
      const LaneTile<Wide> lane((scales.num_items * scales.item_bytes + 15) / 16 * 16, tile);
      const char* from = row(task) + params_.slot.scales_offset;
      LaneUnits<Wide> units = no_units<Wide>(run_.tag);
      if (!await_units(run_.scope, layout::WaitPhase::kUnits, task.src, from, lane, &units)) return false;
      const LaneVectors<Wide> vectors = to_vectors(units);
#pragma unroll
      for (int j = 0; j < layout::kLaneVectors; ++j)
        reinterpret_cast<uint4*>(buffer_.bytes)[32 * j + lane_id()] = vectors.v[j];
      __syncwarp();
    }
#pragma unroll 1
    for (int copy = 0; copy < task.num_copies; ++copy) {
#pragma unroll 1
      for (int i = lane_id(); i < items.count; i += 32) {
        const std::int64_t at = scale_index(task, copy, items.first + i, params_.num_scales);
        store_item(static_cast<char*>(params_.args.recv_scales) + at * scales.item_bytes,
                   load_item(buffer_.bytes + i * scales.item_bytes, scales.item_bytes), scales.item_bytes);
      }
    }
    __syncwarp();
    return true;
  }

  // Source tokens, positions, weights.
  __device__ __forceinline__ bool receive_words(const RowTask& task) const {
    const LowLatencyDispatchArgs& args = params_.args;
    const int topk = args.ids.topk;
    const std::int64_t max_tokens = run_.call.max_tokens;
    std::int32_t* positions = args.recv_pos + (task.src * (max_tokens + 1) + task.token) * topk;
#pragma unroll 1
    for (int k = lane_id(); k < topk; k += 32) positions[k] = shared_.positions[task.item * topk + k];
    if (task.num_copies == 0) return true;
#pragma unroll 1
    for (int copy = lane_id(); copy < task.num_copies; copy += 32) args.src_info[copy_of(task, copy)] = task.token;
    if (params_.slot.num_weight_units == 0) return true;
    float* weights = args.recv_weights + (task.src * max_tokens + task.token) * topk;
    if (is_mine(task)) {
#pragma unroll 1
      for (int k = lane_id(); k < topk; k += 32) weights[k] = args.topk_weights[task.token * args.weight_stride + k];
      return true;
    }
    bool ok = true;
#pragma unroll 1
    for (int u = lane_id(); u < params_.slot.num_weight_units; u += 32) {
      uint4 unit = no_unit(run_.tag);
      ok = await_unit(run_.scope, layout::WaitPhase::kWeights, task.src,
                      row(task) + params_.slot.weights_offset + u * layout::kUnitBytes, &unit) &&
           ok;
      const std::uint32_t words[] = {unit.x, unit.y, unit.z};
#pragma unroll
      for (int w = 0; w < layout::kFloatsPerUnit; ++w) {
        const int k = layout::kFloatsPerUnit * u + w;
        if (ok && k < topk) weights[k] = __uint_as_float(words[w]);
      }
    }
    return __all_sync(0xffffffffu, ok);
  }

  const LowLatencyRun& run_;
  const LowLatencyDispatchParams& params_;
  const ReceiveShared& shared_;
  TileBuffer& buffer_;
  const std::int32_t expert_rows_;
};

}  // namespace deep_moe::kernels
