// Sockets between the processes of a group: they carry messages and, on one machine, descriptors of new segments, and
// their end tells that a peer's process is gone. Between machines they are TCP. The user's process group is used in the
// constructor alone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/tcp.hpp"

namespace deep_moe {

class ControlChannel {
 public:
  // Listens under a fresh abstract name (nothing appears in the file system).
  explicit ControlChannel(int rank, int num_ranks);
  ~ControlChannel();
  const std::string& name() const { return name_; }

  // Before connect(), where peers are on other machines: they reach this rank there. Throws Error or ArgumentError.
  Endpoint listen_to_machines();

  struct Route {
    bool wanted = true;
    bool remote = false;  // on another machine
    std::string name;     // name() there, on this machine
    Endpoint endpoint;    // of one that is remote
  };
  // Connects to every peer that is wanted, routes by rank. `group_uid`, which the group alone knows, keeps strangers
  // out; `timeout_seconds` bounds it.
  void connect(const std::vector<Route>& routes, std::uint64_t group_uid, double timeout_seconds);
  // The interface that leads to the first peer of another machine; empty if there is none, or it cannot be told.
  std::string interface_name() const;
  bool is_remote(int peer) const { return remote_[static_cast<std::size_t>(peer)]; }

  struct SegmentMessage {
    int id = -1;
    std::size_t bytes = 0;
    int fd = -1;             // -1: none travels, as always between machines
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
  using Deadline = std::chrono::steady_clock::time_point;

  void connect_local(int peer, const std::string& name, std::uint64_t group_uid);
  void connect_remote(int peer, const Endpoint& endpoint, std::uint64_t group_uid, Deadline deadline);
  void accept_local(std::uint64_t group_uid);
  void accept_remote(std::uint64_t group_uid);
  int accept_from(int listen_fd) const;
  bool may_accept(int peer) const;
  void keep(int peer, int fd, bool remote);
  bool take_whole_message(int peer, SegmentMessage* message);
  bool poll_peers(int extra_fd, int timeout_ms) const;

  int rank_, num_ranks_;
  int listen_fd_ = -1, listen_tcp_fd_ = -1;
  std::string name_;
  std::vector<int> fds_, pid_fds_;
  std::vector<bool> expected_, remote_;   // by peer: has still to connect; over TCP
  std::vector<std::string> received_;     // over TCP: bytes of a message that is not whole yet
  std::vector<std::atomic<bool>> ended_;  // by peer: receive_segment has seen the end
};

}  // namespace deep_moe
