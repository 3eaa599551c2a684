// SimdOps for any machine: 16-byte vectors, which every 64-bit instruction set has.
#include "cpu/convert.hpp"
#include "cpu/logfmt_kernels.hpp"
#include "cpu/simd_kernels.hpp"

namespace deep_moe::cpu {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bf16 are split as little-endian words");

struct Generic {
  static constexpr int kBytes = 16;

  static Floats<kBytes> load_fp16(const char* ptr) {
    std::uint16_t raw[kBytes / 4];
    std::memcpy(raw, ptr, sizeof raw);
    Floats<kBytes> value;
    for (int i = 0; i < kBytes / 4; ++i) value[i] = fp16_to_float(raw[i]);
    return value;
  }

  static void store_fp16(char* ptr, Floats<kBytes> value) {
    std::uint16_t raw[kBytes / 4];
    for (int i = 0; i < kBytes / 4; ++i) raw[i] = float_to_fp16(value[i]);
    std::memcpy(ptr, raw, sizeof raw);
  }

  static void store_bytes(char* ptr, const Words<kBytes>* vectors) {
    std::uint8_t raw[kBytes];
    for (int i = 0; i < kBytes; ++i) raw[i] = static_cast<std::uint8_t>(vectors[i / 4][i % 4]);
    std::memcpy(ptr, raw, sizeof raw);
  }

  static void store_shorts(char* ptr, const Words<kBytes>* vectors) {
    std::uint16_t raw[kBytes / 2];
    for (int i = 0; i < kBytes / 2; ++i) raw[i] = static_cast<std::uint16_t>(vectors[i / 4][i % 4]);
    std::memcpy(ptr, raw, sizeof raw);
  }
};

}  // namespace

const SimdOps kGenericOps = simd_ops_of<Generic>("generic");

}  // namespace deep_moe::cpu
