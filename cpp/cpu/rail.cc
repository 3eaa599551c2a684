#include "cpu/rail.hpp"

namespace deep_moe::cpu {
namespace {

using layout::pack_chunk_tag;
using layout::RailPlace;
using layout::RailRegion;

}  // namespace

RailEnd::RailEnd(OneSided& network, const layout::RailLayout& layout, int my_node, RailPeer peer,
                 std::uint64_t generation)
    : network_(network),
      layout_(layout),
      my_node_(my_node),
      peer_(peer),
      generation_(generation),
      done_(std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(layout.shape().num_slots))) {}

void RailEnd::begin(std::int64_t num_rows, std::size_t row_stride) {
  call_ = {layout_.shape(), call_.next_number(), num_rows, row_stride};
}

bool RailEnd::counts_last(const RailPlace& place) {
  std::atomic<int>& done = done_[static_cast<std::size_t>(place.slot)];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != place.num_rows) return false;
  done.store(0, std::memory_order_relaxed);
  return true;
}

char* RailSender::row(std::int64_t position) {
  const RailPlace place = place_of(position);
  const auto num_slots = static_cast<std::uint64_t>(layout_.shape().num_slots);
  if (place.number > num_slots) {
    const std::uint64_t last_use = pack_chunk_tag(generation_, place.number - num_slots);
    if (network_.test(layout_.word(RailRegion::kChunkCredit, my_node_, peer_.node, place.slot)) != last_use)
      return nullptr;
  }
  return network_.memory() + layout_.slot(RailRegion::kSendSlots, my_node_, peer_.node, place.slot) +
         static_cast<std::size_t>(place.row) * call_.row_stride;
}

void RailSender::filled(std::int64_t position) {
  const RailPlace place = place_of(position);
  if (!counts_last(place)) return;
  network_.put_signal(peer_.rank, layout_.slot(RailRegion::kRingSlots, peer_.node, my_node_, place.slot),
                      layout_.slot(RailRegion::kSendSlots, my_node_, peer_.node, place.slot),
                      static_cast<std::size_t>(place.num_rows) * call_.row_stride,
                      layout_.word(RailRegion::kChunkArrived, peer_.node, my_node_, place.slot),
                      pack_chunk_tag(generation_, place.number));
}

const char* RailReceiver::row(std::int64_t position) {
  const RailPlace place = place_of(position);
  const std::uint64_t here = network_.test(layout_.word(RailRegion::kChunkArrived, my_node_, peer_.node, place.slot));
  if (here != pack_chunk_tag(generation_, place.number)) return nullptr;
  return network_.memory() + layout_.slot(RailRegion::kRingSlots, my_node_, peer_.node, place.slot) +
         static_cast<std::size_t>(place.row) * call_.row_stride;
}

void RailReceiver::taken(std::int64_t position) {
  const RailPlace place = place_of(position);
  if (!counts_last(place)) return;
  network_.signal(peer_.rank, layout_.word(RailRegion::kChunkCredit, peer_.node, my_node_, place.slot),
                  pack_chunk_tag(generation_, place.number));
}

}  // namespace deep_moe::cpu
