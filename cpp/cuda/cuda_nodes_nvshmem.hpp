// NVSHMEM in this process: started once, for one group of ranks, and never ended. Its memory is handed to one Buffer
// after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <deep_moe/bootstrap.hpp>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

struct SymmetricBlock {
  char* memory = nullptr;
  std::shared_ptr<void> lease;  // the block may be handed out again when this is gone
};

// Where the ranks are.
struct NetworkPlace {
  std::vector<std::uint64_t> processes;  // by rank
  bool one_machine = true;               // whatever DEEP_MOE_HOST_ID says
  std::string interface_name;            // by which hosts of several machines speak; empty: not known
};

// Collective, on the current device: zeroed memory of `bytes` on every rank, which nothing of an earlier user reaches
// any more. Throws UnavailableError, on all ranks alike, where ranks share a process, are not those that NVSHMEM was
// started for, or have no network; Error, on all, where NVSHMEM fails on one.
SymmetricBlock take_symmetric_block(const Bootstrap& bootstrap, const NetworkPlace& place, std::size_t bytes,
                                    Stream stream);

// NVSHMEM as it was started, for people: its version and the variables that say how it works.
std::string describe_network();

}  // namespace deep_moe::cuda
