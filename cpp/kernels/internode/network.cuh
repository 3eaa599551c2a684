// What the kernels between nodes take from a network (docs/internode.md, G1 to G6), and the network that is memory
// mapped by all ranks. A network for these kernels is a type with these members, passed by value; offsets are those of
// layout::RailLayout, the same in every rank's block.
//
//   char* memory() const                   this rank's block
//   void put_signal(rank, to, from, bytes, word, value) const
//                                          the whole warp; `bytes` a multiple of 16. What the warp's lanes have written
//                                          before goes along; the word is set after all data is there
//   void put_signal_by_block(...) const    the same by all threads of a block
//   void signal(rank, word, value) const   one thread; what it has read before has been read
//   bool is(word, value) const             one thread; what was delivered before the value is visible to it
//   kDirect                                slots of a peer's rings are written in place: then
//   char* memory_of(rank) const            is a peer's block, and nothing is put for a chunk but its signal
#pragma once

#include <cstdint>

#include "kernels/internode/api.hpp"
#include "kernels/ptx/memory.cuh"

namespace deep_moe::kernels::internode {

struct MappedNetwork {
  MappedBlocks mapped;
  int rank;

  static constexpr bool kDirect = true;
  __device__ char* memory() const { return mapped.blocks[rank]; }
  __device__ char* memory_of(int of_rank) const { return mapped.blocks[of_rank]; }
  __device__ void put_signal(int to_rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word,
                             std::uint64_t value) const {
    __syncwarp();
    copy(to_rank, to, from, bytes, threadIdx.x % 32, 32);
    __syncwarp();
    if (threadIdx.x % 32 == 0) signal(to_rank, word, value);
  }
  __device__ void put_signal_by_block(int to_rank, std::size_t to, std::size_t from, std::size_t bytes,
                                      std::size_t word, std::uint64_t value) const {
    __syncthreads();
    copy(to_rank, to, from, bytes, threadIdx.x, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) signal(to_rank, word, value);
  }
  __device__ void signal(int to_rank, std::size_t word, std::uint64_t value) const {
    ptx::st_release_sys(reinterpret_cast<std::uint64_t*>(mapped.blocks[to_rank] + word), value);
  }
  __device__ bool is(std::size_t word, std::uint64_t value) const {
    return ptx::ld_acquire_sys(reinterpret_cast<const std::uint64_t*>(memory() + word)) == value;
  }

 private:
  __device__ void copy(int to_rank, std::size_t to, std::size_t from, std::size_t bytes, unsigned thread,
                       unsigned threads) const {
    const char* source = memory() + from;
    char* target = mapped.blocks[to_rank] + to;
    for (std::size_t at = 16 * thread; at < bytes; at += 16 * threads)
      ptx::st_weak_16(target + at, *reinterpret_cast<const uint4*>(source + at));
  }
};

}  // namespace deep_moe::kernels::internode
