// fp8 as far as the cast of low-latency calls goes.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

enum { __NV_SATFINITE, __NV_E4M3 };

namespace emulation {

// e4m3, to nearest even, 448 at most.
inline std::uint16_t to_e4m3(float value) {
  constexpr unsigned kMost = 0x7e, kNan = 0x7f, kMinNormal = 0x3c800000u;  // 2^-6
  if (value != value) return kNan;
  const unsigned sign = __float_as_uint(value) >> 31 << 7;
  unsigned bits = __float_as_uint(std::fabs(value));
  if (bits < kMinNormal)
    return static_cast<std::uint16_t>(sign | static_cast<unsigned>(std::nearbyint(std::fabs(value) * 512.0f)));
  bits += 0x7ffffu + (bits >> 20 & 1);
  return static_cast<std::uint16_t>(sign | std::min((bits >> 20) - (120u << 3), kMost));
}

}  // namespace emulation

inline std::uint16_t __nv_cvt_float2_to_fp8x2(float2 values, int, int) {
  return static_cast<std::uint16_t>(::emulation::to_e4m3(values.x) | ::emulation::to_e4m3(values.y) << 8);
}
