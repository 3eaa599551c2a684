// What the launches of this folder share. Each file has its kernel as a template over the network; the plug-in
// instantiates them for its own.
#pragma once

#include <algorithm>

#include "kernels/internode/network.cuh"
#include "kernels/internode/tuning.hpp"
#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels::internode {

inline void check_domain(const RailDomain& domain) {
  check_range("domain.num_nodes", domain.num_nodes, 2, layout::kMaxNodes);
  check_range("domain.node.num_ranks", domain.node.num_ranks, 1, layout::kMaxKernelRanks);
  check_range("ranks and nodes together", domain.num_ranks() + domain.num_nodes, 3, layout::kMaxKernelRanks);
  check_range("ranks and those of a node together", domain.num_ranks() + domain.num_local_ranks(), 3,
              layout::kMaxKernelRanks);
  check_range("slots of a ring", domain.rail.shape().num_slots, 1, layout::kMaxRingSlots);
}

// The ranks of a node, as bits.
inline std::uint64_t ranks_of(const RailDomain& domain, int node) {
  std::uint64_t ranks = 0;
  for (int local = 0; local < domain.num_local_ranks(); ++local)
    ranks |= std::uint64_t{1} << domain.rank_at(node, local);
  return ranks;
}

// Blocks of a row call: every ring has a warp.
inline int num_blocks(const RailDomain& domain, int num_sms, int num_warps) {
  const int ring_warps = num_warps / 2;
  return std::max(num_sms, (domain.num_nodes - 1 + ring_warps - 1) / ring_warps);
}

inline void check_row(const RailDomain& domain, std::size_t stride) {
  if (stride > domain.rail.shape().slot_bytes)
    throw ArgumentError("a row takes " + std::to_string(stride) + " bytes between nodes; a slot has " +
                        std::to_string(domain.rail.shape().slot_bytes));
}

}  // namespace deep_moe::kernels::internode
