// 16 bytes that are loaded and stored whole, at a scope; see memory.cuh for the names. Whoever loads them has to use
// all four words: ptxas (13.0) drops those that are not used and then loads the others one by one, at different times.
#pragma once

#include <cstdint>

namespace deep_moe::ptx {

__device__ __forceinline__ uint4 ld_relaxed_sys_16(const void* address) {
  std::uint64_t low, high;
  asm volatile(
      "{\n"
      "  .reg .b128 whole;\n"
      "  ld.relaxed.sys.global.b128 whole, [%2];\n"
      "  mov.b128 {%0, %1}, whole;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                    static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32));
}

__device__ __forceinline__ void st_relaxed_sys_16(void* address, const uint4& value) {
  const std::uint64_t low = value.x | static_cast<std::uint64_t>(value.y) << 32;
  const std::uint64_t high = value.z | static_cast<std::uint64_t>(value.w) << 32;
  asm volatile(
      "{\n"
      "  .reg .b128 whole;\n"
      "  mov.b128 whole, {%1, %2};\n"
      "  st.relaxed.sys.global.b128 [%0], whole;\n"
      "}" ::"l"(address),
      "l"(low), "l"(high)
      : "memory");
}

}  // namespace deep_moe::ptx
