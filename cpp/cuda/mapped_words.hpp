// Host memory that kernels of every device can write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

}  // namespace deep_moe::cuda
