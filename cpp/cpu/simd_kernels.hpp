// The kernels behind SimdOps, written once over the compiler's vector types. simd_generic.cc, simd_avx2.cc and
// simd_avx512.cc include this header with their instruction set switched on and give a Level:
//
//   struct Level {
//     static constexpr int kBytes;                            // of one vector
//     static Floats<kBytes> load_fp16(const char*);           // kBytes / 4 elements
//     static void store_fp16(char*, Floats<kBytes>);          // no NaNs but the canonical one
//     static void store_bytes(char*, const Words<kBytes>*);   // the low bytes of four vectors, in order
//     static void store_shorts(char*, const Words<kBytes>*);  // the low 16 bits of two vectors, in order
//   };
//
// Everything here has internal linkage: the linker must not pick the copy of one instruction set for another. For the
// same reason nothing here calls a template of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.hpp"

namespace deep_moe::cpu {
namespace {

template <int kBytes>
struct VectorTypes {
  typedef float F __attribute__((vector_size(kBytes)));
  typedef std::uint32_t U __attribute__((vector_size(kBytes)));
  typedef std::int32_t I __attribute__((vector_size(kBytes)));
  typedef std::int16_t S __attribute__((vector_size(kBytes)));
};
template <int kBytes>
using Floats = typename VectorTypes<kBytes>::F;
template <int kBytes>
using Words = typename VectorTypes<kBytes>::U;

inline constexpr std::size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <class Level>
struct Kernels {
  static constexpr int kBytes = Level::kBytes;
  static constexpr int kWidth = kBytes / 4;  // floats a vector
  static constexpr int kPair = 2 * kWidth;   // elements of one load
  static constexpr int kUnroll = 4;          // pairs summed at the same time: eight independent accumulators
  using F = Floats<kBytes>;
  using U = Words<kBytes>;
  using I = typename VectorTypes<kBytes>::I;
  using S = typename VectorTypes<kBytes>::S;

  // 2 * kWidth elements. bf16: the even ones and the odd ones, which takes no permutation; else the lower and the
  // upper half.
  struct Pair {
    F a, b;
  };

  static U bits(F value) { return (U)value; }
  static F floats(U value) { return (F)value; }
  static F broadcast(float value) { return value - F{}; }

  template <DType kType>
  static Pair load(const char* ptr) {
    Pair pair;
    if constexpr (kType == DType::kBFloat16) {
      U raw;
      std::memcpy(&raw, ptr, sizeof raw);
      pair.a = floats(raw << 16);
      pair.b = floats(raw & 0xffff0000u);
    } else if constexpr (kType == DType::kFloat16) {
      pair.a = Level::load_fp16(ptr);
      pair.b = Level::load_fp16(ptr + kBytes / 2);
    } else {
      std::memcpy(&pair.a, ptr, kBytes);
      std::memcpy(&pair.b, ptr + kBytes, kBytes);
    }
    return pair;
  }

  static F canonical(F value) { return value == value ? value : floats(U{} + 0x7fc00000u); }

  // The upper 16 bits hold the bf16 value; the lower ones are rubbish.
  static U round_bf16(F value) {
    const U raw = bits(value);
    const U rounded = raw + 0x7fffu + ((raw >> 16) & 1u);
    return value == value ? rounded : U{} + 0x7fc00000u;
  }

  template <DType kType>
  static void store(char* ptr, const Pair& pair) {
    if constexpr (kType == DType::kBFloat16) {
      const U raw = (round_bf16(pair.a) >> 16) | (round_bf16(pair.b) & 0xffff0000u);
      std::memcpy(ptr, &raw, sizeof raw);
    } else if constexpr (kType == DType::kFloat16) {
      Level::store_fp16(ptr, canonical(pair.a));
      Level::store_fp16(ptr + kBytes / 2, canonical(pair.b));
    } else {
      const F a = canonical(pair.a), b = canonical(pair.b);
      std::memcpy(ptr, &a, kBytes);
      std::memcpy(ptr + kBytes, &b, kBytes);
    }
  }

  // load() of the last, fewer than kPair elements; zeros behind them.
  template <DType kType>
  static Pair load_tail(const char* ptr, std::size_t num_bytes) {
    alignas(kBytes) char copy[2 * kBytes] = {};
    std::memcpy(copy, ptr, num_bytes);
    return load<kType>(copy);
  }
  template <DType kType>
  static void store_tail(char* ptr, const Pair& pair, std::size_t num_bytes) {
    alignas(kBytes) char copy[2 * kBytes];
    store<kType>(copy, pair);
    std::memcpy(ptr, copy, num_bytes);
  }

  // ---- sums ----
  struct Sum {
    const void* const* rows;
    const float* weights;
    int num_rows;
    const void* bias0;
    const void* bias1;
  };

  template <DType kType, int kPairs>
  static void add(Pair (&total)[kPairs], const void* row, std::size_t offset) {
    const char* ptr = static_cast<const char*>(row) + offset;
    for (int i = 0; i < kPairs; ++i) {
      const Pair pair = load<kType>(ptr + i * kPair * element_bytes(kType));
      total[i].a += pair.a;
      total[i].b += pair.b;
    }
  }

  // kPairs * kPair elements of the sum, from byte `offset` of every row.
  template <DType kType, bool kWeighted, int kPairs>
  static void sum_columns(const Sum& sum, char* out, std::size_t offset) {
    Pair total[kPairs] = {};
    if constexpr (!kWeighted) {
      if (sum.bias0 != nullptr) add<kType>(total, sum.bias0, offset);
      if (sum.bias1 != nullptr) add<kType>(total, sum.bias1, offset);
      for (int r = 0; r < sum.num_rows; ++r) add<kType>(total, sum.rows[r], offset);
    } else {
      for (int r = 0; r < sum.num_rows; ++r) {
        const char* ptr = static_cast<const char*>(sum.rows[r]) + offset;
        const F weight = broadcast(sum.weights[r]);
        for (int i = 0; i < kPairs; ++i) {
          const Pair pair = load<kType>(ptr + i * kPair * element_bytes(kType));
          total[i].a += weight * pair.a;
          total[i].b += weight * pair.b;
        }
      }
    }
    for (int i = 0; i < kPairs; ++i) store<kType>(out + offset + i * kPair * element_bytes(kType), total[i]);
  }

  template <DType kType, bool kWeighted>
  static void sum_tail(const Sum& sum, char* out, std::size_t offset, std::size_t num_bytes) {
    Pair total = {};
    const auto add_row = [&](const void* row, F weight) {
      Pair pair = load_tail<kType>(static_cast<const char*>(row) + offset, num_bytes);
      if constexpr (kWeighted) {
        pair.a = weight * pair.a;
        pair.b = weight * pair.b;
      }
      total.a += pair.a;
      total.b += pair.b;
    };
    if constexpr (!kWeighted) {
      if (sum.bias0 != nullptr) add_row(sum.bias0, F{});
      if (sum.bias1 != nullptr) add_row(sum.bias1, F{});
    }
    for (int r = 0; r < sum.num_rows; ++r) add_row(sum.rows[r], kWeighted ? broadcast(sum.weights[r]) : F{});
    store_tail<kType>(out + offset, total, num_bytes);
  }

  template <DType kType, bool kWeighted>
  static void sum_typed(const Sum& sum, void* out, std::int64_t hidden) {
    constexpr std::size_t pair_bytes = kPair * element_bytes(kType);
    const std::size_t row_bytes = static_cast<std::size_t>(hidden) * element_bytes(kType);
    char* const to = static_cast<char*>(out);
    std::size_t offset = 0;
    for (; offset + kUnroll * pair_bytes <= row_bytes; offset += kUnroll * pair_bytes)
      sum_columns<kType, kWeighted, kUnroll>(sum, to, offset);
    for (; offset + pair_bytes <= row_bytes; offset += pair_bytes) sum_columns<kType, kWeighted, 1>(sum, to, offset);
    if (offset < row_bytes) sum_tail<kType, kWeighted>(sum, to, offset, row_bytes - offset);
  }

  template <bool kWeighted>
  static void sum_any(DType dtype, const Sum& sum, void* out, std::int64_t hidden) {
    if (dtype == DType::kBFloat16)
      sum_typed<DType::kBFloat16, kWeighted>(sum, out, hidden);
    else if (dtype == DType::kFloat16)
      sum_typed<DType::kFloat16, kWeighted>(sum, out, hidden);
    else
      sum_typed<DType::kFloat32, kWeighted>(sum, out, hidden);
  }

  static void sum_rows(DType dtype, const void* const* rows, int num_rows, const void* bias0, const void* bias1,
                       void* out, std::int64_t hidden) {
    sum_any<false>(dtype, Sum{rows, nullptr, num_rows, bias0, bias1}, out, hidden);
  }
  static void weighted_sum_rows(DType dtype, const void* const* rows, const float* weights, int num_rows, void* out,
                                std::int64_t hidden) {
    sum_any<true>(dtype, Sum{rows, weights, num_rows, nullptr, nullptr}, out, hidden);
  }

  // ---- fp8 ----
  static constexpr std::uint32_t kInfinityBits = 0x7f800000u;

  struct BlockScale {
    float scale, inverse;
  };

  // `amax` by its bits: a NaN is above everything. See convert.hpp for the numbers.
  static BlockScale block_scale(std::uint32_t amax_bits, bool round_scale) {
    constexpr std::uint32_t kMinAmax = 0x38d1b717u;  // 1e-4
    if (amax_bits < kMinAmax) amax_bits = kMinAmax;
    if (amax_bits > kInfinityBits) amax_bits = 0x7fc00000u;
    float amax;
    std::memcpy(&amax, &amax_bits, sizeof amax);
    BlockScale result{amax / 448.0f, 448.0f / amax};
    if (round_scale && amax_bits < kInfinityBits) {
      std::uint32_t raw;
      std::memcpy(&raw, &result.scale, sizeof raw);
      raw = (raw + 0x007fffffu) & kInfinityBits;
      std::memcpy(&result.scale, &raw, sizeof raw);
      result.inverse = 1.0f / result.scale;
    }
    return result;
  }

  // One e4m3 byte in each lane. In a block without infinities and NaNs the scaled values do not pass 448 by more than
  // a rounding error; kAny is for the others.
  template <bool kAny>
  static U to_e4m3(F value) {
    const U raw = bits(value);
    const U magnitude = raw & 0x7fffffffu;
    const U normal = (magnitude - ((127u - 7u) << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const U subnormal = bits(floats(magnitude) + 0x1p14f) - 0x46800000u;
    U result = (I)magnitude < (I)(U{} + 0x3c800000u) ? subnormal : normal;
    U sign = (raw >> 24) & 0x80u;
    if constexpr (kAny) {
      result = (I)magnitude >= (I)(U{} + 0x43f00000u) ? U{} + 0x7fu : result;
      sign = (I)magnitude > (I)(U{} + 0x7f800000u) ? U{} : sign;
    }
    return result | sign;
  }

  template <int kCount, typename Int>
  static Int largest(Int (&lanes)[kCount]) {
    for (int half = kCount / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
  }

  // The bits of the largest magnitude, which as integers are in the same order.
  template <DType kType>
  static std::uint32_t block_amax(const char* block) {
    if constexpr (kType == DType::kBFloat16) {
      S most = {};
      for (int i = 0; i < kFp8Block / kPair; ++i) {
        S raw;
        std::memcpy(&raw, block + i * kBytes, sizeof raw);
        raw &= 0x7fff;
        most = raw > most ? raw : most;
      }
      std::int16_t lanes[kPair];
      std::memcpy(lanes, &most, sizeof lanes);
      return static_cast<std::uint32_t>(largest(lanes)) << 16;
    } else {
      I most = {};
      for (int i = 0; i < kFp8Block / kPair; ++i) {
        const Pair pair = load<kType>(block + i * kPair * element_bytes(kType));
        const I a = (I)(bits(pair.a) & 0x7fffffffu), b = (I)(bits(pair.b) & 0x7fffffffu);
        most = a > most ? a : most;
        most = b > most ? b : most;
      }
      std::int32_t lanes[kWidth];
      std::memcpy(lanes, &most, sizeof lanes);
      return static_cast<std::uint32_t>(largest(lanes));
    }
  }

  template <DType kType, bool kAny>
  static void cast_block(const char* block, float inverse, char* out) {
    const F factor = broadcast(inverse);
    for (int i = 0; i < kFp8Block / (2 * kPair); ++i) {
      U bytes[4];
      for (int j = 0; j < 2; ++j) {
        const Pair pair = load<kType>(block + (2 * i + j) * kPair * element_bytes(kType));
        bytes[2 * j] = to_e4m3<kAny>(pair.a * factor);
        bytes[2 * j + 1] = to_e4m3<kAny>(pair.b * factor);
      }
      if constexpr (kType == DType::kBFloat16) {
        const U pairs[2] = {bytes[0] | (bytes[1] << 8), bytes[2] | (bytes[3] << 8)};
        Level::store_shorts(out + 2 * i * kPair, pairs);
      } else {
        Level::store_bytes(out + 2 * i * kPair, bytes);
      }
    }
  }

  // Two passes, so that the divisions of one block overlap with the arithmetic of others.
  template <DType kType>
  static void cast_typed(const void* row, std::int64_t hidden, bool round_scale, std::uint8_t* out, float* scales) {
    const char* const from = static_cast<const char*>(row);
    char* const to = reinterpret_cast<char*>(out);
    constexpr std::int64_t block_bytes = kFp8Block * static_cast<std::int64_t>(element_bytes(kType));
    for (std::int64_t b = 0; b < hidden / kFp8Block; ++b) {
      const std::uint32_t amax_bits = block_amax<kType>(from + b * block_bytes);
      std::memcpy(&scales[b], &amax_bits, sizeof amax_bits);
    }
    for (std::int64_t b = 0; b < hidden / kFp8Block; ++b) {
      std::uint32_t amax_bits;
      std::memcpy(&amax_bits, &scales[b], sizeof amax_bits);
      const BlockScale both = block_scale(amax_bits, round_scale);
      scales[b] = both.scale;
      if (amax_bits < kInfinityBits)
        cast_block<kType, false>(from + b * block_bytes, both.inverse, to + b * kFp8Block);
      else
        cast_block<kType, true>(from + b * block_bytes, both.inverse, to + b * kFp8Block);
    }
  }

  static void cast_fp8(DType dtype, const void* row, std::int64_t hidden, bool round_scale, std::uint8_t* out,
                       float* scales) {
    if (dtype == DType::kBFloat16)
      cast_typed<DType::kBFloat16>(row, hidden, round_scale, out, scales);
    else if (dtype == DType::kFloat16)
      cast_typed<DType::kFloat16>(row, hidden, round_scale, out, scales);
    else
      cast_typed<DType::kFloat32>(row, hidden, round_scale, out, scales);
  }
};

}  // namespace
}  // namespace deep_moe::cpu
