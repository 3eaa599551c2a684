// Scalar conversions between fp32 and the narrow formats, rounding to nearest even, as torch rounds. Every NaN becomes
// the one positive quiet NaN of its format, so that results do not depend on the order of an instruction's operands.
//
// The functions have internal linkage on purpose: this header is compiled into files with different instruction sets,
// and the linker must not pick one file's copy for another.
#pragma once

#include <cstdint>
#include <cstring>

namespace deep_moe::cpu {

static inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float bf16_to_float(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

static inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float fp16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00u) return float_of(0x7fc00000u);
  if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return float_of(sign | bits_of(subnormal));
}

static inline std::uint16_t float_to_fp16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 2^16 and more
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum's last bit is worth 2^-24, so the addition rounds
    const std::uint32_t sum = bits_of(float_of(magnitude) + 0.5f);
    return static_cast<std::uint16_t>(sign | (sum - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// e4m3fn: 448 is the largest finite value; what would round past it is NaN.
static inline std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43f00000u) return static_cast<std::uint8_t>(sign | 0x7fu);  // 480 and more
  if (magnitude < 0x3c800000u) {  // below 2^-6: the sum's last bit is worth 2^-9
    const std::uint32_t sum = bits_of(float_of(magnitude) + 0x1p14f);
    return static_cast<std::uint8_t>(sign | (sum - 0x46800000u));
  }
  const std::uint32_t rounded = magnitude - ((127u - 7u) << 23) + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | (rounded >> 20));
}

static inline float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of(0x7fc00000u);
  if (magnitude >= 0x08u) return float_of(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;  // exact
  return float_of(sign | bits_of(subnormal));
}

}  // namespace deep_moe::cpu
