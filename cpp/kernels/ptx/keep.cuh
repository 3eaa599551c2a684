// What the compiler may not leave out.
#pragma once

#include <cstdint>

namespace deep_moe::ptx {

// `value` is worked out, though nothing uses it.
__device__ __forceinline__ void keep(std::uint32_t value) { asm volatile("" ::"r"(value)); }

}  // namespace deep_moe::ptx
