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

// The writing end. Rows of a call may be filled in any order, by several threads; a thread must not hold back a row
// while it asks for a later one of the same call.
class RailSender {
 public:
  RailSender(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
             std::uint64_t generation = 0);

  void begin(std::int64_t num_rows, std::size_t row_stride);
  // Where the row is to be written; null while the slot's last chunk has not been read by the peer.
  char* row(std::int64_t position);
  // The row is complete. With the last one of a chunk, the chunk leaves.
  void filled(std::int64_t position);

 private:
  OneSided& network_;
  layout::RailLayout layout_;
  int my_node_;
  RailPeer peer_;
  std::uint64_t generation_;
  layout::RailCall call_;
  std::unique_ptr<std::atomic<int>[]> filled_;  // rows of the chunk in each slot
};

// The reading end.
class RailReceiver {
 public:
  RailReceiver(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
               std::uint64_t generation = 0);

  void begin(std::int64_t num_rows, std::size_t row_stride);
  // The row, or null while its chunk is not there.
  const char* row(std::int64_t position);
  // The row has been read. With the last one of a chunk, its slot goes back to the peer.
  void taken(std::int64_t position);

 private:
  OneSided& network_;
  layout::RailLayout layout_;
  int my_node_;
  RailPeer peer_;
  std::uint64_t generation_;
  layout::RailCall call_;
  std::unique_ptr<std::atomic<int>[]> taken_;
};

}  // namespace deep_moe::cpu
