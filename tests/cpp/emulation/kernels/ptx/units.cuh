// Counterpart of cpp/kernels/ptx/units.cuh: aligned 16 bytes are moved whole.
#pragma once

#include <cuda_runtime.h>
#include <emmintrin.h>

namespace deep_moe::ptx {

inline uint4 ld_relaxed_sys_16(const void* address) {
  ::emulation::Block::here().loads();
  __m128i whole;
  asm volatile("movdqa %1, %0" : "=x"(whole) : "m"(*static_cast<const __m128i*>(address)) : "memory");
  uint4 value;
  std::memcpy(&value, &whole, 16);
  return value;
}

inline void st_relaxed_sys_16(void* address, const uint4& value) {
  __m128i whole;
  std::memcpy(&whole, &value, 16);
  asm volatile("movdqa %1, %0" : "=m"(*static_cast<__m128i*>(address)) : "x"(whole) : "memory");
}

}  // namespace deep_moe::ptx
