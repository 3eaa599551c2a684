// Elements of a row that are encoded together.
#pragma once

#include <cstdint>

namespace deep_moe {

inline constexpr std::int64_t kFp8Block = 128;  // share one fp8 scale

// As 10-bit logarithms: the smallest and the spacing, then the codes.
inline constexpr std::int64_t kLogfmtBlock = 128;
inline constexpr std::int64_t kLogfmtBlockBytes = 8 + kLogfmtBlock + kLogfmtBlock / 4;

}  // namespace deep_moe
