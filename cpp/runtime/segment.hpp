// A piece of memory that other processes of this machine can map: a memfd, fallocated so that want of memory is an
// error here and not a SIGBUS later; nothing of it is left behind by a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace deep_moe {

class Segment {
 public:
  // Throws Error with the reason (and the bytes asked for) where the memory cannot be had.
  static std::shared_ptr<Segment> create(std::size_t bytes);
  // Maps a peer's segment; takes `fd`.
  static std::shared_ptr<Segment> map(int fd, std::size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  Segment(char* base, std::size_t bytes, int fd) : base_(base), bytes_(bytes), fd_(fd) {}
  char* base_;
  std::size_t bytes_;
  int fd_;  // -1 for a peer's
};

// Segments of ranks that share this process, by (domain uid, segment id): plain pointers instead of a second mapping.
void register_local_segment(std::uint64_t domain_uid, int id, const std::shared_ptr<Segment>& segment);
std::shared_ptr<Segment> find_local_segment(std::uint64_t domain_uid, int id);  // null if unknown
void forget_local_segments(std::uint64_t domain_uid);

}  // namespace deep_moe
