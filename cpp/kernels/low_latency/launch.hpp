// What the launch functions of low-latency calls share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "kernels/intranode/launch.hpp"
#include "kernels/tuning.hpp"

namespace deep_moe::kernels {

inline void check_low_latency(const DeviceDomain& domain, const LowLatencyCall& call, std::int64_t slot_bytes) {
  check_domain(domain);
  check_range("max_tokens", call.max_tokens, 1, INT32_MAX);
  check_range("num_blocks", call.num_blocks, 1, 4096);
  check_range("staging.slot_bytes", call.staging.slot_bytes, slot_bytes, INT64_MAX);
  if (call.half != LowLatencyHalf::kBoth && call.epoch == nullptr)
    throw ArgumentError("call.epoch is null; allowed: null only for a call in one launch");
}

// Blocks, and warps of each that carry rows, for so many tasks of a warp.
struct LowLatencyGrid {
  int blocks, carriers;
  LowLatencyGrid(const LowLatencyCall& call, std::int64_t tasks, int most_carriers) {
    constexpr std::int64_t kFew = LowLatencyTuning::kFewestCarriers;
    tasks = std::max<std::int64_t>(tasks, LowLatencyTuning::kFewestTasks);
    const std::int64_t share = (tasks + call.num_blocks - 1) / call.num_blocks;
    carriers = static_cast<int>(std::clamp<std::int64_t>(share, kFew, most_carriers));
    blocks = static_cast<int>(std::min<std::int64_t>(call.num_blocks, (tasks + carriers - 1) / carriers));
  }
};

// Whether every warp has a task at most: then it had better be a small one.
inline bool is_narrow(const LowLatencyCall& call, std::int64_t tasks, int most_warps) {
  return tasks <= static_cast<std::int64_t>(call.num_blocks) * most_warps;
}

// Whether an SM has room for two blocks of so many warps.
template <typename Kernel>
bool fits_twice(Kernel* kernel, int num_warps) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return 2 * 32 * num_warps * ((attributes.numRegs + 7) / 8 * 8) <= 65536;
}

void prepare_low_latency_dispatch();
void prepare_low_latency_combine();
void prepare_low_latency_masks();

}  // namespace deep_moe::kernels
