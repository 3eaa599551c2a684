#include "cpu/rail.hpp"

namespace deep_moe::cpu {
namespace {

using layout::pack_chunk_tag;
using layout::RailPlace;
using layout::RailRegion;

void next_call(layout::RailCall& call, const layout::RailShape& shape, std::int64_t num_rows) {
  call.first_number += static_cast<std::uint64_t>(call.num_chunks(shape));
  call.num_rows = num_rows;
}

// True for the thread that counts the last row of a chunk, which is then behind all others (acq_rel), and has set the
// count back: nobody counts in this slot again before the peer has answered.
bool counts_last(std::atomic<int>& count, const RailPlace& place) {
  if (count.fetch_add(1, std::memory_order_acq_rel) + 1 != place.num_rows) return false;
  count.store(0, std::memory_order_relaxed);
  return true;
}

std::size_t row_offset(const layout::RailLayout& layout, RailRegion region, int node, const RailPlace& place) {
  return layout.chunk(region, node, place.slot) + static_cast<std::size_t>(place.row) * layout.shape().row_stride;
}

}  // namespace

RailSender::RailSender(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
                       std::uint64_t generation)
    : network_(network),
      layout_(layout),
      my_node_(my_node),
      peer_(peer),
      generation_(generation),
      filled_(std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(layout.shape().num_slots))) {}

void RailSender::begin(std::int64_t num_rows) { next_call(call_, layout_.shape(), num_rows); }

char* RailSender::row(std::int64_t position) {
  const RailPlace place = call_.place(layout_.shape(), position);
  const auto num_slots = static_cast<std::uint64_t>(layout_.shape().num_slots);
  if (place.number > num_slots) {
    const std::uint64_t last_use = pack_chunk_tag(generation_, place.number - num_slots);
    if (network_.test(layout_.word(RailRegion::kChunkCredit, peer_.node, place.slot)) != last_use) return nullptr;
  }
  return network_.memory() + row_offset(layout_, RailRegion::kSendSlots, peer_.node, place);
}

void RailSender::filled(std::int64_t position) {
  const RailPlace place = call_.place(layout_.shape(), position);
  if (!counts_last(filled_[static_cast<std::size_t>(place.slot)], place)) return;
  // The peer files what comes from here under this rank's node.
  network_.put_signal(peer_.rank, layout_.chunk(RailRegion::kRingSlots, my_node_, place.slot),
                      layout_.chunk(RailRegion::kSendSlots, peer_.node, place.slot),
                      static_cast<std::size_t>(place.num_rows) * layout_.shape().row_stride,
                      layout_.word(RailRegion::kChunkArrived, my_node_, place.slot),
                      pack_chunk_tag(generation_, place.number));
}

RailReceiver::RailReceiver(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
                           std::uint64_t generation)
    : network_(network),
      layout_(layout),
      my_node_(my_node),
      peer_(peer),
      generation_(generation),
      taken_(std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(layout.shape().num_slots))) {}

void RailReceiver::begin(std::int64_t num_rows) { next_call(call_, layout_.shape(), num_rows); }

const char* RailReceiver::row(std::int64_t position) {
  const RailPlace place = call_.place(layout_.shape(), position);
  const std::uint64_t here = network_.test(layout_.word(RailRegion::kChunkArrived, peer_.node, place.slot));
  if (here != pack_chunk_tag(generation_, place.number)) return nullptr;
  return network_.memory() + row_offset(layout_, RailRegion::kRingSlots, peer_.node, place);
}

void RailReceiver::taken(std::int64_t position) {
  const RailPlace place = call_.place(layout_.shape(), position);
  if (!counts_last(taken_[static_cast<std::size_t>(place.slot)], place)) return;
  network_.signal(peer_.rank, layout_.word(RailRegion::kChunkCredit, my_node_, place.slot),
                  pack_chunk_tag(generation_, place.number));
}

}  // namespace deep_moe::cpu
