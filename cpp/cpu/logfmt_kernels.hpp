// The arithmetic of logfmt.hpp, over the compiler's vector types like simd_kernels.hpp: included by the same files,
// with internal linkage for the same reason.
#pragma once

#include "cpu/logfmt.hpp"
#include "cpu/simd_kernels.hpp"

namespace deep_moe::cpu {
namespace {

template <class Level>
struct LogfmtKernels {
  static constexpr int kBytes = Level::kBytes;
  static constexpr int kWidth = kBytes / 4;
  static constexpr int kBlock = static_cast<int>(kLogfmtBlock);
  static constexpr int kQuarter = kBlock / 4;
  static constexpr std::uint32_t kInfinityBits = 0x7f800000u;
  static constexpr float kLastIndex = 508.0f;
  static constexpr std::uint32_t kInfinityCode = 510, kNanCode = 511;
  static constexpr float kMaxRange = 32.0f;
  static constexpr float kMaxLog = 127.9999f;  // its power of two is finite, with the error of exp2_of
  using F = Floats<kBytes>;
  using U = Words<kBytes>;
  using I = typename VectorTypes<kBytes>::I;

  struct Header {
    float least, step;
  };

  template <typename V, typename T>
  static V load(const T* ptr) {
    V value;
    std::memcpy(&value, ptr, sizeof value);
    return value;
  }
  template <typename V, typename T>
  static void store(T* ptr, V value) {
    std::memcpy(ptr, &value, sizeof value);
  }
  static F all(float value) { return value - F{}; }
  static float first(F value) { return value[0]; }

  // Own log2 and exp2, good to about 1e-7: the same on every machine.
  static F log2_of(F magnitude) {  // finite, above zero
    const I subnormal = magnitude < all(0x1p-126f);
    const U raw = (U)(subnormal ? magnitude * 0x1p24f : magnitude);
    const I exponent = (I)(raw - 0x3f3504f3u) >> 23;  // leaves a mantissa in [sqrt(1/2), sqrt(2))
    const F mantissa = (F)(raw - ((U)exponent << 23));
    const F s = (mantissa - 1.0f) / (mantissa + 1.0f), s2 = s * s;
    const F series = s * (1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7))));
    const I whole = exponent - (subnormal & 24);
    return __builtin_convertvector(whole, F) + 2.88539008f * series;
  }

  // `power` from -150 to kMaxLog.
  static F exp2_of(F power) {
    const F shifted = power + 0x1.8p23f;  // rounds to an integer
    const I whole = (I)((U)shifted - (U)all(0x1.8p23f));
    const F x = (power - (shifted - 0x1.8p23f)) * 0.693147181f;
    const F series =
        1.0f + x * (1.0f + x * (1.0f / 2 + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120 + x * (1.0f / 720))))));
    const I half = whole >> 1;  // in two factors, so that subnormal results come out right
    return series * (F)((half + 127) << 23) * (F)((whole - half + 127) << 23);
  }

  static void load_block(DType dtype, const char* block, float* out) {
    if (dtype == DType::kFloat32) {
      std::memcpy(out, block, kBlock * sizeof(float));
    } else if (dtype == DType::kBFloat16) {
      std::uint16_t raw[kBlock];
      std::uint32_t wide[kBlock];
      std::memcpy(raw, block, sizeof raw);
      for (int i = 0; i < kBlock; ++i) wide[i] = static_cast<std::uint32_t>(raw[i]) << 16;
      std::memcpy(out, wide, sizeof wide);
    } else {
      for (int i = 0; i < kBlock; i += kWidth) store(out + i, Level::load_fp16(block + 2 * i));
    }
  }

  // The logarithms of the block's magnitudes, 0 where there is none (0, infinity, NaN), and the header to cover them.
  static Header measure(const std::uint32_t* magnitudes, float* logs) {
    F least = all(0x1p127f), most = all(-0x1p127f);
    for (int i = 0; i < kBlock; i += kWidth) {
      const U magnitude = load<U>(magnitudes + i);
      const I has_log = (magnitude != 0) & ((I)magnitude < (I)(U{} + kInfinityBits));
      F value = log2_of((F)(has_log ? magnitude : U{} + 0x3f800000u));
      value = value < all(kMaxLog) ? value : all(kMaxLog);
      store(logs + i, value);
      least = has_log & (I)(value < least) ? value : least;
      most = has_log & (I)(value > most) ? value : most;
    }
    float low = least[0], high = most[0];
    for (int i = 1; i < kWidth; ++i) {
      low = least[i] < low ? least[i] : low;
      high = most[i] > high ? most[i] : high;
    }
    if (low > high) return {0.0f, 0.0f};
    low = low < high - kMaxRange ? high - kMaxRange : low;
    return {low, (high - low) / kLastIndex};
  }

  static void encode_block(const float* values, std::uint8_t* out) {
    std::uint32_t raw[kBlock], magnitudes[kBlock], codes[kBlock];
    float logs[kBlock];
    std::memcpy(raw, values, sizeof raw);
    for (int i = 0; i < kBlock; ++i) magnitudes[i] = raw[i] & 0x7fffffffu;
    const Header header = measure(magnitudes, logs);
    const bool flat = !(header.step > 0);
    const float per_step = flat ? 0.0f : 1.0f / header.step;
    // Two neighbours meet at their mean, which lies a little above the middle of their logarithms.
    const float meeting = flat ? 0.5f : first(log2_of((1.0f + exp2_of(all(header.step))) * 0.5f)) * per_step;
    const U half_least = (U)(exp2_of(all(header.least)) * 0.5f);
    for (int i = 0; i < kBlock; i += kWidth) {
      const U magnitude = load<U>(magnitudes + i);
      F index = (load<F>(logs + i) - header.least) * per_step + (1.0f - meeting);
      index = index > F{} ? index : F{};
      index = index < all(kLastIndex) ? index : all(kLastIndex);
      U code = (U) __builtin_convertvector(index, I) + 1u;
      code = (magnitude == 0) | ((I)magnitude < (I)half_least) ? U{} : code;
      code = (I)magnitude >= (I)(U{} + kInfinityBits) ? U{} + kInfinityCode : code;
      code |= load<U>(raw + i) >> 31 << 9;
      code = (I)magnitude > (I)(U{} + kInfinityBits) ? U{} + kNanCode : code;
      store(codes + i, code);
    }
    // The low bytes; then the high pairs of bits, of elements i, i + 32, i + 64 and i + 96 in one byte.
    std::memcpy(out, &header, sizeof header);
    std::uint8_t* const low = out + sizeof header;
    std::uint8_t* const high = low + kBlock;
    for (int i = 0; i < kBlock; ++i) low[i] = static_cast<std::uint8_t>(codes[i]);
    for (int i = 0; i < kQuarter; ++i)
      high[i] = static_cast<std::uint8_t>((codes[i] >> 8) | (codes[i + kQuarter] >> 8 << 2) |
                                          (codes[i + 2 * kQuarter] >> 8 << 4) | (codes[i + 3 * kQuarter] >> 8 << 6));
  }

  static void decode_block(const std::uint8_t* in, float* out) {
    Header header;
    std::memcpy(&header, in, sizeof header);
    const std::uint8_t* const low = in + sizeof header;
    const std::uint8_t* const high = low + kBlock;
    std::uint32_t codes[kBlock];
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < kQuarter; ++i)
        codes[quarter * kQuarter + i] =
            low[quarter * kQuarter + i] | ((static_cast<std::uint32_t>(high[i]) >> (2 * quarter) & 3u) << 8);
    for (int i = 0; i < kBlock; i += kWidth) {
      const U code = load<U>(codes + i) & 0x1ffu;
      F power = header.least + __builtin_convertvector((I)code - 1, F) * header.step;
      power = power < all(kMaxLog) ? power : all(kMaxLog);
      power = power > all(-150.0f) ? power : all(-150.0f);
      U magnitude = (U)exp2_of(power);
      magnitude = code == 0 ? U{} : magnitude;
      magnitude = code == kInfinityCode ? U{} + kInfinityBits : magnitude;
      magnitude = code == kNanCode ? U{} + 0x7fc00000u : magnitude;
      store(out + i, magnitude | (load<U>(codes + i) >> 9 << 31));
    }
  }

  static void encode(DType dtype, const void* row, std::int64_t hidden, std::uint8_t* out) {
    float values[kBlock];
    const char* block = static_cast<const char*>(row);
    for (std::int64_t i = 0; i < hidden; i += kBlock, out += kLogfmtBlockBytes) {
      load_block(dtype, block, values);
      encode_block(values, out);
      block += kBlock * element_bytes(dtype);
    }
  }

  static void decode(const std::uint8_t* in, std::int64_t hidden, float* out) {
    for (std::int64_t i = 0; i < hidden; i += kBlock, in += kLogfmtBlockBytes) decode_block(in, out + i);
  }
};

template <class Level>
constexpr SimdOps simd_ops_of(const char* name) {
  return SimdOps{name,
                 Kernels<Level>::sum_rows,
                 Kernels<Level>::weighted_sum_rows,
                 Kernels<Level>::cast_fp8,
                 LogfmtKernels<Level>::encode,
                 LogfmtKernels<Level>::decode};
}

}  // namespace
}  // namespace deep_moe::cpu
