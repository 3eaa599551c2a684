// Host memory that kernels of every device can write, and waiting for what they write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace deep_moe::cuda {

// Pinned and mapped, zeroed. Freeing such memory waits for every kernel of the device, and a kernel may be waiting for
// this very thread: what is given back is kept for the next one of its size.
class MappedWords {
 public:
  MappedWords(int device, std::size_t bytes);  // throws Error
  ~MappedWords();                              // no kernel may use it any more
  MappedWords(const MappedWords&) = delete;
  MappedWords& operator=(const MappedWords&) = delete;

  char* host() const { return host_; }
  char* device() const { return mapped_; }  // the same memory as kernels of the device see it
  std::size_t bytes() const { return bytes_; }

 private:
  void keep() noexcept;

  const std::size_t bytes_;
  const std::uint64_t forks_;
  char* host_ = nullptr;
  char* mapped_ = nullptr;
};

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

}  // namespace deep_moe::cuda
