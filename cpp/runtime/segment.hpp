// Pieces of memory that other ranks can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace deep_moe {

// Memory of one kind as mapped here; freed when the last user drops it.
class Segment {
 public:
  virtual ~Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }  // may be an address that only a device can use
  std::size_t bytes() const { return bytes_; }
  // What a peer maps it by; -1: a peer's own, or a kind that needs no descriptor.
  virtual int fd() const { return -1; }

 protected:
  Segment(char* base, std::size_t bytes) : base_(base), bytes_(bytes) {}
  char* base_;
  std::size_t bytes_;
};

// Host memory: a memfd, fallocated so that want of memory is an error here and not a SIGBUS later; nothing of it is
// left behind by a crash.
class HostSegment final : public Segment {
 public:
  // Throws Error with the reason (and the bytes asked for) where the memory cannot be had.
  static std::shared_ptr<Segment> create(std::size_t bytes);
  // Maps a peer's segment; takes `fd`.
  static std::shared_ptr<Segment> map(int fd, std::size_t bytes);
  ~HostSegment() override;
  int fd() const override { return fd_; }

 private:
  HostSegment(char* base, std::size_t bytes, int fd) : Segment(base, bytes), fd_(fd) {}
  int fd_;  // -1 for a peer's
};

// Segments of ranks that share this process, by (domain uid, segment id): plain pointers instead of a second mapping.
void register_local_segment(std::uint64_t domain_uid, int id, const std::shared_ptr<Segment>& segment);
std::shared_ptr<Segment> find_local_segment(std::uint64_t domain_uid, int id);  // null if unknown
void forget_local_segments(std::uint64_t domain_uid);

}  // namespace deep_moe
