#include "runtime/control_channel.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include <deep_moe/error.hpp>

#include "runtime/process.hpp"

namespace deep_moe {
namespace {

using Clock = std::chrono::steady_clock;

struct Hello {
  std::uint64_t group_uid;
  std::int32_t from, to;
  std::int64_t magic;
};
constexpr std::int64_t kHelloMagic = 0x6d6f65;

// Over TCP: an address may lead to a machine that has the same one by chance, so whoever connects hears an answer
// before it believes that it is there, and says so in turn, for it may have given up meanwhile.
constexpr int kConnectMs = 1000, kAnswerMs = 2000, kConfirmMs = 5000;
constexpr auto kNobodyListens = std::chrono::seconds(5);

struct WireSegment {
  std::int32_t id;
  std::uint32_t kind;
  std::uint64_t bytes;
  std::uint32_t has_fd;
  std::uint32_t num_text_bytes;
  char text[ControlChannel::kMaxText];  // the message ends behind what is used of it
};
constexpr std::size_t kWireHead = offsetof(WireSegment, text);

socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
  std::memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // leading NUL: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int new_socket() {
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) throw Error(std::string("cannot open a control socket: ") + std::strerror(errno));
  return fd;
}

// A descriptor that becomes readable when the process at the other end of `fd` ends; -1 where the kernel has none.
int peer_pid_fd(int fd) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0 || credentials.pid <= 0) return -1;
#if defined(SYS_pidfd_open)
  return static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0));
#else
  return -1;
#endif
}

// Signals do not end the wait.
bool has_input(int fd, int timeout_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, timeout_ms);
    if (ready >= 0 || errno != EINTR) return ready > 0;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    timeout_ms = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
  }
}

}  // namespace

ControlChannel::ControlChannel(int rank, int num_ranks)
    : rank_(rank),
      num_ranks_(num_ranks),
      fds_(num_ranks, -1),
      pid_fds_(num_ranks, -1),
      expected_(num_ranks, false),
      remote_(num_ranks, false),
      received_(num_ranks),
      ended_(num_ranks) {
  std::random_device random;
  listen_fd_ = new_socket();
  close_in_child(listen_fd_);
  for (int attempt = 0;; ++attempt) {
    name_ = "deep_moe-" + std::to_string(::getpid()) + "-" + std::to_string(random()) + std::to_string(random());
    sockaddr_un address;
    const socklen_t bytes = abstract_address(name_, &address);
    if (::bind(listen_fd_, reinterpret_cast<sockaddr*>(&address), bytes) == 0) break;
    if (errno != EADDRINUSE || attempt == 8)
      throw Error(std::string("cannot bind a control socket: ") + std::strerror(errno));
  }
  if (::listen(listen_fd_, std::max(num_ranks, 16)) != 0)
    throw Error(std::string("cannot listen on a control socket: ") + std::strerror(errno));
}

ControlChannel::~ControlChannel() { close(); }

Endpoint ControlChannel::listen_to_machines() {
  Endpoint endpoint;
  listen_tcp_fd_ = listen_tcp(own_addresses(), std::max(num_ranks_, 16), &endpoint);
  close_in_child(listen_tcp_fd_);
  return endpoint;
}

void ControlChannel::keep(int peer, int fd, bool remote) {
  fds_[peer] = fd;
  remote_[peer] = remote;
  expected_[peer] = false;
  close_in_child(fd);
  if (remote) return;
  pid_fds_[peer] = peer_pid_fd(fd);
  if (pid_fds_[peer] >= 0) close_in_child(pid_fds_[peer]);
}

void ControlChannel::connect_local(int peer, const std::string& name, std::uint64_t group_uid) {
  const int fd = new_socket();
  sockaddr_un address;
  const socklen_t bytes = abstract_address(name, &address);
  const Hello hello{group_uid, rank_, peer, kHelloMagic};
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
      ::send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
    const std::string reason = std::strerror(errno);
    ::close(fd);
    throw Error("rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(peer) +
                " over a local socket: " + reason +
                "; ranks of one machine have to run in one network namespace, or with a DEEP_MOE_HOST_ID of their own");
  }
  keep(peer, fd, false);
}

void ControlChannel::connect_remote(int peer, const Endpoint& endpoint, std::uint64_t group_uid, Deadline deadline) {
  auto last_listened = Clock::now();  // when somebody took a connection
  const auto left = [&](int most) {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(ms, 0, most));
  };
  bool stranger = false;  // has answered once: the last attempts, for which little time is left, say less
  for (;;) {
    std::string problem = "it has no address";
    std::istringstream addresses(endpoint.addresses);
    for (std::string address; std::getline(addresses, address, ' ');) {
      const int fd = connect_tcp(address, endpoint.port, left(kConnectMs));
      if (fd < 0) {
        problem = std::strerror(errno);
        continue;
      }
      last_listened = Clock::now();
      const Hello mine{group_uid, rank_, peer, kHelloMagic};
      Hello theirs{};
      const bool answered =
          send_whole(fd, &mine, sizeof(mine)) && receive_whole(fd, &theirs, sizeof(theirs), left(kAnswerMs));
      if (answered && theirs.magic == kHelloMagic && theirs.group_uid == group_uid && theirs.from == peer &&
          theirs.to == rank_ && send_whole(fd, &mine, sizeof(mine)))
        return keep(peer, fd, true);
      ::close(fd);
      stranger = stranger || answered;
      problem = "the connection was taken, but no answer came";
    }
    if (stranger) problem = "somebody else answers";
    if (Clock::now() >= deadline || Clock::now() - last_listened > kNobodyListens)
      throw Error("rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(peer) +
                  ", which is on another machine, over TCP at " + endpoint.addresses + " port " +
                  std::to_string(endpoint.port) + ": " + problem +
                  "; DEEP_MOE_SOCKET_IFNAME names the interfaces by which machines reach each other");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

int ControlChannel::accept_from(int listen_fd) const {
  const int fd = ::accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
    throw Error("rank " + std::to_string(rank_) + " cannot take the connection of another rank: " +
                std::strerror(errno) + " (ulimit -n says how many files a process may open)");
  return fd;  // below 0: who was there has gone
}

bool ControlChannel::may_accept(int peer) const { return peer > rank_ && peer < num_ranks_ && expected_[peer]; }

void ControlChannel::accept_local(std::uint64_t group_uid) {
  const int fd = accept_from(listen_fd_);
  if (fd < 0) return;
  Hello hello{};
  if (has_input(fd, 1000) && ::recv(fd, &hello, sizeof(hello), 0) == sizeof(hello) && hello.magic == kHelloMagic &&
      hello.group_uid == group_uid && hello.to == rank_ && may_accept(hello.from))
    return keep(hello.from, fd, false);
  ::close(fd);  // a stranger
}

void ControlChannel::accept_remote(std::uint64_t group_uid) {
  const int fd = accept_from(listen_tcp_fd_);
  if (fd < 0) return;
  set_tcp_options(fd);
  Hello theirs{}, confirmed{};
  if (receive_whole(fd, &theirs, sizeof(theirs), 1000) && theirs.magic == kHelloMagic &&
      theirs.group_uid == group_uid && theirs.to == rank_ && may_accept(theirs.from)) {
    const Hello mine{group_uid, rank_, theirs.from, kHelloMagic};
    if (send_whole(fd, &mine, sizeof(mine)) && receive_whole(fd, &confirmed, sizeof(confirmed), kConfirmMs))
      return keep(theirs.from, fd, true);
  }
  ::close(fd);  // a stranger, or one that has given up
}

void ControlChannel::connect(const std::vector<Route>& routes, std::uint64_t group_uid, double timeout_seconds) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  // Lower ranks are connected to, higher ranks are accepted: rank 0 accepts at once, so nobody waits in a circle.
  for (int peer = rank_ + 1; peer < num_ranks_; ++peer) expected_[peer] = routes[peer].wanted;
  for (int peer = 0; peer < rank_; ++peer) {
    const Route& route = routes[peer];
    if (!route.wanted) continue;
    if (route.remote) {
      connect_remote(peer, route.endpoint, group_uid, deadline);
    } else {
      connect_local(peer, route.name, group_uid);
    }
  }
  for (;;) {
    const auto missing = std::find(expected_.begin(), expected_.end(), true);
    if (missing == expected_.end()) break;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0)
      throw TimeoutError("rank " + std::to_string(rank_) + " waited for rank " +
                         std::to_string(missing - expected_.begin()) + " to connect while the Buffer was made");
    pollfd entries[] = {{listen_fd_, POLLIN, 0}, {listen_tcp_fd_, POLLIN, 0}};
    if (::poll(entries, 2, static_cast<int>(std::min<std::int64_t>(left.count(), 1000))) <= 0) continue;
    if (entries[0].revents != 0) accept_local(group_uid);
    if (entries[1].revents != 0) accept_remote(group_uid);
  }
  for (int* fd : {&listen_fd_, &listen_tcp_fd_}) {
    if (*fd < 0) continue;
    forget_close_in_child(*fd);
    ::close(*fd);
    *fd = -1;
  }
}

std::string ControlChannel::interface_name() const {
  const auto first = std::find(remote_.begin(), remote_.end(), true);
  return first == remote_.end() ? std::string() : interface_of(fds_[first - remote_.begin()]);
}

void ControlChannel::send_segment(int peer, const SegmentMessage& message) {
  const bool has_fd = message.fd >= 0;
  const std::size_t num_text_bytes = std::min(message.text.size(), kMaxText);
  WireSegment wire{message.id, message.kind, message.bytes, has_fd, static_cast<std::uint32_t>(num_text_bytes), {}};
  std::memcpy(wire.text, message.text.data(), num_text_bytes);
  if (remote_[peer]) {
    if (has_fd) throw Error("a descriptor does not travel between machines");
    send_whole(fds_[peer], &wire, kWireHead + num_text_bytes);  // a peer that is gone is found as below
    return;
  }
  iovec part{&wire, kWireHead + num_text_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (has_fd) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &message.fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(fds_[peer], &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  // A peer that is gone is found by the next wait for it, which can say more.
  if (sent < 0 && errno != EPIPE && errno != ECONNRESET)
    throw Error("rank " + std::to_string(rank_) + " cannot pass a segment to rank " + std::to_string(peer) + ": " +
                std::strerror(errno));
}

bool ControlChannel::receive_segment(int peer, SegmentMessage* message, bool* closed) {
  *closed = false;
  if (remote_[peer]) {
    for (;;) {
      if (take_whole_message(peer, message)) return true;
      char bytes[4096];
      const ssize_t got = ::recv(fds_[peer], bytes, sizeof(bytes), MSG_DONTWAIT);
      if (got > 0) {
        received_[peer].append(bytes, static_cast<std::size_t>(got));
        continue;
      }
      if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) *closed = ended_[peer] = true;
      return false;
    }
  }
  WireSegment wire{};
  iovec part{&wire, sizeof(wire)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t got = ::recvmsg(fds_[peer], &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  // Said once, ahead of what the peer has sent, where it closed with messages unread.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(fds_[peer], &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) *closed = ended_[peer] = true;
    return false;
  }
  if (got == 0) {
    *closed = ended_[peer] = true;
    return false;
  }
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  const bool whole =
      static_cast<std::size_t>(got) >= kWireHead && static_cast<std::size_t>(got) == kWireHead + wire.num_text_bytes;
  const bool has_fd = rights != nullptr && rights->cmsg_type == SCM_RIGHTS;
  if (!whole || has_fd != (wire.has_fd != 0))
    throw Error("rank " + std::to_string(rank_) + " got a broken control message from rank " + std::to_string(peer) +
                " (too many open files?)");
  message->id = wire.id;
  message->bytes = wire.bytes;
  message->kind = wire.kind;
  message->text.assign(wire.text, wire.num_text_bytes);
  message->fd = -1;
  if (has_fd) std::memcpy(&message->fd, CMSG_DATA(rights), sizeof(int));
  return true;
}

bool ControlChannel::take_whole_message(int peer, SegmentMessage* message) {
  std::string& bytes = received_[peer];
  WireSegment wire{};
  if (bytes.size() < kWireHead) return false;
  std::memcpy(&wire, bytes.data(), kWireHead);
  if (wire.has_fd != 0 || wire.num_text_bytes > kMaxText)
    throw Error("rank " + std::to_string(rank_) + " got a broken control message from rank " + std::to_string(peer));
  const std::size_t whole = kWireHead + wire.num_text_bytes;
  if (bytes.size() < whole) return false;
  *message = {wire.id, static_cast<std::size_t>(wire.bytes), -1, wire.kind,
              bytes.substr(kWireHead, wire.num_text_bytes)};
  bytes.erase(0, whole);
  return true;
}

bool ControlChannel::poll_peers(int extra_fd, int timeout_ms) const {
  std::vector<pollfd> entries;
  entries.reserve(fds_.size() + 1);
  for (int peer = 0; peer < num_ranks_; ++peer)  // poll() passes over -1
    entries.push_back({ended_[peer] ? -1 : fds_[peer], POLLIN, 0});
  entries.push_back({extra_fd, POLLIN, 0});
  return ::poll(entries.data(), entries.size(), timeout_ms) > 0;
}

bool ControlChannel::readable() const { return poll_peers(-1, 0); }

void ControlChannel::wait_readable(int wake_fd) const { poll_peers(wake_fd, -1); }

bool ControlChannel::peer_closed(int peer) const {
  if (fds_[peer] < 0) return false;
  if (pid_fds_[peer] >= 0 && has_input(pid_fds_[peer], 0)) return true;
  pollfd entry{fds_[peer], POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void ControlChannel::close() noexcept {
  const auto close_fd = [](int& fd) {
    if (fd < 0) return;
    forget_close_in_child(fd);
    ::close(fd);
    fd = -1;
  };
  close_fd(listen_fd_);
  close_fd(listen_tcp_fd_);
  for (int& fd : fds_) close_fd(fd);
  for (int& fd : pid_fds_) close_fd(fd);
}

}  // namespace deep_moe
