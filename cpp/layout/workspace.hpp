// The workspace: the control words of one rank, written by its peers (and by itself) and mapped by all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.hpp"
#include "layout/words.hpp"

namespace deep_moe::layout {

// The regions, in order. Sizes and addresses both derive from this list.
enum class Region : int {
  kControl,        // Control, one
  kAnnounce,       // Announce[depth][R]      by source
  kRegrow,         // Regrow[depth][R]        by source
  kAbort,          // Abort[R]                by source
  kResetProposal,  // Word[R]                 by peer: (generation, epoch) it resets to, 0 while it is not in reset()
  kResetAgreed,    // Word[R]                 by peer: the largest proposal it has seen, in reset()
  kDeparted,       // Word[R]                 by peer: 1 once it has destroyed its Buffer
  kRowsDone,       // Word[R]                 by source: pack(epoch, waves whose rows are all here)
  kWindow,         // Word[R]                 by receiver: pack(epoch, waves it has drained)
  kRowsReady,      // Word[R]                 by holder: pack(epoch, rows of its combine input that are ready)
  kRowsConsumed,   // Word[R]                 by puller: pack(epoch, row of mine up to which it has pulled)
  kPullDone,       // Word[R]                 by puller: epoch of the combine whose pulls it has finished
  kArrival,        // Word[slots][R]          low latency, by sender: pack(epoch, rows + 1)
  kWeightArrival,  // Word[slots][R]          low latency combine, by owner: pack(epoch, rows + 1) weights sent ahead
  kConsumed,       // Word[slots][R]          low latency, by receiver: epoch whose staging it has read
  kRankCounts,     // i32[depth][R src][R dst]
  kExpertCounts,   // i32[depth][R src][Lmax] rows of the source for each of my experts
  kNodeRows,       // i32[depth][R src]       tokens of the source that go to my node
  kCount,
};

struct alignas(64) Control {
  std::uint64_t magic;
  std::uint32_t doorbell;     // bumped by whoever wrote something here; futex
  std::uint32_t num_waiters;  // sleeping on the doorbell
};
inline constexpr std::uint64_t kWorkspaceMagic = 0x6465'6570'6d6f'6531ull;

DM_HOST_DEVICE constexpr std::size_t align_up(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

inline constexpr int expert_count_stride(int num_ranks) { return (kMaxExperts + num_ranks - 1) / num_ranks; }

inline constexpr std::size_t region_bytes(Region region, int num_ranks) {
  const std::size_t r = static_cast<std::size_t>(num_ranks);
  switch (region) {
    case Region::kControl: return sizeof(Control);
    case Region::kAnnounce: return sizeof(Announce) * kAnnounceDepth * r;
    case Region::kRegrow: return sizeof(Regrow) * kAnnounceDepth * r;
    case Region::kAbort: return sizeof(Abort) * r;
    case Region::kArrival:
    case Region::kWeightArrival:
    case Region::kConsumed: return sizeof(Word) * kLowLatencySlots * r;
    case Region::kRankCounts: return sizeof(std::int32_t) * kAnnounceDepth * r * r;
    case Region::kExpertCounts:
      return sizeof(std::int32_t) * kAnnounceDepth * r * static_cast<std::size_t>(expert_count_stride(num_ranks));
    case Region::kNodeRows: return sizeof(std::int32_t) * kAnnounceDepth * r;
    case Region::kCount: return 0;
    default: return sizeof(Word) * r;
  }
}

inline constexpr std::size_t region_offset(Region region, int num_ranks) {
  std::size_t offset = 0;
  for (int i = 0; i < static_cast<int>(region); ++i)
    offset = align_up(offset + region_bytes(static_cast<Region>(i), num_ranks), kAlign);
  return offset;
}

inline constexpr std::size_t workspace_bytes(int num_ranks) { return region_offset(Region::kCount, num_ranks); }

// Accessors into one rank's workspace.
class Workspace {
 public:
  Workspace() = default;
  Workspace(void* base, int num_ranks) : base_(static_cast<char*>(base)), num_ranks_(num_ranks) {
    for (int i = 0; i < static_cast<int>(Region::kCount); ++i)
      offsets_[i] = region_offset(static_cast<Region>(i), num_ranks);
  }

  Control& control() const { return *at<Control>(Region::kControl); }
  Announce& announce(std::uint64_t epoch, int src) const {
    return at<Announce>(Region::kAnnounce)[ring_slot(epoch) * num_ranks_ + src];
  }
  Regrow& regrow(std::uint64_t epoch, int src) const {
    return at<Regrow>(Region::kRegrow)[ring_slot(epoch) * num_ranks_ + src];
  }
  Abort& abort(int src) const { return at<Abort>(Region::kAbort)[src]; }
  std::uint64_t& word(Region region, int src) const { return at<Word>(region)[src].value; }
  std::uint64_t& slot_word(Region region, int slot, int src) const {
    return at<Word>(region)[slot * num_ranks_ + src].value;
  }
  std::int32_t* rank_counts(std::uint64_t epoch, int src) const {  // [R] over destinations
    return at<std::int32_t>(Region::kRankCounts) +
           (static_cast<std::ptrdiff_t>(ring_slot(epoch)) * num_ranks_ + src) * num_ranks_;
  }
  std::int32_t* expert_counts(std::uint64_t epoch, int src) const {  // [expert_count_stride(R)]
    return at<std::int32_t>(Region::kExpertCounts) +
           (static_cast<std::ptrdiff_t>(ring_slot(epoch)) * num_ranks_ + src) * expert_count_stride(num_ranks_);
  }
  std::int32_t& node_rows(std::uint64_t epoch, int src) const {
    return at<std::int32_t>(Region::kNodeRows)[ring_slot(epoch) * num_ranks_ + src];
  }

 private:
  static int ring_slot(std::uint64_t epoch) { return static_cast<int>(epoch % kAnnounceDepth); }
  template <typename T>
  T* at(Region region) const {
    return reinterpret_cast<T*>(base_ + offsets_[static_cast<int>(region)]);
  }

  char* base_ = nullptr;
  int num_ranks_ = 0;
  std::size_t offsets_[static_cast<int>(Region::kCount)] = {};
};

}  // namespace deep_moe::layout
