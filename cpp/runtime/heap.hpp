// The heap of one rank: segments that are only ever appended, and blocks handed out from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "runtime/segment.hpp"

namespace deep_moe {

struct Block {
  int segment = -1;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  char* ptr = nullptr;
  explicit operator bool() const { return segment >= 0; }
};

// What DEEP_MOE_MAX_HEAP_BYTES allows; throws ArgumentError where that is no number.
std::size_t max_heap_bytes();

// Thread safe; its lock is never held during a wait. Lives as long as any block handed out from it.
class Heap : public std::enable_shared_from_this<Heap> {
 public:
  // `announce_segment(id, segment)` makes a new segment reachable for the peers before any of its blocks is used.
  using AnnounceSegment = std::function<void(int id, const std::shared_ptr<Segment>&)>;
  using MakeSegment = std::function<std::shared_ptr<Segment>(std::size_t bytes)>;  // throws Error
  Heap(std::size_t max_bytes, AnnounceSegment announce_segment, MakeSegment make_segment = HostSegment::create);

  // Appends a segment of at least `bytes` for blocks. Returns false (and why) where the memory cannot be had.
  bool grow(std::size_t bytes, std::string* reason, int* id = nullptr);
  // No more blocks from a segment that holds none, because some peer cannot reach it: its memory is dropped, its id
  // stays taken. False if it holds blocks.
  bool retire(int id);
  // Registers memory under the next segment id without using it for blocks (workspace, low-latency staging). What
  // `announce_segment` throws leaves the id taken and the memory with its owner.
  int append_foreign(const std::shared_ptr<Segment>& segment);

  // A block of at least `bytes`, aligned to layout::kAlign; an empty Block if no free range is large enough.
  Block allocate(std::size_t bytes);
  // The same, growing if needed; an empty Block and the reason if that fails.
  Block allocate_or_grow(std::size_t bytes, std::string* reason);
  // The same, but where `bytes` cannot be had as much as can be had (perhaps nothing), with the reason.
  Block allocate_most(std::size_t bytes, std::string* reason);
  // The largest free range, up to `max_bytes`; may be empty.
  Block allocate_largest(std::size_t max_bytes);
  // Gives back what lies beyond `bytes` of the block.
  void shrink(Block& block, std::size_t bytes);
  // Cuts the block at aligned offsets into blocks that are freed by themselves.
  std::vector<Block> split(const Block& block, const std::vector<std::size_t>& offsets);
  void free(const Block& block);

  // Owner for a tensor in `block`: frees it when the last copy dies (a no-op in a forked child).
  std::shared_ptr<void> own(const Block& block);

  // The block is not reused until release_quarantine(): a peer that sleeps may still write into it.
  void quarantine(const Block& block);
  void release_quarantine();

  // The segment and offset of [ptr, ptr + bytes) if it lies inside a live block.
  bool locate(const void* ptr, std::size_t bytes, int* segment, std::size_t* offset) const;
  std::shared_ptr<Segment> segment(int id) const;
  MemoryStats stats() const;
  std::size_t max_bytes() const { return max_bytes_; }

 private:
  struct Entry {
    std::shared_ptr<Segment> segment;
    bool holds_blocks = false;
    std::map<std::size_t, std::size_t> free_ranges;  // offset -> bytes
    std::map<std::size_t, std::size_t> live;         // offset -> bytes
  };
  Block take(int segment, std::size_t offset, std::size_t range_bytes, std::size_t bytes);
  void insert_free(int segment, std::size_t offset, std::size_t bytes);
  void note_live(std::int64_t delta);

  const std::size_t max_bytes_;
  const AnnounceSegment announce_segment_;
  const MakeSegment make_segment_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::set<std::pair<std::size_t, std::pair<int, std::size_t>>> by_size_;  // (bytes, (segment, offset))
  std::vector<Block> quarantined_;
  std::size_t heap_bytes_ = 0, live_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace deep_moe
