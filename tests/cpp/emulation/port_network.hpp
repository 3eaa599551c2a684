// What kernels/internode/network.cuh asks of a network, over a port of random_network.hpp. Nobody catches what is
// thrown in a kernel: the program ends.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "../random_network.hpp"

namespace deep_moe::test {

struct PortNetwork {
  cpu::OneSided* port;

  static constexpr bool kDirect = false;
  char* memory() const { return port->memory(); }
  void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word,
                  std::uint64_t value) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) put(rank, to, from, bytes, word, value);
  }
  void put_signal_by_block(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word,
                           std::uint64_t value) const {
    __syncthreads();
    if (threadIdx.x == 0) put(rank, to, from, bytes, word, value);
  }
  void signal(int rank, std::size_t word, std::uint64_t value) const { port->signal(rank, word, value); }
  bool is(std::size_t word, std::uint64_t value) const {
    emulation::Block::here().loads();
    return port->test(word) == value;
  }

 private:
  void put(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word, std::uint64_t value) const {
    if ((to | from | bytes) % 16 != 0) throw std::logic_error("a put that is not of whole 16 bytes");
    port->put_signal(rank, to, from, bytes, word, value);
  }
};

}  // namespace deep_moe::test
