#include "runtime/tcp.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include <deep_moe/error.hpp>

namespace deep_moe {
namespace {

// A machine that answers nothing: the first probe after, one every, and the end after so many. What has been sent and
// is not acknowledged ends the connection as late.
constexpr int kProbeAfterSeconds = 10, kProbeEverySeconds = 5, kProbes = 3;
constexpr unsigned kUnansweredMs = 1000 * (kProbeAfterSeconds + kProbes * kProbeEverySeconds);

struct Interface {
  std::string name, address;
  bool loopback = false;
};

std::string numeric(const sockaddr& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.sa_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof(text));
  } else if (address.sa_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&v6)) return {};  // means something on its own link alone
    if (IN6_IS_ADDR_V4MAPPED(&v6)) {
      ::inet_ntop(AF_INET, v6.s6_addr + 12, text, sizeof(text));
    } else {
      ::inet_ntop(AF_INET6, &v6, text, sizeof(text));
    }
  }
  return text;
}

bool is_v6(const std::string& address) { return address.find(':') != std::string::npos; }

std::vector<Interface> all_interfaces() {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::string address = numeric(*entry->ifa_addr);
    if (!address.empty())
      found.push_back({entry->ifa_name, std::move(address), (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return found;
}

// Of an interface that has both, IPv4's alone.
std::vector<Interface> interfaces() {
  std::vector<Interface> found = all_interfaces();
  std::set<std::string> with_v4;
  for (const Interface& one : found)
    if (!is_v6(one.address)) with_v4.insert(one.name);
  std::erase_if(found, [&](const Interface& one) { return is_v6(one.address) && with_v4.count(one.name) != 0; });
  return found;
}

// Bridges of containers and the like, whose addresses are often the same on every machine, have no device behind them.
bool is_virtual(const Interface& one) {
  return ::access(("/sys/class/net/" + one.name + "/device").c_str(), F_OK) != 0;
}

socklen_t fill(const std::string& address, std::uint16_t port, sockaddr_storage* storage) {
  std::memset(storage, 0, sizeof(*storage));
  auto* const v4 = reinterpret_cast<sockaddr_in*>(storage);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(storage);
  if (::inet_pton(AF_INET, address.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    return sizeof(*v4);
  }
  if (::inet_pton(AF_INET6, address.c_str(), &v6->sin6_addr) != 1) return 0;
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(port);
  return sizeof(*v6);
}

bool wait_for(int fd, short events, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, std::max(timeout_ms, 0));
    if (ready >= 0 || errno != EINTR) return ready > 0;
    timeout_ms = static_cast<int>(
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count());
  }
}

}  // namespace

std::vector<std::string> own_addresses() {
  std::vector<Interface> all = interfaces();
  std::vector<std::string> addresses;
  const auto take = [&](const auto& wanted) {
    for (const Interface& one : all)
      if (wanted(one)) addresses.push_back(one.address);
  };
  if (const char* names = std::getenv("DEEP_MOE_SOCKET_IFNAME"); names != nullptr && *names != '\0') {
    std::istringstream stream(names);
    for (std::string name; std::getline(stream, name, ',');) {
      const std::size_t before = addresses.size();
      take([&](const Interface& one) { return one.name == name; });
      if (addresses.size() > before) continue;
      std::string known;
      for (const Interface& one : all)
        if (known.find(" " + one.name + ",") == std::string::npos) known += " " + one.name + ",";
      throw ArgumentError("DEEP_MOE_SOCKET_IFNAME: got '" + name + "', expected interfaces that are up: there are" +
                          (known.empty() ? " none" : known.substr(0, known.size() - 1)));
    }
    return addresses;
  }
  take([](const Interface& one) { return !one.loopback && !is_virtual(one); });
  take([](const Interface& one) { return !one.loopback && is_virtual(one); });
  if (addresses.empty()) addresses.push_back("127.0.0.1");
  return addresses;
}

int listen_tcp(const std::vector<std::string>& addresses, int backlog, Endpoint* endpoint) {
  const bool any_v6 = std::any_of(addresses.begin(), addresses.end(), is_v6);
  sockaddr_storage storage;
  const std::string bound = addresses.size() == 1 ? addresses[0] : any_v6 ? "::" : "0.0.0.0";
  socklen_t bytes = fill(bound, 0, &storage);
  const int fd = ::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int off = 0;
  if (fd >= 0 && bound == "::") ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&storage), bytes) != 0 || ::listen(fd, backlog) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &(bytes = sizeof(storage))) != 0) {
    const std::string reason = std::strerror(errno);
    if (fd >= 0) ::close(fd);
    throw Error("cannot listen for ranks of other machines at " + bound + ": " + reason);
  }
  endpoint->port = ntohs(storage.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(storage).sin_port
                                                      : reinterpret_cast<sockaddr_in6&>(storage).sin6_port);
  std::string text;
  for (const std::string& address : addresses) {
    if (text.size() + address.size() + 2 > sizeof(endpoint->addresses)) break;
    text += (text.empty() ? "" : " ") + address;
  }
  std::memcpy(endpoint->addresses, text.c_str(), text.size() + 1);
  return fd;
}

int connect_tcp(const std::string& address, std::uint16_t port, int timeout_ms) noexcept {
  sockaddr_storage storage;
  const socklen_t bytes = fill(address, port, &storage);
  if (bytes == 0) return errno = EINVAL, -1;
  const int fd = ::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  int problem = ::connect(fd, reinterpret_cast<sockaddr*>(&storage), bytes) == 0 ? 0 : errno;
  if (problem == EINPROGRESS || problem == EINTR) {
    socklen_t size = sizeof(problem);
    problem = ETIMEDOUT;
    if (wait_for(fd, POLLOUT, timeout_ms)) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &size);
  }
  if (problem != 0) {
    ::close(fd);
    return errno = problem, -1;
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  set_tcp_options(fd);
  return fd;
}

void set_tcp_options(int fd) noexcept {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kProbeAfterSeconds, sizeof(int));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeEverySeconds, sizeof(int));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(int));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnansweredMs, sizeof(unsigned));
}

std::string interface_of(int fd) {
  sockaddr_storage storage;
  socklen_t bytes = sizeof(storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) return {};
  const std::string address = numeric(reinterpret_cast<sockaddr&>(storage));
  for (const Interface& one : all_interfaces())
    if (one.address == address) return one.name;
  return {};
}

bool send_whole(int fd, const void* data, std::size_t bytes) noexcept {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool receive_whole(int fd, void* data, std::size_t bytes, int timeout_ms) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0 || !wait_for(fd, POLLIN, static_cast<int>(left.count()))) return false;
    const ssize_t got = ::recv(fd, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace deep_moe
