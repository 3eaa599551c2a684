// Low-latency calls between nodes: what a rank puts straight into the memory of each other rank, and where that lies
// (docs/internode.md, P1 to P5). Every pair of ranks has a part of its own in every slot; where it lies does not depend
// on the call, so a rank that makes another call writes into its own parts alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/low_latency_words.hpp"

namespace deep_moe::layout {

// At the beginning of each message. The reason of a refusal follows it, and nothing else.
struct alignas(128) DirectHeader {
  std::uint64_t hash;
  CallSignature signature;
  std::uint32_t num_tokens;  // of the sender
  std::uint32_t num_rows;    // that follow
  std::uint32_t status;      // CallStatus
  std::uint32_t num_reason_bytes;
};
static_assert(sizeof(DirectHeader) == 128);
inline constexpr std::size_t kDirectRefusalBytes = sizeof(DirectHeader) + kReasonBytes;
static_assert(kDirectRefusalBytes % 16 == 0);

// A message: header; for each token which of the rows that follow is its first, or -1; counts; rows. A dispatch's rows
// go from the owner of the tokens to a rank of their experts, a combine's the other way.
struct DirectMessage {
  std::size_t first_rows = sizeof(DirectHeader);  // i32[M], by token
  std::size_t counts = 0;                         // dispatch: u32[experts of the receiver], tokens for each
  std::size_t rows = 0;
  std::size_t row_stride = 0;
  std::size_t scales = 0;   // inside a row
  std::size_t entries = 0;  // dispatch: u32[K] as in low_latency_words.hpp; then weights f32[K], if any; then the token
  std::size_t weights = 0;
  std::size_t token = 0;

  DirectMessage() = default;
  // Dispatch. `num_local`: experts of a rank, at most.
  DM_HOST_DEVICE DirectMessage(std::int64_t max_tokens, int num_local, int topk, std::int64_t row_bytes,
                               std::int64_t scale_bytes, bool with_weights) {
    const std::size_t words = 4 * static_cast<std::size_t>(topk);
    counts = behind_table(max_tokens);
    rows = align_up(counts + 4 * static_cast<std::size_t>(num_local), 16);
    scales = static_cast<std::size_t>(row_bytes);
    entries = align_up(scales + static_cast<std::size_t>(scale_bytes), 16);
    weights = entries + words;
    token = weights + (with_weights ? words : 0);
    row_stride = align_up(token + 4, 16);
  }
  // Combine.
  DM_HOST_DEVICE DirectMessage(std::int64_t max_tokens, std::int64_t row_bytes)
      : row_stride(static_cast<std::size_t>(row_bytes)) {
    counts = rows = behind_table(max_tokens);
  }

  DM_HOST_DEVICE std::size_t bytes(std::int64_t num_rows) const {
    return rows + static_cast<std::size_t>(num_rows) * row_stride;
  }

 private:
  DM_HOST_DEVICE static std::size_t behind_table(std::int64_t max_tokens) {
    return sizeof(DirectHeader) + align_up(4 * static_cast<std::size_t>(max_tokens), 16);
  }
};

// For messages to a rank, where nobody says otherwise.
inline constexpr std::size_t kDefaultDirectBytes = std::size_t{64} << 20;

// One rank's part of the network's memory. Words first: as the network sets them, by rank of the group; then this
// rank's own; then parts for the rows of ranks of other nodes, and those that go to them.
class DirectLayout {
 public:
  DirectLayout() = default;
  // `begin`: what is in front of it in the network's memory.
  DM_HOST_DEVICE DirectLayout(int num_nodes, int num_local_ranks, std::size_t part_bytes, std::size_t begin)
      : num_ranks_(num_nodes * num_local_ranks),
        num_remote_((num_nodes - 1) * num_local_ranks),
        num_local_(num_local_ranks),
        part_bytes_(align_up(part_bytes, kAlign)),
        begin_(align_up(begin, kAlign)) {}

  DM_HOST_DEVICE std::size_t part_bytes() const { return part_bytes_; }
  DM_HOST_DEVICE std::size_t begin() const { return begin_; }
  DM_HOST_DEVICE std::size_t end() const { return parts() + 2 * parts_bytes(); }

  // Epochs: of the message of `src` that lies in its part; up to which `dst` has read what was put to it.
  DM_HOST_DEVICE std::size_t arrived(int slot, int src) const { return word(slot * num_ranks_ + src); }
  DM_HOST_DEVICE std::size_t consumed(int slot, int dst) const {
    return word((kLowLatencySlots + slot) * num_ranks_ + dst);
  }
  // Own: blocks that have filled their part of the message to a rank, blocks of a launch that are through. Zero between
  // launches.
  DM_HOST_DEVICE std::size_t filled(int dst) const { return word(2 * kLowLatencySlots * num_ranks_ + dst); }
  DM_HOST_DEVICE std::size_t finished() const { return word((2 * kLowLatencySlots + 1) * num_ranks_); }
  DM_HOST_DEVICE std::size_t own_words() const { return filled(0); }
  DM_HOST_DEVICE std::size_t own_words_bytes() const { return parts() - own_words(); }

  // `place`: where a rank stands among those of other nodes, see DirectRanks.
  DM_HOST_DEVICE std::size_t in(int slot, int place) const { return parts() + part(slot, place); }
  DM_HOST_DEVICE std::size_t out(int slot, int place) const { return parts() + parts_bytes() + part(slot, place); }

  // Staging of node mates: parts by local index in each slot, with a word in front of them for each: the epoch of the
  // message that lies there.
  DM_HOST_DEVICE std::size_t mates_slot_bytes() const {
    return mates_words() + static_cast<std::size_t>(num_local_) * part_bytes_;
  }
  DM_HOST_DEVICE std::size_t mates_word(int local) const { return static_cast<std::size_t>(local) * 8; }
  DM_HOST_DEVICE std::size_t mates_part(int local) const {
    return mates_words() + static_cast<std::size_t>(local) * part_bytes_;
  }

 private:
  DM_HOST_DEVICE std::size_t word(int index) const { return begin_ + 8 * static_cast<std::size_t>(index); }
  DM_HOST_DEVICE std::size_t parts() const { return align_up(finished() + 8, kAlign); }
  DM_HOST_DEVICE std::size_t parts_bytes() const {
    return static_cast<std::size_t>(kLowLatencySlots) * static_cast<std::size_t>(num_remote_) * part_bytes_;
  }
  DM_HOST_DEVICE std::size_t part(int slot, int place) const {
    return (static_cast<std::size_t>(slot) * static_cast<std::size_t>(num_remote_) + static_cast<std::size_t>(place)) *
           part_bytes_;
  }
  DM_HOST_DEVICE std::size_t mates_words() const { return align_up(8 * static_cast<std::size_t>(num_local_), kAlign); }

  int num_ranks_ = 0, num_remote_ = 0, num_local_ = 0;
  std::size_t part_bytes_ = 0, begin_ = 0;
};

// Which rank stands where.
struct DirectRanks {
  int num_nodes = 0, num_local_ranks = 0, own_node = 0;
  std::uint8_t node_of[kMaxKernelRanks] = {}, local_of[kMaxKernelRanks] = {};
  std::uint8_t rank_table[kMaxKernelRanks] = {};  // [N][L]

  DM_HOST_DEVICE bool is_mate(int rank) const { return node_of[rank] == own_node; }
  // Where `of` stands among the ranks of other nodes than `owner`'s, from the node behind that on.
  DM_HOST_DEVICE int place(int owner, int of) const {
    return (node_of[of] - node_of[owner] - 1 + num_nodes) % num_nodes * num_local_ranks + local_of[of];
  }
  // All ranks, from the next node's on, so that not all send to the same ones first.
  DM_HOST_DEVICE int in_turn(int own, int i) const {
    const int node = (own_node + 1 + i / num_local_ranks) % num_nodes;
    return rank_table[node * num_local_ranks + (local_of[own] + i) % num_local_ranks];
  }
};

}  // namespace deep_moe::layout
