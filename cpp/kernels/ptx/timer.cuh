// Clocks.
#pragma once

#include <cstdint>

namespace deep_moe::ptx {

// Nanoseconds on a clock of the whole GPU; it may tick as coarsely as once a microsecond.
__device__ __forceinline__ std::uint64_t globaltimer_ns() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

}  // namespace deep_moe::ptx
