// The receiving side of low-latency dispatch: where rows go, and a row's tasks. README.md beside this file has the
// words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/dispatch_send.cuh"

namespace deep_moe::kernels {

// Words [begin, end) of the bit table.
struct Chunk {
  int begin, end;
  __device__ bool has(int word) const { return word >= begin && word < end; }
};

// R2, R3. Shared memory of a block: a bit for each (local expert, source, token), set where the token goes to the
// expert. A row's place is the number of bits before its own. Each source begins a word. Where all of it does not fit,
// chunks of words follow each other, and `before` has what was set in earlier ones.
template <bool kPlain>
class BitTable {
 public:
  __device__ BitTable(char* base, const LowLatencyDispatchParams& params, int num_local)
      : before_(reinterpret_cast<std::uint32_t*>(base)),
        bits_(before_ + (is_cut(params) ? layout::align_up(static_cast<std::size_t>(num_local), 4) : 0)),
        num_local_(num_local),
        words_(params.chunk_words),
        per_source_(params.words_per_source),
        is_cut_(is_cut(params)) {}
  static DM_HOST_DEVICE bool is_cut(const LowLatencyDispatchParams& params) {
    return !kPlain && params.chunk_words < params.num_words;
  }
  static std::size_t bytes(const LowLatencyDispatchParams& params, int num_local) {
    const std::size_t experts = layout::align_up(static_cast<std::size_t>(num_local), 4);
    return 4 * experts * static_cast<std::size_t>(params.chunk_words + (is_cut(params) ? 1 : 0));
  }

  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = thread; i < (num_local_ * words_ + 3) / 4; i += threads)
      reinterpret_cast<uint4*>(bits_)[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void clear_before(int thread, int threads) const {
    if (is_cut_)
      for (int i = thread; i < num_local_; i += threads) before_[i] = 0;
  }
  // To the next chunk.
  __device__ __forceinline__ void fold(int thread, int threads) const {
    for (int local = thread; local < num_local_; local += threads) {
      std::uint32_t sum = 0;
      for (int w = 0; w < words_; ++w) sum += static_cast<std::uint32_t>(__popc(row(local)[w]));
      before_[local] += sum;
    }
  }
  __device__ __forceinline__ int word_of(int src, int token) const { return src * per_source_ + token / 32; }
  __device__ __forceinline__ void set(int local, int word_in_chunk, int token) const {
    atomicOr(&row(local)[word_in_chunk], 1u << token % 32);
  }
  __device__ __forceinline__ std::uint32_t rows_before(int local, int word_in_chunk, int token) const {
    std::uint32_t sum = is_cut_ ? before_[local] : 0u;
    const std::uint32_t* mine = row(local);
    const std::uint32_t below = (1u << token % 32) - 1;
    const auto add = [&](std::uint32_t bits) { sum += static_cast<std::uint32_t>(__popc(bits)); };
    if (!kPlain && words_ < 4) {
#pragma unroll 1
      for (int w = 0; w < word_in_chunk; ++w) add(mine[w]);
      add(mine[word_in_chunk] & below);
      return sum;
    }
    int w = 0;  // words_ is a multiple of 4
#pragma unroll 1
    for (; w + 4 <= word_in_chunk; w += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(mine + w);
      add(four.x), add(four.y), add(four.z), add(four.w);
    }
    const uint4 four = *reinterpret_cast<const uint4*>(mine + w);
    const int left = word_in_chunk - w;
    add(four.x & (left > 0 ? ~0u : below));
    add(four.y & (left > 1 ? ~0u : left == 1 ? below : 0u));
    add(four.z & (left > 2 ? ~0u : left == 2 ? below : 0u));
    add(four.w & (left == 3 ? below : 0u));
    return sum;
  }
  __device__ std::uint32_t* row(int local) const { return bits_ + local * words_; }
  __device__ std::uint32_t before(int local) const { return is_cut_ ? before_[local] : 0u; }

 private:
  std::uint32_t *before_, *bits_;
  int num_local_, words_, per_source_;
  bool is_cut_;
};

// What a block knows in shared memory.
struct DispatchShared {
  WaitFailure failure;
  int arrived;
  int failed[2];    // a warp could not go on, before the first meeting of a chunk or the second
  int most_tokens;  // of any source
  std::uint32_t num_tokens[layout::kMaxKernelRanks];
};

__device__ __forceinline__ std::uint32_t id_of_unit(const uint4& unit, int i) {
  const std::uint32_t word = i < 2 ? unit.x : i < 4 ? unit.y : unit.z;
  return word >> 16 * (i % 2) & 0xffffu;
}

// This rank as a receiver.
template <bool kPlain>
struct Receiver {
  const LowLatencyRun& run;
  const LowLatencyDispatchParams& params;
  const BitTable<kPlain>& table;
  const DispatchShared& shared;
  int first_expert, num_local;
  Chunk chunk;
  std::int32_t expert_rows;  // room of one

  __device__ __forceinline__ bool in_chunk(int src, int token) const {
    return kPlain || chunk.has(table.word_of(src, token));
  }
  __device__ __forceinline__ int word_of(int src, int token) const {
    return table.word_of(src, token) - (kPlain ? 0 : chunk.begin);
  }

  __device__ __forceinline__ std::int64_t item(int src, int token) const { return src * run.call.max_tokens + token; }
};

// Loads a unit of a token's ids until it is there, or the source's header says that there is no such token. False:
// leave.
__device__ __forceinline__ bool await_ids(const LowLatencyRun& run, int src, int token, const void* address,
                                          uint4* unit) {
  if (unit->w == run.tag) return true;
  const char* header = run.my_slot() + src * layout::kUnitBytes;
  uint4 found, head;
  std::uint64_t seen;
  const bool there = wait_in_line(
      run.scope, layout::WaitPhase::kRouting, src, run.tag,
      [&] {
        head = ptx::ld_relaxed_sys_16(header);
        found = ptx::ld_relaxed_sys_16(address);
        return std::uint64_t{found.w};
      },
      [&](std::uint64_t now) {
        // All words of the header are looked at: the assembler loads none that are not, and one by one what is left.
        const bool is_header =
            head.w == run.tag && (head.y | static_cast<std::uint64_t>(head.z) << 32) == run.call.hash;
        return now == run.tag || (is_header && head.x <= static_cast<std::uint32_t>(token));
      },
      &seen);
  *unit = found;
  return there;
}

// R2. Sets the bits of tokens [first, end) of all sources, as far as they are in the chunk; the threads of all carriers
// take turns. False: leave.
template <bool kPlain>
__device__ __forceinline__ bool gather_ids(const Receiver<kPlain>& at, int first, int end, int thread, int threads) {
  constexpr int kBatch = LowLatencyTuning::kIdUnitsInFlight;
  const LowLatencyRun& run = at.run;
  const layout::LowLatencyDispatchSlot& slot = at.params.slot;
  const int units = slot.num_id_units, num_ranks = run.num_ranks(), total = (end - first) * num_ranks * units;
  char* const mine = run.my_slot();
  bool ok = true;
#pragma unroll 1
  for (int begin = thread; ok && begin < total; begin += kBatch * threads) {
    uint4 unit[kBatch];
    const char* address[kBatch];
    int src[kBatch], token[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = begin + i * threads;
      std::uint32_t unit_of_token, source;
      const std::uint32_t one = at.params.by_id_units.divide(static_cast<std::uint32_t>(n), &unit_of_token);
      token[i] = first + static_cast<int>(at.params.by_ranks.divide(one, &source));
      src[i] = static_cast<int>(source);
      address[i] = nullptr;
      if (n >= total || !run.is_live(src[i]) || !at.in_chunk(src[i], token[i])) continue;
      address[i] = slot.ids(mine, src[i], token[i]) + unit_of_token * layout::kUnitBytes;
      unit[i] = ptx::ld_relaxed_sys_16(address[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!ok || address[i] == nullptr) continue;
      ok = await_ids(run, src[i], token[i], address[i], &unit[i]);
      if (!ok || unit[i].w != run.tag) continue;
      const int word = at.word_of(src[i], token[i]);
#pragma unroll
      for (int j = 0; j < layout::kIdsPerUnit; ++j) {
        // One that is marked as repeated is above all local ones.
        const int local = static_cast<int>(id_of_unit(unit[i], j)) - at.first_expert;
        if (local >= 0 && local < at.num_local) at.table.set(local, word, token[i]);
      }
    }
  }
  return ok;
}

// R3. Where the rows of half of a token's entries go: local expert and packed row of this lane's entry, -1 where there
// is none.
struct Places {
  std::int32_t local = -1, position = -1;
  std::uint32_t copies;  // lanes that have a row

  // `id`, as it travels, of this lane's entry.
  template <bool kPlain>
  __device__ __forceinline__ Places(const Receiver<kPlain>& at, int src, int token, std::uint32_t id) {
    const int expert = static_cast<int>(id) - at.first_expert;
    if (expert >= 0 && expert < at.num_local) {
      const std::uint32_t row = at.table.rows_before(expert, at.word_of(src, token), token);
      if (row < static_cast<std::uint32_t>(at.expert_rows)) {
        local = expert;
        position = expert * at.expert_rows + static_cast<std::int32_t>(row);
      }
    }
    copies = __ballot_sync(0xffffffffu, position >= 0);
  }
};

// The id of this lane's entry, from units of ids, unit u in lane u.
__device__ __forceinline__ std::uint32_t id_in_lane(const uint4& unit, int topk, int half) {
  const int k = entry_of_lane(half), lane = k / layout::kIdsPerUnit, i = k - lane * layout::kIdsPerUnit;
  const std::uint32_t x = __shfl_sync(0xffffffffu, unit.x, lane), y = __shfl_sync(0xffffffffu, unit.y, lane),
                      z = __shfl_sync(0xffffffffu, unit.z, lane);
  const std::uint32_t word = i < 2 ? x : i < 4 ? y : z;
  return k < topk ? (i % 2 == 0 ? word & 0xffffu : word >> 16) : layout::kNoExpert;
}

// Calls `body(half, id)`, as it travels, for the halves of a token's entries.
template <bool kPlain, typename Body>
__device__ __forceinline__ void for_each_half(const uint4& unit, int topk, Body body) {
#pragma unroll 1
  for (int half = 0; half < num_halves<kPlain>(topk); ++half) body(half, id_in_lane(unit, topk, half));
}
// R4. A part of a row into the packed blocks, a copy for each expert, and its scales.
template <bool kWithScales, class Width>
__device__ __forceinline__ void store_copies(const Receiver<Width::kPlain>& at, const Places& places,
                                             const LaneTile<Width>& tile, const LaneVectors<Width>& vectors,
                                             const uint4& scales) {
  const LowLatencyDispatchArgs& args = at.params.args;
  char* const rows = static_cast<char*>(args.recv_x);
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(args.row_bytes);
  // Lane j of those that share scales has that of block j of three.
  std::uint32_t scale = 0;
  bool has_scale = false;
  std::int64_t scale_row = 0;  // of that block, in items, without the copy's place
  if constexpr (kWithScales) {
    const int holder = tile.lane_with_scales(), j = lane_id() % 8;
    const std::uint32_t x = __shfl_sync(0xffffffffu, scales.x, holder), y = __shfl_sync(0xffffffffu, scales.y, holder),
                        z = __shfl_sync(0xffffffffu, scales.z, holder);
    scale = j == 0 ? x : j == 1 ? y : z;
    const int block = (tile.tile * layout::kLaneVectors + j) * layout::kScaleUnitsPerTile + tile.scale_group();
    has_scale = j < layout::kLaneVectors && block < static_cast<int>(args.row_bytes / kCastBlock) &&
                (Width::kParts == 1 || lane_id() < layout::kLaneVectors);
    scale_row = args.ue8m0 ? static_cast<std::int64_t>(block / 4) * at.expert_rows * 4 + block % 4
                           : static_cast<std::int64_t>(block) * at.expert_rows;
  }
  // (expert * scales + block) * rows + row of the expert
  const std::int64_t at_scale = kWithScales ? places.position + static_cast<std::int64_t>(places.local) *
                                                                    (at.params.num_scales - 1) * at.expert_rows
                                            : 0;
  constexpr int kBatch = 4;
#pragma unroll 1
  for (std::uint32_t rest = places.copies; rest != 0;) {
    int k[kBatch];
    std::int32_t position[kBatch];
    std::int64_t to_scale[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      k[i] = __ffs(static_cast<int>(rest)) - 1;
      rest &= rest - 1;
      position[i] = __shfl_sync(0xffffffffu, places.position, k[i] & 31);
      if (kWithScales) to_scale[i] = __shfl_sync(0xffffffffu, at_scale, k[i] & 31);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (k[i] < 0) break;
      tile.store_vectors(rows + static_cast<std::uint64_t>(static_cast<std::uint32_t>(position[i])) * row_bytes,
                         vectors);
      if constexpr (kWithScales) {
        if (!has_scale) continue;
        if (args.ue8m0)
          static_cast<std::uint8_t*>(args.recv_scales)[4 * to_scale[i] + scale_row] =
              static_cast<std::uint8_t>(scale >> 23);
        else
          static_cast<std::uint32_t*>(args.recv_scales)[to_scale[i] + scale_row] = scale;
      }
    }
  }
}

// Scales that a row brought along, from `buffer`.
template <bool kPlain>
__device__ __forceinline__ void store_scale_tile(const Receiver<kPlain>& at, const Places& places,
                                                 const ScaleTile& items, const TileBuffer& buffer) {
  const ScaleRows& scales = at.params.args.scales;
#pragma unroll 1
  for (std::uint32_t rest = places.copies; rest != 0; rest &= rest - 1) {
    const int k = __ffs(static_cast<int>(rest)) - 1;
    const std::int64_t local = __shfl_sync(0xffffffffu, places.local, k);
    const std::int64_t first = __shfl_sync(0xffffffffu, places.position, k) +
                               (local * (at.params.num_scales - 1) + items.first) * at.expert_rows;
#pragma unroll 1
    for (int i = lane_id(); i < items.count; i += 32)
      store_item(static_cast<char*>(at.params.args.recv_scales) +
                     (first + static_cast<std::int64_t>(i) * at.expert_rows) * scales.item_bytes,
                 load_item(buffer.bytes + i * scales.item_bytes, scales.item_bytes), scales.item_bytes);
  }
  __syncwarp();
}

// R4. What the combine has to know of a token, and whose rows these are.
template <bool kPlain>
__device__ __forceinline__ void store_places(const Receiver<kPlain>& at, const Places& places, int src, int token,
                                             int half) {
  const LowLatencyDispatchArgs& args = at.params.args;
  const int topk = args.ids.topk, k = entry_of_lane(half);
  if (k < topk) args.recv_pos[(at.item(src, token) + src) * topk + k] = places.position;
  if (places.position >= 0) args.src_info[places.position] = token;
}

// R4. Weights that came with a row. False: leave.
template <bool kPlain>
__device__ __forceinline__ bool receive_weights(const Receiver<kPlain>& at, const char* row, int src, int token) {
  const layout::LowLatencyDispatchSlot& slot = at.params.slot;
  const LowLatencyDispatchArgs& args = at.params.args;
  const int topk = args.ids.topk;
  bool ok = true;
  if (lane_id() < slot.num_weight_units) {
    uint4 unit = no_unit(at.run.tag);
    ok = await_unit(at.run.scope, layout::WaitPhase::kWeights, src,
                    row + slot.weights_offset + lane_id() * layout::kUnitBytes, &unit);
    float* weights = args.recv_weights + at.item(src, token) * topk;
    const std::uint32_t words[] = {unit.x, unit.y, unit.z};
#pragma unroll
    for (int w = 0; w < layout::kFloatsPerUnit; ++w) {
      const int k = layout::kFloatsPerUnit * lane_id() + w;
      if (ok && k < topk) weights[k] = __uint_as_float(words[w]);
    }
  }
  return __all_sync(0xffffffffu, ok);
}

// A task of a token as it comes in.
template <class Rows, class Width>
struct ReceivedPart {
  int src, token, part;
  uint4 ids, scales;
  LaneUnits<Width> units;

  __device__ __forceinline__ const char* row(const Receiver<Width::kPlain>& at) const {
    return at.params.slot.row(at.run.my_slot(), src, token);
  }
  __device__ __forceinline__ const char* ids_unit(const Receiver<Width::kPlain>& at) const {
    return at.params.slot.ids(at.run.my_slot(), src, token) + lane_id() * layout::kUnitBytes;
  }
  __device__ __forceinline__ void set(const Receiver<Width::kPlain>& at, int src_, int token_, int part_) {
    src = src_, token = token_, part = part_;
    ids = scales = no_unit(at.run.tag);
    units = no_units<Width>(at.run.tag);
  }
  // Before it is known whether anything comes.
  __device__ __forceinline__ void load(const Receiver<Width::kPlain>& at) {
    if (lane_id() < at.params.slot.num_id_units) ids = ptx::ld_relaxed_sys_16(ids_unit(at));
    if (part >= at.params.num_parts) return;
    const LaneTile<Width> tile(at.params.num_vectors, part);
    tile.load_units(row(at), &units);
    if constexpr (kCasts<Rows>)
      if (tile.has_scale_unit()) scales = ptx::ld_relaxed_sys_16(row(at) + scale_unit_offset(at.params.slot, tile));
  }
  // The whole warp. False: leave.
  __device__ __forceinline__ bool receive(const Receiver<Width::kPlain>& at, TileBuffer* buffer) {
    const LowLatencyDispatchParams& params = at.params;
    const LowLatencyRun& run = at.run;
    // This block has seen the ids, so that they are there by now; the row is asked for again with them.
    const bool has_ids = lane_id() < params.slot.num_id_units;
    if (__any_sync(0xffffffffu, has_ids && ids.w != run.tag)) {
      load(at);
      constexpr std::uint32_t kNone = layout::kNoExpert | layout::kNoExpert << 16;
      if (has_ids && ids.w != run.tag) ids = make_uint4(kNone, kNone, kNone, run.tag);  // masked meanwhile
    }
    const bool is_row = part < params.num_parts;
    bool ok = true, there = false;
    LaneVectors<Width> vectors;
    const LaneTile<Width> tile(at.params.num_vectors, part);
    for_each_half<Width::kPlain>(ids, params.args.ids.topk, [&](int half, std::uint32_t id) {
      const Places places(at, src, token, id);
      if (part == 0) store_places(at, places, src, token, half);
      if (places.copies == 0 || !ok) return;
      if (!there) {
        there = true;
        if (part == 0 && params.slot.num_weight_units > 0) ok = receive_weights(at, row(at), src, token);
        if (is_row) {
          const bool has_scales = kCasts<Rows> && tile.has_scale_unit();
          ok = await_units(run.scope, layout::WaitPhase::kUnits, src, row(at), tile, &units,
                           has_scales ? row(at) + scale_unit_offset(params.slot, tile) : nullptr, &scales) &&
               ok;
          vectors = to_vectors(units);
        } else if constexpr (!kCasts<Rows>) {
          ok = await_scale_tile(at, *buffer) && ok;
        }
        if (!ok) return;
      }
      if (is_row)
        store_copies<kCasts<Rows>>(at, places, tile, vectors, scales);
      else if constexpr (!kCasts<Rows>)
        store_scale_tile(at, places, ScaleTile(params.args.scales, part - params.num_parts), *buffer);
    });
    return ok;
  }

 private:
  __device__ __forceinline__ bool await_scale_tile(const Receiver<Width::kPlain>& at, TileBuffer& buffer) const {
    const ScaleRows& own = at.params.args.scales;
    const LaneTile<Wide> lane(static_cast<int>((own.num_items * own.item_bytes + 15) / 16), part - at.params.num_parts);
    const char* from = row(at) + at.params.slot.scales_offset;
    LaneUnits<Wide> wide = no_units<Wide>(at.run.tag);
    if (!await_units(at.run.scope, layout::WaitPhase::kUnits, src, from, lane, &wide)) return false;
    const LaneVectors<Wide> vectors = to_vectors(wide);
#pragma unroll
    for (int j = 0; j < layout::kLaneVectors; ++j)
      reinterpret_cast<uint4*>(buffer.bytes)[32 * j + lane_id()] = vectors.v[j];
    __syncwarp();
    return true;
  }
};

// K2. What the chunk says of the counts of this block's share of the local experts: begin and count of each source's
// rows, and with the last chunk their sum. One warp.
template <bool kPlain>
__device__ __forceinline__ void count_rows(const Receiver<kPlain>& at) {
  const LowLatencyDispatchArgs& args = at.params.args;
  const int num_ranks = at.run.num_ranks(), per_source = at.params.words_per_source;
  const int end = min(at.chunk.end, num_ranks * per_source);
#pragma unroll 1
  for (int local = static_cast<int>(blockIdx.x) + lane_id() * static_cast<int>(gridDim.x); local < at.num_local;
       local += 32 * static_cast<int>(gridDim.x)) {
    std::int64_t* range = args.layout_range + static_cast<std::int64_t>(local) * num_ranks;
    const std::uint32_t* words = at.table.row(local);
    std::uint32_t sum = at.table.before(local), begin = sum;
    int src = at.chunk.begin / per_source, word = at.chunk.begin - src * per_source;
    if (word > 0) begin = static_cast<std::uint32_t>(range[src] >> 32);  // as this thread has left it
#pragma unroll 4
    for (int w = at.chunk.begin; w < end; ++w) {
      sum += static_cast<std::uint32_t>(__popc(words[w - at.chunk.begin]));
      if (++word < per_source && w + 1 < end) continue;
      range[src] = static_cast<std::int64_t>(begin) << 32 | (sum - begin);
      if (word == per_source) ++src, word = 0, begin = sum;
    }
    if (end < num_ranks * per_source) continue;
    args.recv_count[local] = static_cast<std::int32_t>(sum);
    if (args.recv_stats != nullptr) args.recv_stats[local] += static_cast<std::int32_t>(sum);
  }
}

}  // namespace deep_moe::kernels
