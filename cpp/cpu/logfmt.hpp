// Rows as 10-bit logarithms: 168 bytes for 128 elements instead of 256 (bf16).
//
// A block has the smallest and the spacing of its logarithms, log2 |x| = least + index * step with 509 indices from the
// smallest to the largest magnitude (at most 2^32 apart; what is smaller becomes the smallest or zero, whichever is
// nearer). A code is a sign and 9 bits: 0 is zero, 1 to 509 are indices, 510 is infinity, 511 is NaN.
// The relative error of an element is at most (2^step - 1) / 2, thus 2.3 % in the worst of blocks.
#pragma once

#include <cstdint>

#include <deep_moe/tensor.hpp>

#include "layout/blocks.hpp"

namespace deep_moe::cpu {

// Bytes of an encoded row; `hidden` is a multiple of kLogfmtBlock.
inline constexpr std::int64_t logfmt_bytes(std::int64_t hidden) { return hidden / kLogfmtBlock * kLogfmtBlockBytes; }

// `row`: `hidden` elements of `dtype` (bf16, fp16, fp32).
void logfmt_encode(DType dtype, const void* row, std::int64_t hidden, std::uint8_t* out);
void logfmt_decode(const std::uint8_t* in, std::int64_t hidden, float* out);

// Rounds fp32 to `dtype`.
void round_row(DType dtype, const float* row, std::int64_t hidden, void* out);

}  // namespace deep_moe::cpu
