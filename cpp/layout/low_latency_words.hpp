// What low-latency calls on GPUs put into the staging of their peers, and the words of their own that outlive a call.
//
// Everything that crosses a link does so in units: 12 bytes of payload and the low 32 bits of the call's epoch, loaded
// and stored whole. A unit is its own flag; nothing is ever cleared, and what an earlier call has left is never taken
// for this one's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/notify_words.hpp"

namespace deep_moe::layout {

inline constexpr int kUnitBytes = 16;
inline constexpr int kUnitPayload = 12;
inline constexpr int kUnitWords = kUnitPayload / 4;
// What a warp sends or receives at a time: 2 vectors of 16 bytes a lane, as 3 units. Vector j of a lane is the
// (32 j + lane)-th of the tile, and unit j as well: a lane's words change from one form to the other without leaving
// it. The third word of unit 1 is left over: it has the scale of vector lane % 2, or the tag once more.
inline constexpr int kLaneVectors = 2;
inline constexpr int kLaneUnits = 3;
static_assert(kLaneVectors * 16 + 4 == kLaneUnits * kUnitPayload);
inline constexpr int kTileVectors = 32 * kLaneVectors;
inline constexpr int kTilePayload = 16 * kTileVectors;
inline constexpr int kTileBytes = 32 * kLaneUnits * kUnitBytes;

// An entry of a token as it travels: its expert, or kNoExpert where it has no row, and how many tokens of the same
// source before this one go to that expert.
inline constexpr int kExpertBits = 15;
inline constexpr std::uint32_t kNoExpert = (1u << kExpertBits) - 1;
inline constexpr std::int64_t kMostLowLatencyTokens = (1 << 16) - 1;  // M
static_assert(kMaxExperts < static_cast<int>(kNoExpert) && kMostLowLatencyTokens < 1ll << (32 - kExpertBits));

DM_HOST_DEVICE constexpr int units_for(std::int64_t count, int per_unit) {
  return static_cast<int>((count + per_unit - 1) / per_unit);
}

// Of one rank, for its own kernels.
struct LowLatencyState {
  std::uint64_t sent_epoch[kLowLatencySlots];  // last call that wrote the slot of its peers
  std::uint64_t done_epoch[kLowLatencySlots];  // last call whose rows in this rank's slot have been read
  std::uint64_t ready_epoch;                   // this call may write its slot without another look at its peers
  std::uint64_t masked;                        // ranks, as bits, that are neither sent to nor waited for
  std::uint64_t trouble[kLowLatencySlots];     // last call in which some peer has made another call or refused
};
static_assert(sizeof(LowLatencyState) <= kLowLatencyStateBytes);

// One slot of one rank's staging during a dispatch: a header a source, then how many of its tokens go to each expert
// here, then its tokens: entries, for every rank; weights and rows, where there is an expert.
struct LowLatencyDispatchSlot {
  int num_tiles = 0;             // of a row's data
  int num_scale_tiles = 0;       // of a row's scales as bytes, if they are not the library's
  int num_count_units = 0;       // of one source
  int num_entry_units = 0;       // of one token
  int num_weight_units = 0;      // behind them
  std::size_t rows_begin = 0;    // bytes into the slot
  std::size_t row_stride = 0;    // token t of source s: row s * M + t
  std::size_t tiles_offset = 0;  // inside a row
  std::size_t total = 0;
  std::int64_t max_tokens = 0;
  int num_ranks = 0;

  LowLatencyDispatchSlot() = default;
  // `num_local`: experts of a rank, at most. `scale_bytes`: of a row that brings its scales along, else 0.
  DM_HOST_DEVICE LowLatencyDispatchSlot(int num_ranks_, std::int64_t max_tokens_, int num_local, int topk,
                                        std::int64_t row_bytes, std::int64_t scale_bytes, bool weights)
      : max_tokens(max_tokens_), num_ranks(num_ranks_) {
    const std::size_t tokens = static_cast<std::size_t>(max_tokens), ranks = static_cast<std::size_t>(num_ranks);
    num_tiles = units_for(row_bytes, kTilePayload);
    num_scale_tiles = units_for(scale_bytes, kTilePayload);
    num_count_units = units_for(num_local, kUnitWords);
    num_entry_units = units_for(topk, kUnitWords);
    num_weight_units = weights ? num_entry_units : 0;
    rows_begin = align_up(ranks * static_cast<std::size_t>(1 + num_count_units) * kUnitBytes, 128);
    tiles_offset = align_up(static_cast<std::size_t>(num_entry_units + num_weight_units) * kUnitBytes, 128);
    row_stride = tiles_offset + static_cast<std::size_t>(num_tiles + num_scale_tiles) * kTileBytes;
    total = rows_begin + ranks * tokens * row_stride;
  }

  DM_HOST_DEVICE char* header(char* slot, int src) const { return slot + src * kUnitBytes; }
  DM_HOST_DEVICE char* counts(char* slot, int src) const {
    return slot + (num_ranks + src * num_count_units) * kUnitBytes;
  }
  // Entries, then weights.
  DM_HOST_DEVICE char* words(char* slot, int src, std::int64_t token) const {
    return slot + rows_begin + static_cast<std::size_t>(src * max_tokens + token) * row_stride;
  }
  DM_HOST_DEVICE char* row(char* slot, int src, std::int64_t token) const {
    return words(slot, src, token) + tiles_offset;
  }
};

// The same during a combine: a header a peer, weights that owners send ahead, and rows for this rank's tokens: token t
// from holder h at h * M + t, or by expert, entry (t, k) of topk_idx at t * K + k.
struct LowLatencyCombineSlot {
  int num_tiles = 0;
  int num_weight_units = 0;
  std::size_t weights_begin = 0;
  std::size_t rows_begin = 0;
  std::size_t row_stride = 0;
  std::size_t total = 0;
  std::int64_t max_tokens = 0;
  int topk = 0;

  LowLatencyCombineSlot() = default;
  DM_HOST_DEVICE LowLatencyCombineSlot(int num_ranks, std::int64_t max_tokens_, int topk_, std::int64_t row_bytes,
                                       bool by_expert)
      : max_tokens(max_tokens_), topk(topk_) {
    const std::size_t tokens = static_cast<std::size_t>(max_tokens), ranks = static_cast<std::size_t>(num_ranks);
    num_tiles = units_for(row_bytes, kTilePayload);
    num_weight_units = units_for(topk, kUnitWords);
    weights_begin = ranks * kUnitBytes;
    rows_begin =
        align_up(weights_begin + ranks * tokens * static_cast<std::size_t>(num_weight_units) * kUnitBytes, 128);
    row_stride = static_cast<std::size_t>(num_tiles) * kTileBytes;
    total = rows_begin + tokens * static_cast<std::size_t>(by_expert ? topk : num_ranks) * row_stride;
  }

  DM_HOST_DEVICE char* header(char* slot, int peer) const { return slot + peer * kUnitBytes; }
  DM_HOST_DEVICE char* weights(char* slot, int owner, std::int64_t token) const {
    return slot + weights_begin +
           static_cast<std::size_t>((owner * max_tokens + token) * num_weight_units) * kUnitBytes;
  }
  DM_HOST_DEVICE char* reduced_row(char* slot, int holder, std::int64_t token) const {
    return slot + rows_begin + static_cast<std::size_t>(holder * max_tokens + token) * row_stride;
  }
  DM_HOST_DEVICE char* expert_row(char* slot, std::int64_t token, int k) const {
    return slot + rows_begin + static_cast<std::size_t>(token * topk + k) * row_stride;
  }
};

}  // namespace deep_moe::layout
