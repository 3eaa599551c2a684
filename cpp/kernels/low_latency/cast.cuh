// The cast to fp8 e4m3 with a scale for each 128 elements: the same numbers as the CPU's, bit for bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/protocol/bytes.cuh"

namespace deep_moe::kernels {

inline constexpr int kCastBlock = 128;    // elements that share a scale
inline constexpr int kCastElements = 16;  // of one lane: 16 bytes of fp8
inline constexpr int kCastLanes = kCastBlock / kCastElements;

// Numbers of one type in 32-bit words, so that they stay in registers. To fp32, and from it: rounded to nearest even,
// every NaN the one positive quiet NaN of the format.
template <typename T>
struct Numbers;

template <>
struct Numbers<__nv_bfloat16> {
  static constexpr int kPerWord = 2;
  __device__ __forceinline__ static float get(std::uint32_t word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  }
  __device__ __forceinline__ static std::uint32_t put(const float* values) {
    const auto bits = [](float value) {
      return std::uint32_t{value == value ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : std::uint16_t{0x7fc0}};
    };
    return bits(values[0]) | bits(values[1]) << 16;
  }
  // The same, but a NaN is 0x7fff.
  __device__ __forceinline__ static std::uint32_t put_pair(const float* values) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
    return __bfloat16_as_ushort(pair.x) | std::uint32_t{__bfloat16_as_ushort(pair.y)} << 16;
  }
};

template <>
struct Numbers<__half> {
  static constexpr int kPerWord = 2;
  __device__ __forceinline__ static float get(std::uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(i == 0 ? word : word >> 16)));
  }
  __device__ __forceinline__ static std::uint32_t put(const float* values) {
    const auto bits = [](float value) {
      return std::uint32_t{value == value ? __half_as_ushort(__float2half_rn(value)) : std::uint16_t{0x7e00}};
    };
    return bits(values[0]) | bits(values[1]) << 16;
  }
  __device__ __forceinline__ static std::uint32_t put_pair(const float* values) {
    const __half2 pair = __floats2half2_rn(values[0], values[1]);
    return __half_as_ushort(pair.x) | std::uint32_t{__half_as_ushort(pair.y)} << 16;
  }
};

template <>
struct Numbers<float> {
  static constexpr int kPerWord = 1;
  __device__ __forceinline__ static float get(std::uint32_t word, int) { return __uint_as_float(word); }
  __device__ __forceinline__ static std::uint32_t put(const float* values) {
    return values[0] == values[0] ? __float_as_uint(values[0]) : 0x7fc00000u;
  }
};

// Number `i` of a vector; `i` is known when this is compiled.
template <typename T>
__device__ __forceinline__ float number(const uint4& vector, int i) {
  constexpr int kPerWord = Numbers<T>::kPerWord;
  const int word = i / kPerWord;
  return Numbers<T>::get(word == 0 ? vector.x : word == 1 ? vector.y : word == 2 ? vector.z : vector.w, i % kPerWord);
}

// A vector of numbers. NaNs are looked for in all of it at once, for there are none.
template <typename T>
__device__ __forceinline__ uint4 rounded_vector(const float* values) {
  constexpr int kPerWord = Numbers<T>::kPerWord;
  if constexpr (kPerWord == 1) {
    return make_uint4(Numbers<T>::put(values), Numbers<T>::put(values + 1), Numbers<T>::put(values + 2),
                      Numbers<T>::put(values + 3));
  } else {
    std::uint32_t words[4], most = 0;  // largest magnitudes, of two numbers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = Numbers<T>::put_pair(values + 2 * i);
      most = __vmaxu2(most, words[i] & 0x7fff7fffu);
    }
    if (max(most & 0xffffu, most >> 16) == 0x7fffu) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = Numbers<T>::put(values + 2 * i);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename T>
struct CastInput {
  static constexpr int kVectors = kCastElements * static_cast<int>(sizeof(T)) / 16;
  uint4 vectors[kVectors];

  __device__ __forceinline__ void load(const char* address, int alignment) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      vectors[i] = alignment == 16 ? ptx::ld_weak_16(address + 16 * i) : load_16_anywhere(address + 16 * i);
  }
  // The bits, as fp32, of the largest magnitude: a NaN is above everything.
  __device__ __forceinline__ std::uint32_t amax_bits() const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      std::uint32_t most = 0;  // two of them
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        most = __vmaxu2(most, __vmaxu2(vectors[i].x & 0x7fff7fffu, vectors[i].y & 0x7fff7fffu));
        most = __vmaxu2(most, __vmaxu2(vectors[i].z & 0x7fff7fffu, vectors[i].w & 0x7fff7fffu));
      }
      return max(most & 0xffff0000u, most << 16);
    } else {
      std::uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kCastElements; ++i) most = max(most, __float_as_uint(value(i)) & 0x7fffffffu);
      return most;
    }
  }
  __device__ __forceinline__ float value(int i) const {
    constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));
    return number<T>(vectors[i / kPerVector], i % kPerVector);
  }
};

struct CastScale {
  float scale, inverse;
};

// `amax` by its bits: a NaN is above everything.
__device__ __forceinline__ CastScale cast_scale(std::uint32_t amax_bits, bool round_scale) {
  constexpr std::uint32_t kMinAmax = 0x38d1b717u, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;  // 1e-4
  if (amax_bits < kMinAmax) amax_bits = kMinAmax;
  if (amax_bits > kInfinity) return {__uint_as_float(kNan), __uint_as_float(kNan)};
  const float amax = __uint_as_float(amax_bits);
  CastScale result{__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  if (round_scale && amax_bits < kInfinity) {
    result.scale = __uint_as_float((__float_as_uint(result.scale) + 0x007fffffu) & kInfinity);
    result.inverse = __fdiv_rn(1.0f, result.scale);
  }
  return result;
}

// This lane's 16 elements; those of kCastLanes neighbours, kNeighbour lanes apart, share a scale. The whole warp.
template <int kNeighbour, typename T>
__device__ __forceinline__ uint4 cast_block(const CastInput<T>& input, bool round_scale, float* scale) {
  std::uint32_t amax = input.amax_bits();
#pragma unroll
  for (int step = kNeighbour; step < kNeighbour * kCastLanes; step *= 2)
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const CastScale both = cast_scale(amax, round_scale);
  *scale = both.scale;
  std::uint32_t words[kCastElements / 4];
#pragma unroll
  for (int i = 0; i < kCastElements / 4; ++i) {
    const auto pair = [&](int at) {
      const float2 values =
          make_float2(__fmul_rn(input.value(at), both.inverse), __fmul_rn(input.value(at + 1), both.inverse));
      return static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3));
    };
    words[i] = pair(4 * i) | pair(4 * i + 2) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace deep_moe::kernels
