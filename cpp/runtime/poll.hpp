// Waiting, on the host, for what kernels or other ranks' hosts do.
#pragma once

#include <functional>
#include <string>

namespace deep_moe {

// The rules of a wait: the same for words that kernels write and for messages of peers.
struct WaitRules {
  int rank = 0;
  double timeout_seconds = 100.0;
  std::function<void()> interrupt_check;  // about every 50 ms; may throw
  std::function<bool(int peer, std::string* how)> peer_gone;
  // For words of a kernel behind which the GPU has nothing to do: spins for longer, and sleeps only for moments for as
  // long as work is likely to take.
  bool urgent = false;
};

// Blocks until first_missing() returns -1; otherwise it returns the peer to blame (this rank itself for its own
// kernels). Spins for about 50 us (1 ms if urgent), then sleeps briefly between looks. Throws TimeoutError after the
// deadline, PeerLostError when the blamed peer is gone; `describe(peer)` gives "expected ..., saw ..." for the error's
// text.
void poll_until(const WaitRules& rules, const char* phase, const std::function<int()>& first_missing,
                const std::function<std::string(int peer)>& describe);

}  // namespace deep_moe
