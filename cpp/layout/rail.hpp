// Rings between the ranks of equal local index on different nodes (docs/internode.md): where they lie, and which chunk
// uses which slot with which tag. Both ends compute the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.hpp"
#include "layout/workspace.hpp"

namespace deep_moe::layout {

inline constexpr int kChunkRows = 8;

// Few peers need deep rings to keep the network busy, many share it.
DM_HOST_DEVICE constexpr int ring_slots(int num_nodes) {
  const int slots = num_nodes > 1 ? 128 / (num_nodes - 1) : 0;
  return slots > 32 ? 32 : slots < 4 ? 4 : slots;
}

// What an arrival or credit word says: chunk `number` (from 1 on) of its ring, in this generation. 0 is no chunk.
DM_HOST_DEVICE constexpr std::uint64_t pack_chunk_tag(std::uint64_t generation, std::uint64_t number) {
  return (generation << 48) | number;
}

// Of one row in a slot: x, scales, ids, weights as in RowFormat; then source token and positions.
struct RailRow {
  std::size_t scales = 0, topk_idx = 0, topk_weights = 0;
  std::size_t token = 0;      // i32
  std::size_t positions = 0;  // i32[L]: which of the source's rows for that rank of the node it is, or -1
  std::size_t stride = 0;

  RailRow() = default;
  DM_HOST_DEVICE RailRow(std::size_t row_bytes, std::size_t scale_bytes, std::size_t idx_bytes,
                         std::size_t weight_bytes, int num_local_ranks) {
    scales = align_up(row_bytes, 16);
    topk_idx = align_up(scales + scale_bytes, 8);
    topk_weights = topk_idx + idx_bytes;
    token = align_up(topk_weights + weight_bytes, 4);
    positions = token + 4;
    stride = align_up(positions + 4 * static_cast<std::size_t>(num_local_ranks), 16);
  }
};

struct RailShape {
  int num_nodes = 0;
  int num_slots = 0;  // of a ring
  int chunk_rows = kChunkRows;
  std::size_t row_stride = 0;    // the widest row of any call
  std::size_t record_bytes = 0;  // announcement and counts
};

// The regions of one rank's symmetric block, in order. Sizes and offsets both derive from this list.
enum class RailRegion : int {
  kChunkArrived,   // u64[N][S]      by peer's node: tag of the chunk that lies in the slot
  kChunkCredit,    // u64[N][S]      by peer's node: tag of the chunk that the peer has read from its slot
  kNotifyArrived,  // u64[depth][N]  by peer's node: epoch of the record
  kNotifyIn,       // record[depth][N]
  kNotifyOut,      // record[depth][N]
  kRingSlots,      // chunk[N][S]
  kSendSlots,      // chunk[N][S]
  kCount,
};

class RailLayout {
 public:
  RailLayout() = default;
  DM_HOST_DEVICE explicit RailLayout(const RailShape& shape) : shape_(shape) {
    const std::size_t slots = static_cast<std::size_t>(shape.num_nodes) * static_cast<std::size_t>(shape.num_slots);
    const std::size_t records = static_cast<std::size_t>(kAnnounceDepth) * static_cast<std::size_t>(shape.num_nodes);
    const std::size_t sizes[] = {
        slots * sizeof(std::uint64_t), slots * sizeof(std::uint64_t), records * sizeof(std::uint64_t),
        records * record_stride(),     records * record_stride(),     slots * chunk_bytes(),
        slots * chunk_bytes(),
    };
    for (int i = 0; i < static_cast<int>(RailRegion::kCount); ++i) {
      offsets_[i] = bytes_;
      bytes_ = align_up(bytes_ + sizes[i], kAlign);
    }
  }

  DM_HOST_DEVICE const RailShape& shape() const { return shape_; }
  DM_HOST_DEVICE std::size_t bytes() const { return bytes_; }
  DM_HOST_DEVICE std::size_t chunk_bytes() const {
    return align_up(static_cast<std::size_t>(shape_.chunk_rows) * shape_.row_stride, kAlign);
  }

  DM_HOST_DEVICE std::size_t word(RailRegion region, int node, int slot) const {
    return offset(region, node * shape_.num_slots + slot, sizeof(std::uint64_t));
  }
  DM_HOST_DEVICE std::size_t chunk(RailRegion region, int node, int slot) const {
    return offset(region, node * shape_.num_slots + slot, chunk_bytes());
  }
  DM_HOST_DEVICE std::size_t notify_word(std::uint64_t epoch, int node) const {
    return offset(RailRegion::kNotifyArrived, notify_slot(epoch) * shape_.num_nodes + node, sizeof(std::uint64_t));
  }
  DM_HOST_DEVICE std::size_t record(RailRegion region, std::uint64_t epoch, int node) const {
    return offset(region, notify_slot(epoch) * shape_.num_nodes + node, record_stride());
  }

 private:
  DM_HOST_DEVICE static int notify_slot(std::uint64_t epoch) { return static_cast<int>(epoch % kAnnounceDepth); }
  DM_HOST_DEVICE std::size_t record_stride() const { return align_up(shape_.record_bytes, 64); }
  DM_HOST_DEVICE std::size_t offset(RailRegion region, int index, std::size_t stride) const {
    return offsets_[static_cast<int>(region)] + static_cast<std::size_t>(index) * stride;
  }

  RailShape shape_;
  std::size_t bytes_ = 0;
  std::size_t offsets_[static_cast<int>(RailRegion::kCount)] = {};
};

// Where a row of a call travels: `position` counts the call's rows in this ring.
struct RailPlace {
  std::uint64_t number;  // of the chunk in its ring, from 1 on
  int slot;
  int row;       // inside the chunk
  int num_rows;  // of the chunk
};

// The chunks that one call uses in one ring. Numbers go on from call to call.
struct RailCall {
  std::uint64_t first_number = 1;  // of its first chunk
  std::int64_t num_rows = 0;

  DM_HOST_DEVICE std::int64_t num_chunks(const RailShape& shape) const {
    return (num_rows + shape.chunk_rows - 1) / shape.chunk_rows;
  }
  DM_HOST_DEVICE RailPlace place(const RailShape& shape, std::int64_t position) const {
    const std::int64_t chunk = position / shape.chunk_rows;
    const std::int64_t left = num_rows - chunk * shape.chunk_rows;
    const std::uint64_t number = first_number + static_cast<std::uint64_t>(chunk);
    return {number, static_cast<int>((number - 1) % static_cast<std::uint64_t>(shape.num_slots)),
            static_cast<int>(position % shape.chunk_rows),
            static_cast<int>(left < shape.chunk_rows ? left : shape.chunk_rows)};
  }
};

}  // namespace deep_moe::layout
