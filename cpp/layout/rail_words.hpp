// Words of the GPU's protocol between nodes that are not in the network's memory: a rank's own, and what node mates
// relay to each other. kernels/internode/README.md has who writes and who reads them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/rail.hpp"

namespace deep_moe::layout {

inline constexpr int kMaxNodes = 32;       // of the kernels; ranks and nodes together are at most kMaxKernelRanks
inline constexpr int kMaxRingSlots = 128;  // ring_slots() gives no more

// Of one rank, for its own launches.
struct alignas(64) RailState {
  std::uint64_t next_token;       // handed out to warps; zero between calls
  std::uint64_t sent[kMaxNodes];  // tag of the last chunk of earlier calls, by peer's node; 0 of the generation: none
  std::uint64_t received[kMaxNodes];
  std::uint64_t
      taken[kMaxNodes];  // rows of the call that warps have taken, of the ring that rows come from or sums go to
  // Rows of the chunk in each slot, of those that go out and of those that have come; zero between uses of the slot.
  std::uint64_t filled[kMaxNodes][kMaxRingSlots];
  std::uint64_t read[kMaxNodes][kMaxRingSlots];
};

// What a rank knows of a source's call is an Announce, relayed by the mate on the source's rail. Counts follow it: rows
// for every rank, then entries for each expert of the reader.
class RailWords {
 public:
  RailWords() = default;
  RailWords(int num_nodes, int num_local_ranks)
      : num_ranks_(num_nodes * num_local_ranks),
        relay_bytes_(align_up(sizeof(Announce) + 4 * static_cast<std::size_t>(num_ranks_) +
                                  4 * static_cast<std::size_t>(expert_count_stride(num_ranks_)),
                              64)) {}

  // Zeroed before first use; mapped by node mates.
  std::size_t bytes() const {
    return relays_at() + static_cast<std::size_t>(kAnnounceDepth) * static_cast<std::size_t>(num_ranks_) * relay_bytes_;
  }
  DM_HOST_DEVICE RailState& state(char* base) const { return *reinterpret_cast<RailState*>(base); }
  DM_HOST_DEVICE Announce& relay(char* base, std::uint64_t epoch, int src) const {
    const int index = static_cast<int>(epoch % kAnnounceDepth) * num_ranks_ + src;
    return *reinterpret_cast<Announce*>(base + relays_at() + static_cast<std::size_t>(index) * relay_bytes_);
  }
  DM_HOST_DEVICE std::int32_t* relay_counts(char* base, std::uint64_t epoch, int src) const {  // [R], then [experts]
    return reinterpret_cast<std::int32_t*>(&relay(base, epoch, src) + 1);
  }

 private:
  DM_HOST_DEVICE static constexpr std::size_t relays_at() { return align_up(sizeof(RailState), kAlign); }

  int num_ranks_ = 0;
  std::size_t relay_bytes_ = 0;
};

}  // namespace deep_moe::layout
