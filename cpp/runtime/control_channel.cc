#include "runtime/control_channel.hpp"

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

#include <deep_moe/error.hpp>

#include "runtime/process.hpp"

namespace deep_moe {
namespace {

struct Hello {
  std::uint64_t group_uid;
  std::int32_t rank;
  std::int32_t magic;
};
constexpr std::int32_t kHelloMagic = 0x6d6f65;

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
  using Clock = std::chrono::steady_clock;
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
    : rank_(rank), num_ranks_(num_ranks), fds_(num_ranks, -1), pid_fds_(num_ranks, -1), ended_(num_ranks) {
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

void ControlChannel::connect(const std::vector<std::string>& names, const std::vector<bool>& wanted,
                             std::uint64_t group_uid, double timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  // Lower ranks are connected to, higher ranks are accepted: their backlog holds us, so nobody waits in a circle.
  int num_expected = 0;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || !wanted[peer]) continue;
    if (peer > rank_) {
      ++num_expected;
      continue;
    }
    const int fd = new_socket();
    fds_[peer] = fd;
    close_in_child(fd);
    sockaddr_un address;
    const socklen_t bytes = abstract_address(names[peer], &address);
    const Hello hello{group_uid, rank_, kHelloMagic};
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
        ::send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
      throw Error("rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(peer) +
                  " over a local socket: " + std::strerror(errno) +
                  "; CPU ranks have to run on one machine and in one network namespace");
    }
  }
  while (num_expected > 0) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      for (int peer = rank_ + 1; peer < num_ranks_; ++peer) {
        if (wanted[peer] && fds_[peer] < 0)
          throw TimeoutError("rank " + std::to_string(rank_) + " waited for rank " + std::to_string(peer) +
                             " to connect while the Buffer was made");
      }
    }
    if (!has_input(listen_fd_, static_cast<int>(std::min<std::int64_t>(left.count(), 1000)))) continue;
    const int fd = ::accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    Hello hello{};
    const bool heard = has_input(fd, 1000) && ::recv(fd, &hello, sizeof(hello), 0) == sizeof(hello);
    if (!heard || hello.magic != kHelloMagic || hello.group_uid != group_uid || hello.rank <= rank_ ||
        hello.rank >= num_ranks_ || fds_[hello.rank] >= 0) {
      ::close(fd);  // a stranger
      continue;
    }
    fds_[hello.rank] = fd;
    close_in_child(fd);
    --num_expected;
  }
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (fds_[peer] < 0) continue;
    pid_fds_[peer] = peer_pid_fd(fds_[peer]);
    if (pid_fds_[peer] >= 0) close_in_child(pid_fds_[peer]);
  }
  forget_close_in_child(listen_fd_);
  ::close(listen_fd_);
  listen_fd_ = -1;
}

void ControlChannel::send_segment(int peer, const SegmentMessage& message) {
  const bool has_fd = message.fd >= 0;
  const std::size_t num_text_bytes = std::min(message.text.size(), kMaxText);
  WireSegment wire{message.id, message.kind, message.bytes, has_fd, static_cast<std::uint32_t>(num_text_bytes), {}};
  std::memcpy(wire.text, message.text.data(), num_text_bytes);
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
  WireSegment wire{};
  iovec part{&wire, sizeof(wire)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(fds_[peer], &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
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
  for (int& fd : fds_) close_fd(fd);
  for (int& fd : pid_fds_) close_fd(fd);
}

}  // namespace deep_moe
