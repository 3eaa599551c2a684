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

// The same where the address is hardly ever aligned to less than 16 bytes: code that is seldom run stays out of the
// way.
static __device__ __noinline__ uint4 load_16_unaligned(const void* address, int alignment) {
  return load_16(address, alignment);
}
static __device__ __noinline__ void store_16_unaligned(void* address, uint4 bits, int alignment) {
  store_16(address, bits, alignment);
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

__device__ __forceinline__ void store_item(char* address, std::uint64_t value, int bytes) {
  switch (bytes) {
    case 8: *reinterpret_cast<std::uint64_t*>(address) = value; break;
    case 4: *reinterpret_cast<std::uint32_t*>(address) = static_cast<std::uint32_t>(value); break;
    case 2: *reinterpret_cast<std::uint16_t*>(address) = static_cast<std::uint16_t>(value); break;
    default: *reinterpret_cast<std::uint8_t*>(address) = static_cast<std::uint8_t>(value);
  }
}

}  // namespace deep_moe::kernels
