// How ranks find each other, once, in the constructor of a Buffer.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace deep_moe {

// A blocking all-gather over the ranks of one group: every rank passes `bytes` bytes at `send`; `recv` gets
// size * bytes bytes in rank order. Called a few times while a Buffer is made, never afterwards.
struct Bootstrap {
  int rank = 0;
  int size = 1;
  std::function<void(const void* send, void* recv, std::size_t bytes)> all_gather;
};

// Bootstraps for ranks that are threads of this process; entry r is to be used by the thread of rank r. May be
// used for any number of Buffers, one after the other or interleaved in the same order on all ranks.
std::vector<Bootstrap> make_thread_bootstraps(int num_ranks);

}  // namespace deep_moe
