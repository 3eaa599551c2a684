// Counterpart of cpp/kernels/ptx/tma.cuh: there is no copy engine.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace deep_moe::ptx {

inline constexpr bool kHasTma = false;
inline bool mbarrier_try_wait_acquire_cta(std::uint64_t*, std::uint32_t) { std::abort(); }

}  // namespace deep_moe::ptx
