// Sockets between the processes of a group: they carry descriptors of new segments, and their end tells that a peer's
// process is gone. The user's process group is used in the constructor alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace deep_moe {

class ControlChannel {
 public:
  // Listens under a fresh abstract name (nothing appears in the file system).
  explicit ControlChannel(int rank, int num_ranks);
  ~ControlChannel();
  const std::string& name() const { return name_; }

  // Connects to every peer r with wanted[r]; names[r] are the peers' names. `timeout_seconds` bounds it.
  void connect(const std::vector<std::string>& names, const std::vector<bool>& wanted, std::uint64_t group_uid,
               double timeout_seconds);

  struct SegmentMessage {
    int id = -1;
    std::size_t bytes = 0;
    int fd = -1;             // -1: none travels
    std::uint32_t kind = 0;  // the ranks' own business, as is `text`
    std::string text = {};   // up to kMaxText bytes, any
  };
  static constexpr std::size_t kMaxText = 480;
  void send_segment(int peer, const SegmentMessage& message);  // throws Error if the peer is gone
  // Takes one message if one is there. Returns false if none is; sets *closed if the peer's end is closed.
  bool receive_segment(int peer, SegmentMessage* message, bool* closed);
  // True if some peer that has not closed its end has sent something or does so now; one system call.
  bool readable() const;
  // Blocks until that is so, or until `wake_fd` has input.
  void wait_readable(int wake_fd) const;
  // True once the peer's process has ended or it has closed its end (messages may still be unread).
  bool peer_closed(int peer) const;
  void close() noexcept;

 private:
  bool poll_peers(int extra_fd, int timeout_ms) const;

  int rank_, num_ranks_;
  int listen_fd_ = -1;
  std::string name_;
  std::vector<int> fds_, pid_fds_;
  std::vector<std::atomic<bool>> ended_;  // by peer: receive_segment has seen the end
};

}  // namespace deep_moe
