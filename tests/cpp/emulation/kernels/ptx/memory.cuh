// Counterparts of cpp/kernels/ptx/memory.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace deep_moe::ptx {

template <typename T>
T load(const T* address, int order) {
  ::emulation::Block::here().loads();
  T value;
  if (order == __ATOMIC_ACQUIRE)
    __atomic_load(address, &value, __ATOMIC_ACQUIRE);
  else
    __atomic_load(address, &value, __ATOMIC_RELAXED);
  return value;
}
template <typename T>
T ld_relaxed_gpu(const T* address) {
  return load(address, __ATOMIC_RELAXED);
}
template <typename T>
T ld_relaxed_sys(const T* address) {
  return load(address, __ATOMIC_RELAXED);
}
template <typename T>
T ld_acquire_sys(const T* address) {
  return load(address, __ATOMIC_ACQUIRE);
}
inline std::uint64_t ld_acquire_gpu(const std::uint64_t* address) { return load(address, __ATOMIC_ACQUIRE); }

template <typename T>
void store(T* address, T value, int order) {
  if (order == __ATOMIC_RELEASE)
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
  else
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline void st_relaxed_gpu(std::uint64_t* address, std::uint64_t value) { store(address, value, __ATOMIC_RELAXED); }
inline void st_relaxed_gpu(std::uint32_t* address, std::uint32_t value) { store(address, value, __ATOMIC_RELAXED); }
inline void st_relaxed_sys(std::uint64_t* address, std::uint64_t value) { store(address, value, __ATOMIC_RELAXED); }
inline void st_release_gpu(std::uint64_t* address, std::uint64_t value) { store(address, value, __ATOMIC_RELEASE); }
inline void st_release_sys(std::uint64_t* address, std::uint64_t value) { store(address, value, __ATOMIC_RELEASE); }
inline void st_release_sys(std::uint32_t* address, std::uint32_t value) { store(address, value, __ATOMIC_RELEASE); }

inline std::uint64_t atom_add_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline std::uint64_t atom_add_acq_rel_gpu(std::uint64_t* address, std::uint64_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline std::uint64_t atom_or_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline std::uint32_t atom_exch_relaxed_gpu(std::uint32_t* address, std::uint32_t value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline void keep(std::uint32_t) {}
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline uint4 ld_weak_16(const void* address) { return *static_cast<const uint4*>(address); }
inline void st_weak_16(void* address, const uint4& value) { *static_cast<uint4*>(address) = value; }

}  // namespace deep_moe::ptx
