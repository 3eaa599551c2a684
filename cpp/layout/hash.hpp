// The FNV-1a hash, a value at a time.
#pragma once

#include <cstdint>

#include "layout/host_device.hpp"

namespace deep_moe::layout {

inline constexpr std::uint64_t kFnvStart = 14695981039346656037ull;

DM_HOST_DEVICE constexpr std::uint64_t fnv_step(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 1099511628211ull;
}

}  // namespace deep_moe::layout
