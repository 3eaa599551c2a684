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
// What a warp sends or receives at a time: 3 vectors of 16 bytes a lane, as 4 units. Vector j of a lane is the
// (32 j + lane)-th of the tile, and unit j as well: a lane's words change from one form to the other without leaving
// it.
inline constexpr int kLaneVectors = 3;
inline constexpr int kLaneUnits = 4;
static_assert(kLaneVectors * 16 == kLaneUnits * kUnitPayload);
inline constexpr int kTileVectors = 32 * kLaneVectors;
inline constexpr int kTilePayload = 16 * kTileVectors;
inline constexpr int kTileBytes = 32 * kLaneUnits * kUnitBytes;
inline constexpr int kScaleUnitsPerTile = 4;  // one for every eight lanes, with the scales of their three vectors
inline constexpr int kIdsPerUnit = 6;
inline constexpr int kFloatsPerUnit = 3;

// An id as it travels: kNoExpert, or a global expert, marked if it stands further to the front of its row as well.
inline constexpr std::uint32_t kNoExpert = 0x7fff;
inline constexpr std::uint32_t kRepeatedExpert = 0x8000;
static_assert(kMaxExperts < static_cast<int>(kNoExpert));

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

// One slot of one rank's staging during a dispatch: a header a source, then the ids of all its tokens (for every rank,
// so that each can tell where rows go), then the rows of those tokens that have an expert here.
struct LowLatencyDispatchSlot {
  int num_tiles = 0;        // of a row's data
  int num_scale_tiles = 0;  // of a row's scales as bytes, if they are not the library's
  int num_scale_units = 0;  // else
  int num_weight_units = 0;
  int num_id_units = 0;            // of one token
  std::size_t ids_stride = 0;      // bytes from one source's ids to the next's
  std::size_t rows_begin = 0;      // bytes into the slot
  std::size_t row_stride = 0;      // token t of source s: row s * M + t
  std::size_t scales_offset = 0;   // inside a row
  std::size_t weights_offset = 0;  // inside a row
  std::size_t total = 0;
  std::int64_t max_tokens = 0;
  int num_ranks = 0;

  LowLatencyDispatchSlot() = default;
  // `scale_bytes`: of a row that brings its scales along, else 0.
  DM_HOST_DEVICE LowLatencyDispatchSlot(int num_ranks_, std::int64_t max_tokens_, int topk, std::int64_t row_bytes,
                                        std::int64_t scale_bytes, bool cast, bool weights)
      : max_tokens(max_tokens_), num_ranks(num_ranks_) {
    const std::size_t tokens = static_cast<std::size_t>(max_tokens), ranks = static_cast<std::size_t>(num_ranks);
    num_tiles = units_for(row_bytes, kTilePayload);
    num_scale_tiles = units_for(scale_bytes, kTilePayload);
    num_scale_units = cast ? num_tiles * kScaleUnitsPerTile : 0;
    num_weight_units = weights ? units_for(topk, kFloatsPerUnit) : 0;
    num_id_units = units_for(topk, kIdsPerUnit);
    ids_stride = tokens * static_cast<std::size_t>(num_id_units) * kUnitBytes;
    rows_begin = align_up(ranks * (kUnitBytes + ids_stride), 128);
    scales_offset = static_cast<std::size_t>(num_tiles) * kTileBytes;
    weights_offset = scales_offset + static_cast<std::size_t>(num_scale_tiles) * kTileBytes +
                     static_cast<std::size_t>(num_scale_units) * kUnitBytes;
    row_stride = align_up(weights_offset + static_cast<std::size_t>(num_weight_units) * kUnitBytes, 128);
    total = rows_begin + ranks * tokens * row_stride;
  }

  DM_HOST_DEVICE char* header(char* slot, int src) const { return slot + src * kUnitBytes; }
  DM_HOST_DEVICE char* ids(char* slot, int src, std::int64_t token) const {
    return slot + num_ranks * kUnitBytes + static_cast<std::size_t>(src) * ids_stride +
           static_cast<std::size_t>(token * num_id_units) * kUnitBytes;
  }
  DM_HOST_DEVICE char* row(char* slot, int src, std::int64_t token) const {
    return slot + rows_begin + static_cast<std::size_t>(src * max_tokens + token) * row_stride;
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
    num_weight_units = units_for(topk, kFloatsPerUnit);
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
