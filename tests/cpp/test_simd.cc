// Row arithmetic: every SIMD level against scalar arithmetic whose rounding is done in double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <deep_moe/error.hpp>

#include "cpu/convert.hpp"
#include "cpu/simd.hpp"

using namespace deep_moe;
using namespace deep_moe::cpu;

namespace {

// A binary floating-point format without its sign.
struct Format {
  int mantissa_bits;
  int min_exponent;   // of the smallest normal number
  double largest;     // finite
  bool has_infinity;  // else what is too large becomes NaN
};
const Format kBf16{7, -126, std::ldexp(255.0, 120), true};
const Format kFp16{10, -14, 65504.0, true};
const Format kE4m3{3, -6, 448.0, false};

// Rounds to nearest even: the quantum of the format at this magnitude is a power of two, so both steps are exact.
double round_to(const Format& format, double value) {
  if (std::isnan(value) || value == 0) return value;
  const double overflow = std::copysign(format.has_infinity ? INFINITY : NAN, value);
  if (std::isinf(value)) return overflow;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(value, format.mantissa_bits - exponent)), exponent - format.mantissa_bits);
  return std::fabs(rounded) > format.largest ? overflow : rounded;
}

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

struct Random {
  std::uint64_t state;
  explicit Random(std::uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
  std::uint32_t bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::uint32_t>(state >> 32);
  }
  float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-23f - 1.0f; }
  // Ordinary numbers, and now and then one that is hard to get right.
  float value() {
    static const float kHard[] = {0.0f,     -0.0f,     1e-45f,  -1e-40f,        0x1p-126f,        0x1p-14f,
                                  0x1p-15f, 6e-8f,     3.3e38f, -3.3e38f,       65504.0f,         -65520.0f,
                                  INFINITY, -INFINITY, NAN,     1.0f + 0x1p-8f, 1.0f + 0x1.8p-7f, 1.0f + 0x1p-11f,
                                  448.0f,   464.0f,    465.0f,  480.0f};
    const std::uint32_t choice = bits();
    if (choice % 50 == 0) return kHard[(choice >> 8) % (sizeof kHard / sizeof kHard[0])];
    if (choice % 50 == 1) return float_of(bits());
    return uniform() * 4.0f;
  }
};

constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

std::size_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

float get(DType dtype, const char* row, std::int64_t i) {
  std::uint16_t half;
  float full;
  if (dtype == DType::kFloat32) {
    std::memcpy(&full, row + 4 * i, 4);
    return full;
  }
  std::memcpy(&half, row + 2 * i, 2);
  return dtype == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
}

void put(DType dtype, char* row, std::int64_t i, float value) {
  if (dtype == DType::kFloat32) {
    if (std::isnan(value)) value = float_of(0x7fc00000u);
    std::memcpy(row + 4 * i, &value, 4);
    return;
  }
  const std::uint16_t half = dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
  std::memcpy(row + 2 * i, &half, 2);
}

std::vector<const SimdOps*> levels() {
  std::vector<const SimdOps*> all{&kGenericOps};
#if defined(DEEP_MOE_X86_SIMD)
  if (has_avx2()) all.push_back(&kAvx2Ops);
  if (has_avx512()) all.push_back(&kAvx512Ops);
#endif
  return all;
}

std::vector<std::vector<char>> random_rows(Random& random, DType dtype, int num_rows, std::int64_t hidden) {
  std::vector<std::vector<char>> rows(static_cast<std::size_t>(num_rows));
  for (auto& row : rows) {
    row.resize(static_cast<std::size_t>(hidden) * bytes_of(dtype));
    for (std::int64_t i = 0; i < hidden; ++i) put(dtype, row.data(), i, random.value());
    if (random.bits() % 8 == 0)  // raw patterns: signalling NaNs and the like
      for (char& byte : row) byte = static_cast<char>(random.bits());
  }
  return rows;
}

// One fp32 operation a statement: the compiler may not fuse them.
float add(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
float multiply(float a, float b) {
  volatile float product = a * b;
  return product;
}

// `out` with room around it that must stay as it was.
struct Guarded {
  static constexpr std::size_t kGuard = 64;
  std::vector<char> bytes;
  explicit Guarded(std::size_t size) : bytes(size + 2 * kGuard, 0x5a) {}
  char* data() { return bytes.data() + kGuard; }
  bool intact() const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (bytes[i] != 0x5a || bytes[bytes.size() - 1 - i] != 0x5a) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("conversions round to nearest even, as arithmetic in double precision says") {
  const auto check = [](float value) {
    CHECK_MESSAGE(same(bf16_to_float(float_to_bf16(value)), round_to(kBf16, value)), "bf16 of ", value);
    CHECK_MESSAGE(same(fp16_to_float(float_to_fp16(value)), round_to(kFp16, value)), "fp16 of ", value);
    CHECK_MESSAGE(same(e4m3_to_float(float_to_e4m3(value)), round_to(kE4m3, value)), "e4m3 of ", value);
  };
  Random random(1);
  for (int i = 0; i < 20000; ++i) check(float_of(random.bits()));
  for (int i = 0; i < 20000; ++i) check(std::ldexp(random.uniform(), static_cast<int>(random.bits() % 40) - 28));
  // Every code of every format, the midpoint to its neighbour, and the numbers beside that.
  const auto around = [&](float low, float high) {
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    for (const float value : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)}) {
      check(value);
      check(-value);
    }
  };
  for (std::uint16_t code = 0; code < 0x7f; ++code)
    around(e4m3_to_float(static_cast<std::uint8_t>(code)), code == 0x7e ? 480.0f : e4m3_to_float(code + 1));
  for (std::uint16_t code = 0; code < 0x7c00; code += 7) around(fp16_to_float(code), fp16_to_float(code + 1));
  for (std::uint16_t code = 0; code < 0x7f80; code += 13) around(bf16_to_float(code), bf16_to_float(code + 1));
  check(65519.99f);
  check(65520.0f);
  check(std::numeric_limits<float>::max());
}

TEST_CASE("conversions give back every code") {
  int differing = 0;
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const auto half = static_cast<std::uint16_t>(code);
    const std::uint16_t bf16 = (code & 0x7fff) > 0x7f80 ? 0x7fc0 : half,
                        fp16 = (code & 0x7fff) > 0x7c00 ? 0x7e00 : half;
    differing += float_to_bf16(bf16_to_float(half)) != bf16;
    differing += float_to_fp16(fp16_to_float(half)) != fp16;
    const auto byte = static_cast<std::uint8_t>(code);
    differing += float_to_e4m3(e4m3_to_float(byte)) != ((byte & 0x7f) == 0x7f ? 0x7f : byte);
  }
  CHECK(differing == 0);
}

TEST_CASE("sums of rows have the same bits at every level") {
  Random random(2);
  for (const DType dtype : kTypes) {
    for (const std::int64_t hidden : {8, 16, 24, 56, 64, 120, 128, 136, 248, 504, 520, 2880, 4104}) {
      for (const int num_rows : {0, 1, 2, 3, 8, 17}) {
        const int num_biases = static_cast<int>(random.bits() % 3);
        const auto rows = random_rows(random, dtype, num_rows + 2, hidden);
        std::vector<const void*> pointers;
        for (int r = 0; r < num_rows; ++r) pointers.push_back(rows[static_cast<std::size_t>(r)].data());
        const char* const bias0 = num_biases > 0 ? rows[static_cast<std::size_t>(num_rows)].data() : nullptr;
        const char* const bias1 = num_biases > 1 ? rows[static_cast<std::size_t>(num_rows) + 1].data() : nullptr;
        const std::size_t num_bytes = static_cast<std::size_t>(hidden) * bytes_of(dtype);
        std::vector<char> expected(num_bytes);
        for (std::int64_t i = 0; i < hidden; ++i) {
          float total = 0;
          if (bias0 != nullptr) total = add(total, get(dtype, bias0, i));
          if (bias1 != nullptr) total = add(total, get(dtype, bias1, i));
          for (const void* row : pointers) total = add(total, get(dtype, static_cast<const char*>(row), i));
          put(dtype, expected.data(), i, total);
        }
        for (const SimdOps* ops : levels()) {
          Guarded out(num_bytes);
          ops->sum_rows(dtype, pointers.data(), num_rows, bias0, bias1, out.data(), hidden);
          CHECK_MESSAGE(std::memcmp(out.data(), expected.data(), num_bytes) == 0, ops->name, " ", dtype_name(dtype),
                        " hidden ", hidden, " rows ", num_rows, " biases ", num_biases);
          CHECK(out.intact());
        }
      }
    }
  }
}

TEST_CASE("a sum may be written over one of its rows, and rows need no alignment") {
  Random random(3);
  for (const SimdOps* ops : levels()) {
    auto rows = random_rows(random, DType::kBFloat16, 2, 616);
    std::vector<char> shifted(rows[1].size() + 2);
    std::memcpy(shifted.data() + 2, rows[1].data(), rows[1].size());
    const void* pointers[] = {rows[0].data(), rows[1].data()};
    const void* moved[] = {rows[0].data(), shifted.data() + 2};
    std::vector<char> expected(rows[0].size());
    ops->sum_rows(DType::kBFloat16, pointers, 2, nullptr, nullptr, expected.data(), 616);
    ops->sum_rows(DType::kBFloat16, moved, 2, nullptr, nullptr, rows[0].data(), 616);
    CHECK(rows[0] == expected);
  }
}

TEST_CASE("weighted sums multiply, then add, at every level") {
  Random random(4);
  for (const DType dtype : kTypes) {
    for (const std::int64_t hidden : {8, 24, 128, 264, 1032}) {
      for (const int num_rows : {0, 1, 2, 8, 13}) {
        const auto rows = random_rows(random, dtype, num_rows, hidden);
        std::vector<const void*> pointers;
        std::vector<float> weights;
        for (const auto& row : rows) {
          pointers.push_back(row.data());
          weights.push_back(random.value());
        }
        const std::size_t num_bytes = static_cast<std::size_t>(hidden) * bytes_of(dtype);
        std::vector<char> expected(num_bytes);
        for (std::int64_t i = 0; i < hidden; ++i) {
          float total = 0;
          for (std::size_t r = 0; r < rows.size(); ++r)
            total = add(total, multiply(weights[r], get(dtype, rows[r].data(), i)));
          put(dtype, expected.data(), i, total);
        }
        for (const SimdOps* ops : levels()) {
          Guarded out(num_bytes);
          ops->weighted_sum_rows(dtype, pointers.data(), weights.data(), num_rows, out.data(), hidden);
          CHECK_MESSAGE(std::memcmp(out.data(), expected.data(), num_bytes) == 0, ops->name, " ", dtype_name(dtype),
                        " hidden ", hidden, " rows ", num_rows);
          CHECK(out.intact());
        }
      }
    }
  }
  // (1 + 2^-12)^2 - 1 differs in its last bits if the product is not rounded first.
  const std::vector<float> ones(8, -1.0f), values(8, 1.0f + 0x1p-12f);
  const void* pointers[] = {ones.data(), values.data()};
  const float weights[] = {1.0f, 1.0f + 0x1p-12f};
  for (const SimdOps* ops : levels()) {
    std::vector<float> out(8);
    ops->weighted_sum_rows(DType::kFloat32, pointers, weights, 2, out.data(), 8);
    CHECK_MESSAGE(out[0] == 0x1p-11f, ops->name);
  }
}

TEST_CASE("the fp8 cast has the same bits at every level") {
  Random random(5);
  for (const DType dtype : kTypes) {
    for (const bool round_scale : {false, true}) {
      for (int round = 0; round < 60; ++round) {
        const std::int64_t hidden = 128 * (1 + static_cast<int>(random.bits() % 5));
        std::vector<char> row(static_cast<std::size_t>(hidden) * bytes_of(dtype));
        const int exponent = static_cast<int>(random.bits() % 60) - 40;
        const bool hard = round % 4 == 3;
        for (std::int64_t i = 0; i < hidden; ++i)
          put(dtype, row.data(), i, hard ? random.value() : std::ldexp(random.uniform(), exponent));
        if (round == 0) std::fill(row.begin(), row.end(), char{0});
        const std::size_t num_blocks = static_cast<std::size_t>(hidden / kFp8Block);
        std::vector<std::uint8_t> expected(static_cast<std::size_t>(hidden));
        std::vector<float> expected_scales(num_blocks);
        for (std::size_t b = 0; b < num_blocks; ++b) {
          const std::int64_t begin = static_cast<std::int64_t>(b) * kFp8Block;
          float amax = 1e-4f;
          for (std::int64_t i = begin; i < begin + kFp8Block; ++i) {
            const float magnitude = std::fabs(get(dtype, row.data(), i));
            if (magnitude > amax || std::isnan(magnitude)) amax = magnitude;
            if (std::isnan(amax)) break;
          }
          float scale = amax / 448.0f, inverse = 448.0f / amax;
          if (round_scale && std::isfinite(amax)) {
            int power = 0;
            const float mantissa = std::frexp(scale, &power);  // [0.5, 1)
            scale = std::ldexp(1.0f, mantissa == 0.5f ? power - 1 : power);
            inverse = 1.0f / scale;
          }
          expected_scales[b] = scale;
          for (std::int64_t i = begin; i < begin + kFp8Block; ++i)
            expected[static_cast<std::size_t>(i)] = float_to_e4m3(multiply(get(dtype, row.data(), i), inverse));
        }
        for (const SimdOps* ops : levels()) {
          Guarded out(static_cast<std::size_t>(hidden));
          std::vector<float> scales(num_blocks);
          ops->cast_fp8(dtype, row.data(), hidden, round_scale, reinterpret_cast<std::uint8_t*>(out.data()),
                        scales.data());
          CHECK_MESSAGE(std::memcmp(out.data(), expected.data(), expected.size()) == 0, ops->name, " ",
                        dtype_name(dtype), " round ", round);
          for (std::size_t b = 0; b < num_blocks; ++b)
            CHECK_MESSAGE(same(scales[b], expected_scales[b]), ops->name, " ", scales[b], " ", expected_scales[b]);
          CHECK(out.intact());
        }
      }
    }
  }
}

TEST_CASE("the level is the highest there is, or a lower one that was asked for") {
  CHECK(choose_simd_ops(nullptr).name == levels().back()->name);
  CHECK(choose_simd_ops("").name == levels().back()->name);
  for (const SimdOps* ops : levels()) CHECK(choose_simd_ops(ops->name).name == std::string(ops->name));
  CHECK_THROWS_WITH_AS(choose_simd_ops("sse"), "DEEP_MOE_SIMD is 'sse'; allowed: generic, avx2, avx512", ArgumentError);
}
