// The two ends of a ring between peers of a rail (docs/internode.md). No function waits: what is not there yet is null,
// so that one thread can serve all rings in turn, which is what keeps them from deadlock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "cpu/one_sided.hpp"
#include "layout/rail.hpp"

namespace deep_moe::cpu {

struct RailPeer {
  int rank;
  int node;
};

// What both ends have: the ring, the call, and how many rows of the chunk in each slot are done.
class RailEnd {
 public:
  void begin(std::int64_t num_rows, std::size_t row_stride);

 protected:
  RailEnd(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer, std::uint64_t generation);
  layout::RailPlace place_of(std::int64_t position) const { return call_.place(layout_.shape(), position); }
  // True for the thread that counts the last row of a chunk, which is then behind all others (acq_rel), and has set the
  // count back: nobody counts in this slot again before the peer has answered.
  bool counts_last(const layout::RailPlace& place);

  OneSided& network_;
  const layout::RailLayout layout_;
  const int my_node_;
  const RailPeer peer_;
  const std::uint64_t generation_;
  layout::RailCall call_;

 private:
  std::unique_ptr<std::atomic<int>[]> done_;
};

// The writing end. Rows of a call may be filled in any order, by several threads; a thread must not hold back a row
// while it asks for a later one of the same call.
class RailSender : public RailEnd {
 public:
  RailSender(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
             std::uint64_t generation = 0)
      : RailEnd(network, layout, my_node, peer, generation) {}

  // Where the row is to be written; null while the slot's last chunk has not been read by the peer.
  char* row(std::int64_t position);
  // The row is complete. With the last one of a chunk, the chunk leaves.
  void filled(std::int64_t position);
};

// The reading end.
class RailReceiver : public RailEnd {
 public:
  RailReceiver(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
               std::uint64_t generation = 0)
      : RailEnd(network, layout, my_node, peer, generation) {}

  // The row, or null while its chunk is not there.
  const char* row(std::int64_t position);
  // The row has been read. With the last one of a chunk, its slot goes back to the peer.
  void taken(std::int64_t position);
};

}  // namespace deep_moe::cpu
