// NVSHMEM in this process: started once, for one group of ranks, and never ended. Its memory is handed to one Buffer
// after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <deep_moe/bootstrap.hpp>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

struct SymmetricBlock {
  char* memory = nullptr;
  std::shared_ptr<void> lease;  // the block may be handed out again when this is gone
};

// Collective, on the current device: zeroed memory of `bytes` on every rank, which nothing of an earlier user reaches
// any more. `processes` by rank. Throws UnavailableError, on all ranks alike, where ranks share a process or are not
// those that NVSHMEM was started for.
SymmetricBlock take_symmetric_block(const Bootstrap& bootstrap, const std::vector<std::uint64_t>& processes,
                                    std::size_t bytes, Stream stream);

}  // namespace deep_moe::cuda
