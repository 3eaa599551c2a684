// The receiving side of low-latency dispatch: rows into packed blocks. README.md beside this file has the words and the
// order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/low_latency/dispatch_count.cuh"

namespace deep_moe::kernels {

// What a block knows in shared memory.
struct DispatchShared {
  CallState call;
  int failed;       // a warp could not go on before the meeting
  int most_tokens;  // of any source
  std::uint32_t num_tokens[layout::kMaxKernelRanks];
};

// This rank as a receiver.
struct Receiver {
  const LowLatencyRun& run;
  const LowLatencyDispatchParams& params;
  const ExpertCounts& counts;
  const DispatchShared& shared;
  int first_expert, num_local;
  std::int32_t expert_rows;  // room of one

  __device__ __forceinline__ std::int64_t item(int src, int token) const { return src * run.call.max_tokens + token; }
};

// R1. How many tokens each source has. The threads of all carriers take turns. False: leave.
__device__ __forceinline__ bool await_headers(const LowLatencyRun& run, DispatchShared& shared, int thread,
                                              int threads) {
#pragma unroll 1
  for (int src = thread; src < run.num_ranks(); src += threads) {
    std::uint32_t tokens = 0;
    if (run.is_live(src) && !await_header(run, src, false, &tokens)) return false;
    shared.num_tokens[src] = tokens;
    atomicMax(&shared.most_tokens, static_cast<int>(tokens));
  }
  return true;
}

// R2. How many tokens of each source go to each expert here; with `kFromItself` this rank is one of them. The threads
// of all carriers take turns. False: leave.
template <bool kFromItself>
__device__ __forceinline__ bool gather_counts(const Receiver& at, int thread, int threads) {
  const LowLatencyRun& run = at.run;
  const int total = run.num_ranks() * at.params.slot.num_count_units;
  bool ok = true;
#pragma unroll 1
  for (int i = thread; ok && i < total; i += threads) {
    std::uint32_t of_source;
    const int src = static_cast<int>(at.params.by_count_units.divide(static_cast<std::uint32_t>(i), &of_source));
    if (!kFromItself && src == run.rank()) continue;
    uint4 unit = make_uint4(0, 0, 0, run.tag());
    if (run.is_live(src)) {
      const char* address = at.params.slot.counts(run.my_slot(), src) + of_source * layout::kUnitBytes;
      unit = ptx::ld_relaxed_sys_16(address);
      ok = await_unit(run, layout::WaitPhase::kRouting, src, address, &unit);
      if (unit.w != run.tag()) unit = make_uint4(0, 0, 0, run.tag());  // masked meanwhile
    }
    const std::uint32_t words[] = {unit.x, unit.y, unit.z};
#pragma unroll
    for (int w = 0; w < layout::kUnitWords; ++w) {
      const int local = static_cast<int>(of_source) * layout::kUnitWords + w;
      if (local < at.num_local)
        at.counts.here(src, local) = min(words[w], static_cast<std::uint32_t>(run.call.max_tokens));
    }
  }
  return ok;
}

// R3. Where the rows of half of a token's entries go: local expert and packed row of this lane's entry, -1 where there
// is none.
struct Places {
  std::int32_t local = -1, position = -1;

  // `expert` of this lane's entry, or anything else; `before`: tokens of the source before this one that go to it.
  __device__ __forceinline__ Places(const Receiver& at, int src, int expert, std::uint32_t before) {
    const int here = expert - at.first_expert;
    if (here < 0 || here >= at.num_local) return;
    const std::uint32_t row = at.counts.begin(src, here) + before;
    if (row >= static_cast<std::uint32_t>(at.expert_rows)) return;
    local = here;
    position = here * at.expert_rows + static_cast<std::int32_t>(row);
  }
  __device__ __forceinline__ std::uint32_t copies() const { return __ballot_sync(0xffffffffu, position >= 0); }
};

// R4. A part of a row into the packed blocks, a copy for each expert, and its scales.
template <bool kWithScales, class Width>
__device__ __forceinline__ void store_copies(const Receiver& at, const Places& places, std::uint32_t copies,
                                             const LaneTile<Width>& tile, const LaneVectors<Width>& vectors,
                                             std::uint32_t scale) {
  const LowLatencyDispatchArgs& args = at.params.args;
  char* const rows = static_cast<char*>(args.recv_x);
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(args.row_bytes);
  const int block = tile.scale_block();
#pragma unroll 1
  for (std::uint32_t rest = copies; rest != 0; rest &= rest - 1) {
    const int k = first_of(rest);
    const std::uint32_t position = static_cast<std::uint32_t>(__shfl_sync(0xffffffffu, places.position, k));
    tile.store_vectors(rows + static_cast<std::uint64_t>(position) * row_bytes, vectors);
    if constexpr (kWithScales) {
      const int local = __shfl_sync(0xffffffffu, places.local, k);
      if (!tile.has_scale()) continue;
      // (expert * scales + item of the row) * rows + row of the expert
      const int item = args.ue8m0 ? block / 4 : block;
      const std::int64_t to =
          static_cast<std::int64_t>(local * (at.params.num_scales - 1) + item) * at.expert_rows + position;
      if (args.ue8m0)
        static_cast<std::uint8_t*>(args.recv_scales)[4 * to + block % 4] = static_cast<std::uint8_t>(scale >> 23);
      else
        static_cast<std::uint32_t*>(args.recv_scales)[to] = scale;
    }
  }
}

// Scales that a row brought along, from `buffer`.
__device__ __forceinline__ void store_scale_tile(const Receiver& at, const Places& places, std::uint32_t copies,
                                                 const ScaleTile& items, const TileBuffer& buffer) {
  const ScaleRows& scales = at.params.args.scales;
#pragma unroll 1
  for (std::uint32_t rest = copies; rest != 0; rest &= rest - 1) {
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

// A part of a token of this rank's or of a peer's on its way into the packed blocks.
template <class Rows, class Width>
struct PlacedPart {
  const Receiver& at;
  TileBuffer* buffer;
  int src, token, part;

  // R3, R4. `entries(half, &expert, &before)` and `weight(half, local)`, of this lane's entry, and `row(&vectors,
  // &scale)` say what there is; they return false where the call cannot go on, and so does this. The whole warp.
  template <typename Entries, typename Weight, typename Row, typename Scales>
  __device__ __forceinline__ bool place(Entries entries, Weight weight, Row row, Scales scales) const {
    const LowLatencyDispatchParams& params = at.params;
    const LowLatencyDispatchArgs& args = params.args;
    const LaneTile<Width> tile(params.num_vectors, part);
    const bool is_row = kCasts<Rows> || part < params.num_parts;
    LaneVectors<Width> vectors;
    std::uint32_t scale = 0;
    bool there = false;
#pragma unroll 1
    for (int half = 0; half < num_halves<Width::kPlain>(args.ids.topk); ++half) {
      int expert = -1;
      std::uint32_t before = 0;
      if (!entries(half, &expert, &before)) return false;
      const Places places(at, src, expert, before);
      const std::uint32_t copies = places.copies();
      if (part == 0 && entry_of_lane(half) < args.ids.topk) {
        const std::int64_t to = at.item(src, token) * args.ids.topk + entry_of_lane(half);
        // What the combine has to know of a token, and whose rows these are.
        args.recv_pos[to + src * args.ids.topk] = places.position;
        if (places.position >= 0) args.src_info[places.position] = token;
      }
      if (copies == 0) continue;
      if (part == 0 && args.with_weights) {
        float mine = 0;
        if (!weight(half, &mine)) return false;
        if (entry_of_lane(half) < args.ids.topk)
          args.recv_weights[at.item(src, token) * args.ids.topk + entry_of_lane(half)] = mine;
      }
      if (!there && !(is_row ? row(tile, &vectors, &scale) : scales())) return false;
      there = true;
      if (is_row)
        store_copies<kCasts<Rows>>(at, places, copies, tile, vectors, scale);
      else if constexpr (!kCasts<Rows>)
        store_scale_tile(at, places, copies, ScaleTile(args.scales, part - params.num_parts), *buffer);
    }
    return true;
  }
};

// A task of a token as it comes in.
template <class Rows, class Width>
struct ReceivedPart {
  int src = 0, token = 0, part = 0;
  uint4 entries;  // the unit with this lane's entry
  LaneUnits<Width> units;

  // The unit with the word of this lane's entry.
  __device__ __forceinline__ const char* words(const Receiver& at, int half) const {
    return at.params.slot.words(at.run.my_slot(), src, token) +
           entry_of_lane(half) / layout::kUnitWords * layout::kUnitBytes;
  }
  __device__ __forceinline__ const char* row(const Receiver& at) const {
    return at.params.slot.row(at.run.my_slot(), src, token);
  }
  __device__ __forceinline__ void clear(std::uint32_t tag) {
    entries = no_unit(tag);
    units = no_units<Width>(tag);
  }
  // Before it is known whether anything comes.
  __device__ __forceinline__ void load(const Receiver& at) {
    clear(at.run.tag());
    if (lane_id() < at.params.args.ids.topk) entries = ptx::ld_relaxed_sys_16(words(at, 0));
    if (part < at.params.num_parts) LaneTile<Width>(at.params.num_vectors, part).load_units(row(at), &units);
  }
  // The whole warp. False: leave.
  __device__ __forceinline__ bool receive(const Receiver& at, TileBuffer* buffer) {
    const LowLatencyRun& run = at.run;
    const int topk = at.params.args.ids.topk;
    const auto word = [&](const uint4& unit, int half) {
      const int w = entry_of_lane(half) % layout::kUnitWords;
      return w == 0 ? unit.x : w == 1 ? unit.y : unit.z;
    };
    return PlacedPart<Rows, Width>{at, buffer, src, token, part}.place(
        [&](int half, int* expert, std::uint32_t* before) {
          bool ok = true;
          if (entry_of_lane(half) < topk) {
            if (half > 0) entries = no_unit(run.tag());
            ok = await_unit(run, layout::WaitPhase::kRouting, src, words(at, half), &entries);
            const std::uint32_t entry = entries.w == run.tag() ? word(entries, half) : layout::kNoExpert;
            *expert = static_cast<int>(entry & layout::kNoExpert);
            *before = entry >> layout::kExpertBits;
          }
          return __all_sync(0xffffffffu, ok) != 0;
        },
        [&](int half, float* weight) {
          bool ok = true;
          if (entry_of_lane(half) < topk) {
            uint4 unit = no_unit(run.tag());
            ok = await_unit(run, layout::WaitPhase::kWeights, src,
                            words(at, half) + at.params.slot.num_entry_units * layout::kUnitBytes, &unit);
            *weight = __uint_as_float(word(unit, half));
          }
          return __all_sync(0xffffffffu, ok) != 0;
        },
        [&](const LaneTile<Width>& tile, LaneVectors<Width>* vectors, std::uint32_t* scale) {
          const bool ok = await_units<kCasts<Rows>>(run, layout::WaitPhase::kUnits, src, row(at), tile, &units);
          *vectors = to_vectors(units);
          *scale = spare_of(units);
          return ok;
        },
        [&] { return await_scale_tile(at, buffer); });
  }

 private:
  __device__ __forceinline__ bool await_scale_tile(const Receiver& at, TileBuffer* buffer) const {
    const ScaleRows& own = at.params.args.scales;
    const LaneTile<Wide> lane(static_cast<int>((own.num_items * own.item_bytes + 15) / 16), part - at.params.num_parts);
    const char* from = row(at) + at.params.slot.num_tiles * layout::kTileBytes;
    LaneUnits<Wide> wide = no_units<Wide>(at.run.tag());
    if (!await_units<false>(at.run, layout::WaitPhase::kUnits, src, from, lane, &wide)) return false;
    const LaneVectors<Wide> vectors = to_vectors(wide);
#pragma unroll
    for (int j = 0; j < layout::kLaneVectors; ++j)
      reinterpret_cast<uint4*>(buffer->bytes)[32 * j + lane_id()] = vectors.v[j];
    __syncwarp();
    return true;
  }
};

// R3, R4 for a task of this rank's own token in one launch: what is sent to peers goes to the packed blocks here.
template <class Rows, class Width>
__device__ __forceinline__ void place_own(const Receiver& at, const BlockShare& share, TileBuffer* buffer,
                                          const SentPart<Rows, Width>& sent) {
  const LowLatencyDispatchArgs& args = at.params.args;
  const int token = sent.token;
  const auto id_of = [&](int half) {
    return checked_id(half == 0 ? sent.raw : raw_id(args.ids, token, entry_of_lane(half)), at.run.call.num_experts);
  };
  PlacedPart<Rows, Width>{at, buffer, at.run.rank(), token, sent.part}.place(
      [&](int half, int* expert, std::uint32_t* before) {
        const std::int32_t id = id_of(half);
        if (is_repeated(args.ids, token, half, id) || id < 0) return true;
        *expert = id;
        *before = at.counts.before(share, token, id);
        return true;
      },
      [&](int half, float* weight) {
        *weight = merged_weight(args.ids, token, half, id_of(half), args.topk_weights + token * args.weight_stride);
        return true;
      },
      [&](const LaneTile<Width>&, LaneVectors<Width>* vectors, std::uint32_t* scale) {
        *vectors = sent.vectors;
        *scale = sent.spare;
        return true;
      },
      [&] {
        const ScaleTile items(args.scales, sent.part - at.params.num_parts);
        gather_scales(args.scales, token, items, *buffer);
        return true;
      });
}

// K2. Counts of this block's share of the local experts: begin and count of each source's rows, their sum. One warp.
__device__ __forceinline__ void count_rows(const Receiver& at) {
  const LowLatencyDispatchArgs& args = at.params.args;
  const int num_ranks = at.run.num_ranks();
#pragma unroll 1
  for (int local = static_cast<int>(blockIdx.x) + lane_id() * static_cast<int>(gridDim.x); local < at.num_local;
       local += 32 * static_cast<int>(gridDim.x)) {
    std::uint32_t sum = 0;
#pragma unroll 1
    for (int src = 0; src < num_ranks; ++src) {
      const std::uint32_t count = at.counts.from(src, local);
      args.layout_range[static_cast<std::int64_t>(local) * num_ranks + src] =
          static_cast<std::int64_t>(sum) << 32 | count;
      sum += count;
    }
    args.recv_count[local] = static_cast<std::int32_t>(sum);
    if (args.recv_stats != nullptr) args.recv_stats[local] += static_cast<std::int32_t>(sum);
  }
}

}  // namespace deep_moe::kernels
