// Numbers that combine sums, 16 bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace deep_moe::kernels {

template <typename Pair>
__device__ __forceinline__ Pair as_pair(std::uint32_t bits) {
  return *reinterpret_cast<const Pair*>(&bits);
}
template <typename Pair>
__device__ __forceinline__ std::uint32_t as_bits(const Pair& pair) {
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// 16 bytes as fp32 numbers, and back with one rounding.
template <typename T>
struct Vector;

// add_two(): two addends in fp32, rounded once. For numbers of 11 bits or fewer the sum that is rounded at once is the
// same, for fp32 has at least twice as many bits and two: rounding twice does no harm. From 0 on, so that -0 and -0
// make 0 here as well.
template <typename Add>
__device__ __forceinline__ uint4 add_words(const uint4& a, const uint4& b, Add add) {
  return {add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)};
}

template <>
struct Vector<float> {
  __device__ static uint4 add_two(const uint4& a, const uint4& b) {
    float sum[kSize] = {};
    add(sum, a), add(sum, b);
    return round(sum);
  }

  static constexpr int kSize = 4;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    sum[0] += __uint_as_float(bits.x), sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z), sum[3] += __uint_as_float(bits.w);
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
  }
};

template <>
struct Vector<__nv_bfloat16> {
  __device__ static uint4 add_two(const uint4& a, const uint4& b) {
    return add_words(a, b, [](std::uint32_t x, std::uint32_t y) {
      using Pair = __nv_bfloat162;
      return as_bits(__hadd2_rn(__hadd2_rn(as_pair<Pair>(0), as_pair<Pair>(x)), as_pair<Pair>(y)));
    });
  }
  static constexpr int kSize = 8;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    union {
      uint4 bits;
      __nv_bfloat162 pairs[4];
    } out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    return out.bits;
  }
};

template <>
struct Vector<__half> {
  __device__ static uint4 add_two(const uint4& a, const uint4& b) {
    return add_words(a, b, [](std::uint32_t x, std::uint32_t y) {
      return as_bits(__hadd2_rn(__hadd2_rn(as_pair<__half2>(0), as_pair<__half2>(x)), as_pair<__half2>(y)));
    });
  }
  static constexpr int kSize = 8;
  __device__ static void add(float (&sum)[kSize], const uint4& bits) {
    union {
      uint4 bits;
      __half2 pairs[4];
    } in;
    in.bits = bits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(in.pairs[i]);
      sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;
    }
  }
  __device__ static uint4 round(const float (&sum)[kSize]) {
    union {
      uint4 bits;
      __half2 pairs[4];
    } out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    return out.bits;
  }
};

}  // namespace deep_moe::kernels
