// Loads, stores and atomics on global memory, named operation_order_scope. Each is volatile and clobbers memory, so the
// compiler keeps them in program order and moves no other access across them.
#pragma once

#include <cstdint>

namespace deep_moe::ptx {

__device__ __forceinline__ std::uint64_t ld_relaxed_gpu(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::int32_t ld_relaxed_gpu(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ float ld_relaxed_gpu(const float* address) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint16_t* address) {
  std::uint16_t value;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint8_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u8 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t ld_relaxed_sys(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t ld_acquire_sys(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t ld_acquire_gpu(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_release_gpu(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_release_sys(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_release_sys(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Return what was there before.
__device__ __forceinline__ std::uint64_t atom_add_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
  return before;
}

__device__ __forceinline__ std::uint64_t atom_or_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.or.relaxed.gpu.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
  return before;
}

__device__ __forceinline__ std::uint64_t atom_add_acq_rel_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
  return before;
}

__device__ __forceinline__ std::uint32_t atom_exch_relaxed_gpu(std::uint32_t* address, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.exch.relaxed.gpu.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// So that what `value` was made of is not left out.
__device__ __forceinline__ void keep(std::uint32_t value) { asm volatile("" ::"r"(value)); }

__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// 16 bytes that nobody writes while the kernel runs, past the L1 cache. Not volatile: these may be moved and batched,
// but across no other access of this file.
__device__ __forceinline__ uint4 ld_weak_16(const void* address) {
  uint4 value;
#ifdef DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
  asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address)
      : "memory");
  return value;
}

__device__ __forceinline__ void st_weak_16(void* address, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// 16 bytes from global to shared memory, past the registers; there for the thread that has asked for it, after
// cp_async_wait_all.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace deep_moe::ptx
