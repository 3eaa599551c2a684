// What the launch functions of low-latency calls share.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/intranode/launch.hpp"
#include "kernels/tuning.hpp"

namespace deep_moe::kernels {

inline void check_low_latency(const DeviceDomain& domain, const LowLatencyCall& call, std::int64_t slot_bytes) {
  check_domain(domain);
  check_range("max_tokens", call.max_tokens, 1, INT32_MAX);
  check_range("num_blocks", call.num_blocks, 3, 4096);
  check_range("staging.slot_bytes", call.staging.slot_bytes, slot_bytes, INT64_MAX);
  if (call.half != LowLatencyHalf::kBoth && call.epoch == nullptr)
    throw ArgumentError("call.epoch is null; allowed: null only for a call in one launch");
}

// Blocks for so many tasks of a warp on either side.
inline int num_low_latency_blocks(const LowLatencyCall& call, std::int64_t send_tasks, std::int64_t receive_tasks) {
  constexpr int kWarps = LowLatencyTuning::kThreads / 32;
  const auto blocks = [](std::int64_t tasks) { return (tasks + kWarps - 1) / kWarps; };
  const std::int64_t carriers =
      std::max<std::int64_t>(LowLatencyTuning::kFewestCarriers, blocks(send_tasks) + blocks(receive_tasks));
  return static_cast<int>(std::min<std::int64_t>(call.num_blocks, carriers + 2));
}

// Whether every warp has a task at most: then it had better be a small one.
inline bool fits_one_round(const LowLatencyCall& call, std::int64_t tasks) {
  return tasks <= static_cast<std::int64_t>(call.num_blocks - 2) * (LowLatencyTuning::kThreads / 32);
}

void prepare_low_latency_dispatch();
void prepare_low_latency_combine();

}  // namespace deep_moe::kernels
