#include "runtime/heap.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "layout/workspace.hpp"
#include "runtime/process.hpp"

namespace deep_moe {
namespace {

constexpr std::size_t kMinSegmentBytes = std::size_t{4} << 20;

std::size_t round_block(std::size_t bytes) { return layout::align_up(std::max<std::size_t>(bytes, 1), layout::kAlign); }

}  // namespace

std::size_t max_heap_bytes() {
  const char* text = std::getenv("DEEP_MOE_MAX_HEAP_BYTES");
  if (text == nullptr || *text == '\0') return std::numeric_limits<std::size_t>::max();
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != '\0' || !(value >= 0))
    throw ArgumentError(std::string("DEEP_MOE_MAX_HEAP_BYTES: got '") + text + "', expected a number of bytes");
  constexpr double kUnlimited = 9e18;
  return value >= kUnlimited ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(value);
}

Heap::Heap(std::size_t max_bytes, AnnounceSegment announce_segment, MakeSegment make_segment)
    : max_bytes_(max_bytes), announce_segment_(std::move(announce_segment)), make_segment_(std::move(make_segment)) {}

bool Heap::grow(std::size_t bytes, std::string* reason, int* new_id) {
  bytes = round_block(bytes);
  std::size_t have;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    have = heap_bytes_;
  }
  if (bytes > max_bytes_ || have > max_bytes_ - bytes) {
    *reason = "a heap of " + std::to_string(have) + " bytes would need " + std::to_string(bytes) +
              " more, and DEEP_MOE_MAX_HEAP_BYTES allows " + std::to_string(max_bytes_) + " in all";
    return false;
  }
  // Half as much again as there is, so that the number of segments stays logarithmic.
  std::size_t wanted = std::max({bytes, kMinSegmentBytes, layout::align_up(have / 2, layout::kAlign)});
  wanted =
      std::max(std::min(layout::align_up(wanted, 4096), (max_bytes_ - have) / layout::kAlign * layout::kAlign), bytes);
  std::shared_ptr<Segment> segment;
  try {
    segment = make_segment_(wanted);
  } catch (const Error&) {
    try {
      segment = make_segment_(bytes);
    } catch (const Error& error) {
      *reason = error.what();
      return false;
    }
  }
  int id;
  try {
    id = append_foreign(segment);
  } catch (const Error& error) {
    *reason = error.what();
    return false;
  }
  if (new_id != nullptr) *new_id = id;
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_[id].holds_blocks = true;
  heap_bytes_ += segment->bytes();
  insert_free(id, 0, segment->bytes());
  return true;
}

bool Heap::retire(int id) {
  std::shared_ptr<Segment> dropped;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_.at(static_cast<std::size_t>(id));
  if (!entry.holds_blocks || !entry.live.empty()) return false;
  for (const auto& [offset, bytes] : entry.free_ranges) by_size_.erase({bytes, {id, offset}});
  entry.free_ranges.clear();
  entry.holds_blocks = false;
  heap_bytes_ -= entry.segment->bytes();
  dropped.swap(entry.segment);
  return true;
}

int Heap::append_foreign(const std::shared_ptr<Segment>& segment) {
  int id;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    id = static_cast<int>(entries_.size());
    entries_.emplace_back();
    entries_.back().segment = segment;
  }
  try {
    announce_segment_(id, segment);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[static_cast<std::size_t>(id)].segment = nullptr;
    throw;
  }
  return id;
}

Block Heap::allocate(std::size_t bytes) {
  bytes = round_block(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fit = by_size_.lower_bound({bytes, {-1, 0}});
  if (fit == by_size_.end()) return {};
  const auto [range_bytes, where] = *fit;
  return take(where.first, where.second, range_bytes, bytes);
}

Block Heap::allocate_or_grow(std::size_t bytes, std::string* reason) {
  for (;;) {
    if (Block block = allocate(bytes)) return block;
    if (!grow(bytes, reason)) return {};
  }
}

Block Heap::allocate_most(std::size_t bytes, std::string* reason) {
  if (Block block = allocate_or_grow(bytes, reason)) return block;
  *reason = std::to_string(bytes) + " bytes needed; " + *reason;
  std::size_t largest;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    largest = by_size_.empty() ? 0 : by_size_.rbegin()->first;
  }
  std::string smaller_reason;
  for (std::size_t part = bytes / 2; part > largest && part >= layout::kAlign; part /= 2) {
    if (grow(part, &smaller_reason)) break;
  }
  return allocate_largest(bytes);
}

Block Heap::allocate_largest(std::size_t max_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (by_size_.empty()) return {};
  max_bytes = round_block(max_bytes);
  auto fit = by_size_.lower_bound({max_bytes, {-1, 0}});
  if (fit == by_size_.end()) fit = std::prev(by_size_.end());
  const auto [range_bytes, where] = *fit;
  const std::size_t peak = peak_bytes_;  // an offer counts once it has been shrunk to what is used of it
  Block block = take(where.first, where.second, range_bytes, std::min(range_bytes, max_bytes));
  peak_bytes_ = peak;
  return block;
}

Block Heap::take(int segment, std::size_t offset, std::size_t range_bytes, std::size_t bytes) {
  Entry& entry = entries_[segment];
  by_size_.erase({range_bytes, {segment, offset}});
  entry.free_ranges.erase(offset);
  if (range_bytes > bytes) {
    entry.free_ranges.emplace(offset + bytes, range_bytes - bytes);
    by_size_.insert({range_bytes - bytes, {segment, offset + bytes}});
  }
  entry.live.emplace(offset, bytes);
  note_live(static_cast<std::int64_t>(bytes));
  return {segment, offset, bytes, entry.segment->base() + offset};
}

void Heap::insert_free(int segment, std::size_t offset, std::size_t bytes) {
  Entry& entry = entries_[segment];
  auto next = entry.free_ranges.lower_bound(offset);
  if (next != entry.free_ranges.end() && offset + bytes == next->first) {
    bytes += next->second;
    by_size_.erase({next->second, {segment, next->first}});
    next = entry.free_ranges.erase(next);
  }
  if (next != entry.free_ranges.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      by_size_.erase({previous->second, {segment, previous->first}});
      entry.free_ranges.erase(previous);
    }
  }
  entry.free_ranges.emplace(offset, bytes);
  by_size_.insert({bytes, {segment, offset}});
}

void Heap::note_live(std::int64_t delta) {
  live_bytes_ = static_cast<std::size_t>(static_cast<std::int64_t>(live_bytes_) + delta);
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
}

void Heap::shrink(Block& block, std::size_t bytes) {
  bytes = round_block(bytes);
  if (bytes >= block.bytes) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_[block.segment].live[block.offset] = bytes;
  insert_free(block.segment, block.offset + bytes, block.bytes - bytes);
  note_live(static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(block.bytes));
  block.bytes = bytes;
}

std::vector<Block> Heap::split(const Block& block, const std::vector<std::size_t>& offsets) {
  std::vector<Block> parts;
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[block.segment];
  entry.live.erase(block.offset);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const std::size_t end = i + 1 < offsets.size() ? offsets[i + 1] : block.bytes;
    const std::size_t bytes = end - offsets[i];
    if (bytes == 0) {
      parts.emplace_back();
      continue;
    }
    parts.push_back({block.segment, block.offset + offsets[i], bytes, block.ptr + offsets[i]});
    entry.live.emplace(parts.back().offset, bytes);
  }
  return parts;
}

void Heap::free(const Block& block) {
  if (!block) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_[block.segment].live.erase(block.offset);
  note_live(-static_cast<std::int64_t>(block.bytes));
  insert_free(block.segment, block.offset, block.bytes);
}

std::shared_ptr<void> Heap::own(const Block& block) {
  if (!block) return std::make_shared<char>();
  return std::shared_ptr<void>(block.ptr, [heap = shared_from_this(), block, forks = fork_count()](void*) {
    if (forks == fork_count()) heap->free(block);  // a child's copy of the lock may be held by nobody
  });
}

void Heap::quarantine(const Block& block) {
  if (!block) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  quarantined_.push_back(block);
}

void Heap::release_quarantine() {
  std::vector<Block> blocks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks.swap(quarantined_);
  }
  for (const Block& block : blocks) free(block);
}

bool Heap::locate(const void* ptr, std::size_t bytes, int* segment, std::size_t* offset) const {
  const char* begin = static_cast<const char*>(ptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t id = 0; id < entries_.size(); ++id) {
    const Entry& entry = entries_[id];
    if (!entry.holds_blocks) continue;
    const char* base = entry.segment->base();
    if (begin < base || begin + bytes > base + entry.segment->bytes()) continue;
    const std::size_t at = static_cast<std::size_t>(begin - base);
    auto live = entry.live.upper_bound(at);
    if (live == entry.live.begin()) return false;
    --live;
    if (at + bytes > live->first + live->second) return false;
    *segment = static_cast<int>(id);
    *offset = at;
    return true;
  }
  return false;
}

std::shared_ptr<Segment> Heap::segment(int id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.at(static_cast<std::size_t>(id)).segment;
}

MemoryStats Heap::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  MemoryStats stats;
  stats.heap_bytes = static_cast<std::int64_t>(heap_bytes_);
  stats.live_bytes = static_cast<std::int64_t>(live_bytes_);
  stats.peak_bytes = static_cast<std::int64_t>(peak_bytes_);
  stats.free_bytes = static_cast<std::int64_t>(heap_bytes_ - live_bytes_);
  for (const Entry& entry : entries_) {
    stats.live_blocks += static_cast<std::int64_t>(entry.live.size());
    stats.segments += entry.holds_blocks ? 1 : 0;
  }
  for (const Block& block : quarantined_) stats.quarantined_bytes += static_cast<std::int64_t>(block.bytes);
  if (!by_size_.empty()) stats.largest_free_bytes = static_cast<std::int64_t>(by_size_.rbegin()->first);
  return stats;
}

}  // namespace deep_moe
