// TCP between machines, for the control channel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deep_moe {

// Where a rank of another machine is reached: plain bytes, which the group hands round.
struct Endpoint {
  std::uint16_t port = 0;
  char addresses[254] = {};  // numeric, blanks between; those that are likely to serve come first
};

// Of the interfaces that DEEP_MOE_SOCKET_IFNAME names (commas between), else of all that are up; loopback's only where
// there is no other. Throws ArgumentError where a named interface has none.
std::vector<std::string> own_addresses();

// Throw Error.
int listen_tcp(const std::vector<std::string>& addresses, int backlog, Endpoint* endpoint);
// -1, and errno, where nobody answers in time.
int connect_tcp(const std::string& address, std::uint16_t port, int timeout_ms) noexcept;
// For a new connection: small messages go at once, and a machine that is gone ends it within half a minute.
void set_tcp_options(int fd) noexcept;
// The interface that a connection goes over; empty where that cannot be told.
std::string interface_of(int fd);

// Whole or not at all, for handshakes; false at the end of the stream or of the time.
bool send_whole(int fd, const void* data, std::size_t bytes) noexcept;
bool receive_whole(int fd, void* data, std::size_t bytes, int timeout_ms) noexcept;

}  // namespace deep_moe
