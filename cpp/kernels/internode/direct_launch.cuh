// What the launches of low-latency calls between nodes share.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/internode/direct_call.cuh"
#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels::internode {

inline constexpr int kMostDirectShared = 100 * 1024;

inline void check_direct(const DirectDomain& domain, const LowLatencyCall& call) {
  kernels::check_domain(domain.group);
  check_range("num_nodes", domain.ranks.num_nodes, 2, layout::kMaxKernelRanks);
  check_range("num_blocks", call.num_blocks, 1, 4096);
  check_range("staging.slot_bytes", call.staging.slot_bytes,
              static_cast<std::int64_t>(domain.layout.mates_slot_bytes()), INT64_MAX);
}
inline void check_direct(const DirectDomain& domain, const LowLatencyCall& call, const TopkIds& ids) {
  check_direct(domain, call);
  if (call.epoch == nullptr) throw ArgumentError("call.epoch is null");
  check_range("max_tokens", call.max_tokens, 1, layout::kMostLowLatencyTokens);
  check_ids(ids, call.num_experts, 0);
}

// Rows that fit a part; enough for the call's, or this throws.
inline std::int64_t room_for_rows(const DirectDomain& domain, const layout::DirectMessage& message,
                                  std::int64_t most_rows) {
  check_range("part_bytes of the network's memory", static_cast<std::int64_t>(domain.layout.part_bytes()),
              static_cast<std::int64_t>(message.bytes(most_rows)), INT64_MAX);
  return most_rows;
}

// Tokens that a block of a dispatch looks at together, by the experts of a rank: what it counts has to fit its shared
// memory.
inline int direct_chunk(int max_local_experts) {
  constexpr int kMost = 512, kWords = 20 * 1024;
  return 32 * std::clamp(kWords / max_local_experts - 1, 1, kMost / 32);
}

}  // namespace deep_moe::kernels::internode
