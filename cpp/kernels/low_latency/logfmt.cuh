// Rows as 10-bit logarithms: what cpu/logfmt.hpp describes, with the same numbers bit for bit. Only the codes' places
// are others: in units, so that every lane puts its own codes together.
//
// Sixteen lanes have a block of 128 numbers, eight each. Their ten bytes are two words and half a word. Unit u of a
// block's 14 has the two words of lane u, and as its third: 0 to 7, the half words of lanes 2u and 2u + 1; 8 and 9, the
// smallest logarithm and the spacing; 10 to 13, the words of the lanes 14 and 15, which have no unit.
#pragma once

#include <cstdint>

#include "kernels/low_latency/units.cuh"
#include "kernels/ptx/math.cuh"
#include "layout/blocks.hpp"

namespace deep_moe::kernels {

inline constexpr int kLogfmtNumbers = 8;  // of a lane
inline constexpr int kLogfmtLanes = static_cast<int>(kLogfmtBlock) / kLogfmtNumbers;
inline constexpr int kLogfmtUnits = static_cast<int>(kLogfmtBlockBytes) / layout::kUnitPayload;
inline constexpr int kLogfmtTile = 32 * kLogfmtNumbers;  // numbers of a row that a warp has
static_assert(kLogfmtLanes == 16 && kLogfmtUnits * layout::kUnitPayload == kLogfmtBlockBytes);
// Tiles of rows that are not encoded have room for so many bytes.
static_assert(layout::kTileBytes * kLogfmtBlockBytes >= layout::kTilePayload * kLogfmtUnits * layout::kUnitBytes);

// Numbers of one lane, encoded.
struct LogfmtCodes {
  std::uint32_t word[2];
  std::uint32_t half;  // 16 bits
  float least, step;   // of the block
};

// The arithmetic. A multiplication and an addition are two roundings, as on the CPU.
struct LogfmtMath {
  static constexpr std::uint32_t kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;
  static constexpr std::uint32_t kInfinityCode = 510, kNanCode = 511;
  static constexpr float kLastIndex = 508.0f;
  static constexpr float kMaxRange = 32.0f;
  static constexpr float kMaxLog = 127.9999f;
  // Powers of two from here to there are neither subnormal nor close to the end.
  static constexpr float kLeastTame = -125.0f, kMostTame = 127.0f;

  // Rounded to nearest where nothing comes near the ends of the range: __fdiv_rn without its branch.
  __device__ __forceinline__ static float quotient(float dividend, float divisor) {
    float inverse = ptx::rcp_approx(divisor);
    inverse = __fmaf_rn(__fmaf_rn(-divisor, inverse, 1.0f), inverse, inverse);
    float result = __fmul_rn(dividend, inverse);
    result = __fmaf_rn(__fmaf_rn(-divisor, result, dividend), inverse, result);
    return __fmaf_rn(__fmaf_rn(-divisor, result, dividend), inverse, result);
  }

  __device__ __forceinline__ static float log2_of(float magnitude) {  // finite, above zero
    const bool subnormal = magnitude < 0x1p-126f;
    const std::uint32_t raw = __float_as_uint(subnormal ? __fmul_rn(magnitude, 0x1p24f) : magnitude);
    const int exponent = static_cast<int>(raw - 0x3f3504f3u) >> 23;
    const float mantissa = __uint_as_float(raw - (static_cast<std::uint32_t>(exponent) << 23));
    const float s = quotient(__fadd_rn(mantissa, -1.0f), __fadd_rn(mantissa, 1.0f)), s2 = __fmul_rn(s, s);
    float series = __fadd_rn(1.0f / 5, __fmul_rn(s2, 1.0f / 7));
    series = __fadd_rn(1.0f / 3, __fmul_rn(s2, series));
    series = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(s2, series)));
    return __fadd_rn(static_cast<float>(exponent - (subnormal ? 24 : 0)), __fmul_rn(2.88539008f, series));
  }

  // From -150 to kMaxLog; where it is tame, from kLeastTame on.
  template <bool kTame>
  __device__ __forceinline__ static float exp2_of(float power) {
    const float shifted = __fadd_rn(power, 0x1.8p23f);  // rounds to an integer, in its low bits
    const float x = __fmul_rn(__fadd_rn(power, -__fadd_rn(shifted, -0x1.8p23f)), 0.693147181f);
    float series = __fadd_rn(1.0f / 120, __fmul_rn(x, 1.0f / 720));
    series = __fadd_rn(1.0f / 24, __fmul_rn(x, series));
    series = __fadd_rn(1.0f / 6, __fmul_rn(x, series));
    series = __fadd_rn(1.0f / 2, __fmul_rn(x, series));
    series = __fadd_rn(1.0f, __fmul_rn(x, series));
    series = __fadd_rn(1.0f, __fmul_rn(x, series));
    if constexpr (kTame) return __uint_as_float(__float_as_uint(series) + (__float_as_uint(shifted) << 23));
    const int whole = static_cast<int>(__float_as_uint(shifted) - 0x4b400000u);
    const int half = whole >> 1;  // in two factors, so that subnormal results come out right
    return __fmul_rn(__fmul_rn(series, __uint_as_float(static_cast<std::uint32_t>(half + 127) << 23)),
                     __uint_as_float(static_cast<std::uint32_t>(whole - half + 127) << 23));
  }

  // The smallest of a block's logarithms and the spacing; `least` and `most` are a lane's.
  __device__ __forceinline__ static void measure(float least, float most, float* low, float* step) {
    // Every other lane goes on with the largest, as the smallest of the other sign.
    const bool odd = lane_id() % 2 != 0;
    float mine = odd ? -most : least;
    mine = fminf(mine, __shfl_xor_sync(0xffffffffu, odd ? least : -most, 1));
#pragma unroll
    for (int step_ = 2; step_ < kLogfmtLanes; step_ *= 2) mine = fminf(mine, __shfl_xor_sync(0xffffffffu, mine, step_));
    const float other = __shfl_xor_sync(0xffffffffu, mine, 1);
    *low = odd ? other : mine;
    const float high = -(odd ? mine : other);
    if (*low > high) {  // no number has a logarithm
      *low = *step = 0.0f;
      return;
    }
    *low = fmaxf(*low, __fadd_rn(high, -kMaxRange));
    *step = quotient(__fadd_rn(high, -*low), kLastIndex);
  }

  // The whole warp.
  __device__ __forceinline__ static LogfmtCodes encode(const float (&numbers)[kLogfmtNumbers]) {
    float logs[kLogfmtNumbers], least = 0x1p127f, most = -0x1p127f;
#pragma unroll
    for (int i = 0; i < kLogfmtNumbers; ++i) {
      const std::uint32_t magnitude = __float_as_uint(numbers[i]) & 0x7fffffffu;
      const bool has_log = magnitude - 1 < kInfinityBits - 1;
      logs[i] = fminf(log2_of(has_log ? __uint_as_float(magnitude) : 1.0f), kMaxLog);
      least = has_log ? fminf(least, logs[i]) : least;
      most = has_log ? fmaxf(most, logs[i]) : most;
    }
    LogfmtCodes out;
    measure(least, most, &out.least, &out.step);
    const bool flat = !(out.step > 0);
    const float per_step = flat ? 0.0f : quotient(1.0f, flat ? 1.0f : out.step);
    // Two neighbours meet at their mean, which lies a little above the middle of their logarithms.
    const float mean = __fmul_rn(__fadd_rn(1.0f, exp2_of<true>(out.step)), 0.5f);
    const float above = __fadd_rn(1.0f, -(flat ? 0.5f : __fmul_rn(log2_of(mean), per_step)));
    const std::uint32_t half_least = __float_as_uint(__fmul_rn(exp2_of<false>(out.least), 0.5f));
    std::uint32_t codes[kLogfmtNumbers];
#pragma unroll
    for (int i = 0; i < kLogfmtNumbers; ++i) {
      const std::uint32_t bits = __float_as_uint(numbers[i]), magnitude = bits & 0x7fffffffu;
      float index = __fadd_rn(__fmul_rn(__fadd_rn(logs[i], -out.least), per_step), above);
      index = fminf(fmaxf(index, 0.0f), kLastIndex);
      std::uint32_t code = __float_as_uint(__fadd_rz(index, 0x1p23f)) - 0x4b000000u + 1;  // its integer part, and one
      code = magnitude == 0 || magnitude < half_least ? 0 : code;
      code = (magnitude >= kInfinityBits ? kInfinityCode : code) | bits >> 31 << 9;
      codes[i] = magnitude > kInfinityBits ? kNanCode : code;
    }
    out.word[0] = codes[0] | codes[1] << 10 | codes[2] << 20 | codes[6] << 30;
    out.word[1] = codes[3] | codes[4] << 10 | codes[5] << 20 | codes[6] >> 2 << 30;
    out.half = codes[6] >> 4 | codes[7] << 6;
    return out;
  }

  // The whole warp.
  __device__ __forceinline__ static void decode(const LogfmtCodes& in, float* numbers) {
    const std::uint32_t codes[kLogfmtNumbers] = {in.word[0],
                                                 in.word[0] >> 10,
                                                 in.word[0] >> 20,
                                                 in.word[1],
                                                 in.word[1] >> 10,
                                                 in.word[1] >> 20,
                                                 in.word[0] >> 30 | in.word[1] >> 30 << 2 | in.half << 4,
                                                 in.half >> 6};
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kLogfmtNumbers; ++i) most = max(most, codes[i] & 0x1ffu);
    const float end = __fadd_rn(in.least, __fmul_rn(kLastIndex, in.step));
    const bool tame = most < kInfinityCode && in.least >= kLeastTame && end <= kMostTame;
    if (__all_sync(0xffffffffu, tame)) [[likely]]
      decode_codes<true>(in, codes, numbers);
    else
      decode_codes<false>(in, codes, numbers);
  }

 private:
  template <bool kTame>
  __device__ __forceinline__ static void decode_codes(const LogfmtCodes& in,
                                                      const std::uint32_t (&codes)[kLogfmtNumbers], float* numbers) {
#pragma unroll
    for (int i = 0; i < kLogfmtNumbers; ++i) {
      const std::uint32_t code = codes[i] & 0x1ffu;
      const float index = __fadd_rn(__uint_as_float(0x4b000000u | code), -(0x1p23f + 1));
      float power = __fadd_rn(in.least, __fmul_rn(index, in.step));
      if constexpr (!kTame) power = fmaxf(fminf(power, kMaxLog), -150.0f);
      std::uint32_t magnitude = __float_as_uint(exp2_of<kTame>(power));
      magnitude = code == 0 ? 0 : magnitude;
      if constexpr (!kTame) {
        magnitude = code == kInfinityCode ? kInfinityBits : magnitude;
        magnitude = code == kNanCode ? kNanBits : magnitude;
      }
      numbers[i] = __uint_as_float(magnitude | (codes[i] & 0x200u) << 22);
    }
  }
};

// The units of a block. The whole warp.
struct LogfmtUnit {
  __device__ __forceinline__ static uint4 pack(const LogfmtCodes& codes, std::uint32_t tag) {
    const int u = lane_id() % kLogfmtLanes;
    // Nobody asks the lanes 14 and 15 for half words of the other kind.
    const std::uint32_t even = u == 15 ? codes.word[0] : codes.half, odd = u == 14 ? codes.word[0] : codes.half;
    const std::uint32_t first = from_lane(even, u < 8 ? 2 * u : 15), second = from_lane(odd, u < 8 ? 2 * u + 1 : 14),
                        third = from_lane(codes.word[1], u == 11 ? 14 : 15);
    const std::uint32_t spare = u < 8     ? first | second << 16
                                : u == 8  ? __float_as_uint(codes.least)
                                : u == 9  ? __float_as_uint(codes.step)
                                : u == 10 ? second
                                : u == 12 ? first
                                          : third;
    return make_uint4(codes.word[0], codes.word[1], spare, tag);
  }
  __device__ __forceinline__ static LogfmtCodes unpack(const uint4& unit) {
    const int u = lane_id() % kLogfmtLanes;
    const bool has_unit = u < kLogfmtUnits;
    LogfmtCodes codes;
    codes.least = __uint_as_float(from_lane(unit.z, 8));
    codes.step = __uint_as_float(from_lane(unit.z, 9));
    codes.half = from_lane(unit.z, u / 2) >> (u % 2 * 16) & 0xffffu;
    const std::uint32_t first = from_lane(unit.z, u == 15 ? 12 : 10), second = from_lane(unit.z, u == 15 ? 13 : 11);
    codes.word[0] = has_unit ? unit.x : first;
    codes.word[1] = has_unit ? unit.y : second;
    return codes;
  }

 private:
  __device__ __forceinline__ static std::uint32_t from_lane(std::uint32_t value, int of_block) {
    return __shfl_sync(0xffffffffu, value, of_block, kLogfmtLanes);
  }
};

}  // namespace deep_moe::kernels
