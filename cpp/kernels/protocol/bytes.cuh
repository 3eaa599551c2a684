// Bytes of any alignment.
#pragma once

#include <cstdint>

#include "kernels/ptx/memory.cuh"

namespace deep_moe::kernels {

// The largest of 16, 8, 4, 2, 1 that divides all of `bits`, the addresses and strides or-ed together.
inline int common_alignment(std::uint64_t bits) {
  for (int alignment = 16; alignment > 1; alignment /= 2)
    if (bits % static_cast<std::uint64_t>(alignment) == 0) return alignment;
  return 1;
}

template <typename Unit>
__device__ __forceinline__ uint4 load_16_by(const void* address) {
  union {
    uint4 bits;
    Unit units[16 / sizeof(Unit)];
  } value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(Unit)); ++i) value.units[i] = static_cast<const Unit*>(address)[i];
  return value.bits;
}

template <typename Unit>
__device__ __forceinline__ void store_16_by(void* address, const uint4& bits) {
  union {
    uint4 bits;
    Unit units[16 / sizeof(Unit)];
  } value;
  value.bits = bits;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(Unit)); ++i) static_cast<Unit*>(address)[i] = value.units[i];
}

// 16 bytes at an address that `alignment` divides.
__device__ __forceinline__ uint4 load_16(const void* address, int alignment) {
  switch (alignment) {
    case 16: return ptx::ld_weak_16(address);
    case 8: return load_16_by<std::uint64_t>(address);
    case 4: return load_16_by<std::uint32_t>(address);
    case 2: return load_16_by<std::uint16_t>(address);
    default: return load_16_by<std::uint8_t>(address);
  }
}

__device__ __forceinline__ void store_16(void* address, const uint4& bits, int alignment) {
  switch (alignment) {
    case 16: return ptx::st_weak_16(address, bits);
    case 8: return store_16_by<std::uint64_t>(address, bits);
    case 4: return store_16_by<std::uint32_t>(address, bits);
    case 2: return store_16_by<std::uint16_t>(address, bits);
    default: return store_16_by<std::uint8_t>(address, bits);
  }
}

// 16 bytes at any address, without a function call. Reads the aligned 16 bytes in which they begin and those in which
// they end.
__device__ __forceinline__ uint4 load_16_anywhere(const char* address) {
  const std::uint64_t at = reinterpret_cast<std::uint64_t>(address);
  const int shift = static_cast<int>(at % 16);
  const uint4 low = ptx::ld_weak_16(reinterpret_cast<const void*>(at - at % 16));
  const uint4 high = ptx::ld_weak_16(reinterpret_cast<const void*>((at + 15) / 16 * 16));
  std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i)
    if ((shift & 8) != 0) words[i] = words[i + 2];
#pragma unroll
  for (int i = 0; i < 5; ++i)
    if ((shift & 4) != 0) words[i] = words[i + 1];
  const auto cut = [&](int i) { return __funnelshift_r(words[i], words[i + 1], 8 * (shift % 4)); };
  return make_uint4(cut(0), cut(1), cut(2), cut(3));
}

// The same to an address that 2 divides.
__device__ __forceinline__ void store_16_by_halves(char* address, const uint4& bits) {
  const std::uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    reinterpret_cast<std::uint16_t*>(address)[i] = static_cast<std::uint16_t>(words[i / 2] >> 16 * (i % 2));
}

// An item of 1, 2, 4 or 8 bytes at an address that its size divides.
__device__ __forceinline__ std::uint64_t load_item(const char* address, int bytes) {
  switch (bytes) {
    case 8: return *reinterpret_cast<const std::uint64_t*>(address);
    case 4: return *reinterpret_cast<const std::uint32_t*>(address);
    case 2: return *reinterpret_cast<const std::uint16_t*>(address);
    default: return *reinterpret_cast<const std::uint8_t*>(address);
  }
}

// The same, past L1.
__device__ __forceinline__ std::uint64_t load_fresh_item(const char* address, int bytes) {
  switch (bytes) {
    case 8: return ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint64_t*>(address));
    case 4: return ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint32_t*>(address));
    case 2: return ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint16_t*>(address));
    default: return ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint8_t*>(address));
  }
}

__device__ __forceinline__ void store_item(char* address, std::uint64_t value, int bytes) {
  switch (bytes) {
    case 8: *reinterpret_cast<std::uint64_t*>(address) = value; break;
    case 4: *reinterpret_cast<std::uint32_t*>(address) = static_cast<std::uint32_t>(value); break;
    case 2: *reinterpret_cast<std::uint16_t*>(address) = static_cast<std::uint16_t>(value); break;
    default: *reinterpret_cast<std::uint8_t*>(address) = static_cast<std::uint8_t>(value);
  }
}

}  // namespace deep_moe::kernels
