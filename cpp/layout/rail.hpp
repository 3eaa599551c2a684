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
  return slots < 4 ? 4 : slots;
}

// What an arrival or credit word says: chunk `number` (from 1 on) of its ring, in this generation. 0 is no chunk.
inline constexpr int kChunkNumberBits = 48;
DM_HOST_DEVICE constexpr std::uint64_t pack_chunk_tag(std::uint64_t generation, std::uint64_t number) {
  return (generation << kChunkNumberBits) | number;
}
DM_HOST_DEVICE constexpr std::uint64_t chunk_number(std::uint64_t tag) {
  return tag & ((std::uint64_t{1} << kChunkNumberBits) - 1);
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

// The widest rows that a slot has room for where nobody says otherwise: 7168 bf16 elements, 16 ids.
inline constexpr std::size_t kDefaultSlotBytes = align_up(kChunkRows * (14336 + 448 + 16 * 12 + 4 + 4 * 16), kAlign);

struct RailShape {
  int num_nodes = 0;
  int num_slots = 0;             // of a ring
  std::size_t slot_bytes = 0;    // a multiple of kAlign
  std::size_t record_bytes = 0;  // announcement and counts
};

// The regions of one rank's symmetric block, in order. Sizes and offsets both derive from this list.
enum class RailRegion : int {
  kChunkArrived,   // u64[N-1][S]      by peer's node: tag of the chunk that lies in the slot
  kChunkCredit,    // u64[N-1][S]      by peer's node: tag of the chunk that the peer has read from its slot
  kNotifyArrived,  // u64[depth][N-1]  by peer's node: epoch of the record
  kNotifyIn,       // record[depth][N-1]
  kNotifyOut,      // record[depth][N-1]
  kRingSlots,      // slot[N-1][S]
  kSendSlots,      // slot[N-1][S]
  kCount,
};

// A ring lies at its peer's place among the other nodes, counted from the owner's node on: nobody has one for itself.
class RailLayout {
 public:
  RailLayout() = default;
  DM_HOST_DEVICE explicit RailLayout(const RailShape& shape) : shape_(shape) {
    const int peers = shape.num_nodes > 1 ? shape.num_nodes - 1 : 0;
    const std::size_t slots = static_cast<std::size_t>(peers) * static_cast<std::size_t>(shape.num_slots);
    const std::size_t records = static_cast<std::size_t>(kAnnounceDepth) * static_cast<std::size_t>(peers);
    const std::size_t sizes[] = {
        slots * sizeof(std::uint64_t), slots * sizeof(std::uint64_t), records * sizeof(std::uint64_t),
        records * record_stride(),     records * record_stride(),     slots * shape.slot_bytes,
        slots * shape.slot_bytes,
    };
    for (int i = 0; i < static_cast<int>(RailRegion::kCount); ++i) {
      offsets_[i] = bytes_;
      bytes_ = align_up(bytes_ + sizes[i], kAlign);
    }
  }

  DM_HOST_DEVICE const RailShape& shape() const { return shape_; }
  DM_HOST_DEVICE std::size_t bytes() const { return bytes_; }

  // All in the block of a rank of node `owner`, for its peer of node `peer`.
  DM_HOST_DEVICE std::size_t word(RailRegion region, int owner, int peer, int slot) const {
    return offset(region, ring(owner, peer) * shape_.num_slots + slot, sizeof(std::uint64_t));
  }
  DM_HOST_DEVICE std::size_t slot(RailRegion region, int owner, int peer, int slot) const {
    return offset(region, ring(owner, peer) * shape_.num_slots + slot, shape_.slot_bytes);
  }
  DM_HOST_DEVICE std::size_t notify_word(std::uint64_t epoch, int owner, int peer) const {
    return offset(RailRegion::kNotifyArrived, record_index(epoch, owner, peer), sizeof(std::uint64_t));
  }
  DM_HOST_DEVICE std::size_t record(RailRegion region, std::uint64_t epoch, int owner, int peer) const {
    return offset(region, record_index(epoch, owner, peer), record_stride());
  }

 private:
  DM_HOST_DEVICE int ring(int owner, int peer) const {
    return (peer - owner - 1 + shape_.num_nodes) % shape_.num_nodes;
  }
  DM_HOST_DEVICE int record_index(std::uint64_t epoch, int owner, int peer) const {
    return static_cast<int>(epoch % kAnnounceDepth) * (shape_.num_nodes - 1) + ring(owner, peer);
  }
  DM_HOST_DEVICE std::size_t record_stride() const { return align_up(shape_.record_bytes, 64); }
  DM_HOST_DEVICE std::size_t offset(RailRegion region, int index, std::size_t stride) const {
    return offsets_[static_cast<int>(region)] + static_cast<std::size_t>(index) * stride;
  }

  RailShape shape_;
  std::size_t bytes_ = 0;
  std::size_t offsets_[static_cast<int>(RailRegion::kCount)] = {};
};

// What a peer's record holds: its announcement, rows for the node and for every rank, entries for the node's experts.
inline constexpr std::size_t rail_record_bytes(int num_nodes, int num_local_ranks) {
  const int num_ranks = num_nodes * num_local_ranks;
  return sizeof(Announce) + 4 * static_cast<std::size_t>(num_ranks + 1) +
         4 * static_cast<std::size_t>(num_local_ranks) * static_cast<std::size_t>(expert_count_stride(num_ranks));
}

// The block with slots of this size, and the block that fits in `bytes`; 0 bytes takes the default slots.
inline RailLayout rail_layout(int num_nodes, int num_local_ranks, std::size_t slot_bytes) {
  return RailLayout(
      {num_nodes, ring_slots(num_nodes), align_up(slot_bytes, kAlign), rail_record_bytes(num_nodes, num_local_ranks)});
}
inline RailLayout rail_layout_within(int num_nodes, int num_local_ranks, std::size_t bytes) {
  if (bytes == 0) return rail_layout(num_nodes, num_local_ranks, kDefaultSlotBytes);
  constexpr std::size_t kMaxSlotBytes = std::size_t{4} << 20;  // what else there is serves low latency
  const std::size_t fixed = rail_layout(num_nodes, num_local_ranks, 0).bytes();
  const std::size_t slots =
      2 * static_cast<std::size_t>(num_nodes - 1) * static_cast<std::size_t>(ring_slots(num_nodes));
  const std::size_t slot = bytes > fixed ? (bytes - fixed) / slots / kAlign * kAlign : 0;
  return rail_layout(num_nodes, num_local_ranks, slot > kMaxSlotBytes ? kMaxSlotBytes : slot);
}

// Where a row of a call travels: `position` counts the call's rows in this ring.
struct RailPlace {
  std::uint64_t number;  // of the chunk in its ring, from 1 on
  int slot;
  int row;       // inside the chunk
  int num_rows;  // of the chunk
};

// The chunks that one call uses in one ring. Numbers go on from call to call; where the first one is given with the
// generation above it, as a tag, so are those of all places.
struct RailCall {
  std::uint64_t first_number = 1;  // of its first chunk
  std::int64_t num_rows = 0;
  std::size_t row_stride = 0;
  int chunk_rows = kChunkRows;  // as many of its rows as a slot has room for, up to kChunkRows
  std::uint32_t first_slot = 0;

  RailCall() = default;
  DM_HOST_DEVICE RailCall(const RailShape& shape, std::uint64_t first_number_, std::int64_t num_rows_,
                          std::size_t row_stride_)
      : first_number(first_number_), num_rows(num_rows_), row_stride(row_stride_) {
    const std::size_t fit = shape.slot_bytes / row_stride_;
    chunk_rows = fit < kChunkRows ? static_cast<int>(fit) : kChunkRows;
    first_slot =
        static_cast<std::uint32_t>(chunk_number(first_number_ - 1) % static_cast<std::uint64_t>(shape.num_slots));
  }

  DM_HOST_DEVICE std::int64_t num_chunks() const { return (num_rows + chunk_rows - 1) / chunk_rows; }
  DM_HOST_DEVICE std::uint64_t next_number() const { return first_number + static_cast<std::uint64_t>(num_chunks()); }
  DM_HOST_DEVICE RailPlace place(const RailShape& shape, std::int64_t position) const {
    // Rows of a call are counted in 32 bits, and kernels divide often.
    const std::uint32_t at = static_cast<std::uint32_t>(position), rows = static_cast<std::uint32_t>(chunk_rows);
    const std::uint32_t chunk = at / rows, left = static_cast<std::uint32_t>(num_rows) - chunk * rows;
    return {first_number + chunk, static_cast<int>((first_slot + chunk) % static_cast<std::uint32_t>(shape.num_slots)),
            static_cast<int>(at - chunk * rows), static_cast<int>(left < rows ? left : rows)};
  }
};

}  // namespace deep_moe::layout
