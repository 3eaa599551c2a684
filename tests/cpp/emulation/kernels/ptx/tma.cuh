// Counterpart of cpp/kernels/ptx/tma.cuh: there is no copy engine.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace deep_moe::ptx {

inline constexpr bool kHasTma = false;
inline void mbarrier_init(std::uint64_t*, std::uint32_t) { std::abort(); }
inline void fence_mbarrier_init() { std::abort(); }
inline void mbarrier_arrive_expect_tx(std::uint64_t*, std::uint32_t) { std::abort(); }
inline void bulk_load(void*, const void*, std::uint32_t, std::uint64_t*) { std::abort(); }
inline void bulk_store(void*, const void*, std::uint32_t) { std::abort(); }
inline void bulk_commit_group() { std::abort(); }
template <int kPending>
void bulk_wait_group_read() {
  std::abort();
}
template <int kPending>
void bulk_wait_group() {
  std::abort();
}
inline void fence_proxy_async() { std::abort(); }
inline bool mbarrier_try_wait_acquire_cta(std::uint64_t*, std::uint32_t) { std::abort(); }

}  // namespace deep_moe::ptx
