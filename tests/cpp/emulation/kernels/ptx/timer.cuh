// Counterpart of cpp/kernels/ptx/timer.cuh.
#pragma once

#include <chrono>
#include <cstdint>

namespace deep_moe::ptx {

inline std::uint64_t globaltimer_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace deep_moe::ptx
