// fp16 as far as combine and its tests go.
#pragma once

#include <cuda_runtime.h>

struct __half {
  _Float16 value;
};
inline std::uint16_t __half_as_ushort(__half half) {
  std::uint16_t bits;
  std::memcpy(&bits, &half.value, 2);
  return half.value == half.value ? bits : std::uint16_t{0x7fff};
}
inline __half __ushort_as_half(std::uint16_t bits) {
  __half half;
  std::memcpy(&half.value, &bits, 2);
  return half;
}
struct __half2 {
  __half x, y;
};
inline float __half2float(__half half) { return static_cast<float>(half.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __hadd2_rn(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) + __half2float(b.x), __half2float(a.y) + __half2float(b.y));
}
