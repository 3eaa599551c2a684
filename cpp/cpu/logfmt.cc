#include "cpu/logfmt.hpp"

#include <cstring>

#include "cpu/convert.hpp"
#include "cpu/simd.hpp"

namespace deep_moe::cpu {

void logfmt_encode(DType dtype, const void* row, std::int64_t hidden, std::uint8_t* out) {
  simd_ops().logfmt_encode(dtype, row, hidden, out);
}

void logfmt_decode(const std::uint8_t* in, std::int64_t hidden, float* out) {
  simd_ops().logfmt_decode(in, hidden, out);
}

void round_row(DType dtype, const float* row, std::int64_t hidden, void* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, static_cast<std::size_t>(hidden) * sizeof(float));
    return;
  }
  auto* const to = static_cast<std::uint16_t*>(out);
  if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < hidden; ++i) to[i] = float_to_bf16(row[i]);
  } else {
    for (std::int64_t i = 0; i < hidden; ++i) to[i] = float_to_fp16(row[i]);
  }
}

}  // namespace deep_moe::cpu
