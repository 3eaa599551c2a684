// The 10-bit logarithmic rows of the low-latency combine.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/convert.hpp"
#include "cpu/logfmt.hpp"
#include "cpu/simd.hpp"

using namespace deep_moe;
using namespace deep_moe::cpu;

namespace {

std::vector<float> round_trip(const std::vector<float>& values) {
  const auto hidden = static_cast<std::int64_t>(values.size());
  std::vector<std::uint8_t> encoded(static_cast<std::size_t>(logfmt_bytes(hidden)) + 1, 0xa5);
  std::vector<float> decoded(values.size());
  logfmt_encode(DType::kFloat32, values.data(), hidden, encoded.data());
  CHECK(encoded.back() == 0xa5);
  logfmt_decode(encoded.data(), hidden, decoded.data());
  return decoded;
}

// Largest relative error that the block from `begin` on may have.
double bound(const std::vector<float>& values, std::size_t begin) {
  double least = INFINITY, most = 0;
  for (std::size_t i = begin; i < begin + 128; ++i) {
    if (values[i] == 0) continue;
    least = std::min(least, static_cast<double>(std::fabs(values[i])));
    most = std::max(most, static_cast<double>(std::fabs(values[i])));
  }
  const double range = std::min(std::log2(most / least), 32.0);
  return (std::exp2(range / 508) - 1) / 2 + 2e-5;
}

void check_within_bound(const std::vector<float>& values) {
  const std::vector<float> decoded = round_trip(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double limit = bound(values, i / 128 * 128) * std::fabs(values[i]);
    if (std::fabs(static_cast<double>(decoded[i]) - values[i]) > limit) FAIL_CHECK(values[i], " became ", decoded[i]);
  }
}

}  // namespace

TEST_CASE("elements come back within half a step of their block") {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(128 * 6);
  for (const float scale : {1.0f, 1e-3f, 1e20f, 1e-30f}) {
    for (float& value : values) value = normal(engine) * scale;
    check_within_bound(values);
  }
  // All of one block's range in use, and blocks that do not see each other.
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(i % 2 == 0 ? 1.25f : -1.25f, static_cast<int>(i % 32) - 16 + 10 * static_cast<int>(i / 128));
  check_within_bound(values);
}

TEST_CASE("constants, powers of two and zeros are exact") {
  std::vector<float> values(256, 0.0f);
  CHECK(round_trip(values) == values);
  for (std::size_t i = 0; i < 128; ++i) values[i] = -0.125f;
  for (std::size_t i = 128; i < 256; ++i) values[i] = i % 3 == 0 ? 0.0f : 4.0f;
  CHECK(round_trip(values) == values);
}

TEST_CASE("infinities, NaNs and the ends of the range stay what they are") {
  std::vector<float> values(128, 1.0f);
  values[0] = INFINITY;
  values[31] = -INFINITY;
  values[32] = NAN;
  values[64] = 0.0f;
  values[65] = -2.0f;
  const std::vector<float> decoded = round_trip(values);
  CHECK(decoded[0] == INFINITY);
  CHECK(decoded[31] == -INFINITY);
  CHECK(std::isnan(decoded[32]));
  CHECK(decoded[64] == 0.0f);
  CHECK(decoded[65] == -2.0f);
  CHECK(decoded[127] == 1.0f);

  for (const float extreme : {3.4028235e38f, 1.2e-38f, 1e-42f}) {
    const std::vector<float> constant(128, extreme);
    CHECK(std::fabs(round_trip(constant)[5] / extreme - 1.0f) < 2e-3f);
  }
}

TEST_CASE("what is far below the largest becomes zero or the least magnitude, whichever is nearer") {
  std::vector<float> values(128, 1.0f);
  values[1] = 0x1p-40f;
  values[2] = -0x1.4p-33f;
  values[3] = 0x1.1p-34f;
  values[4] = -0.0f;
  const std::vector<float> decoded = round_trip(values);
  CHECK(decoded[0] == 1.0f);
  CHECK(decoded[1] == 0.0f);
  CHECK(decoded[2] == -0x1p-32f);
  CHECK(decoded[3] == 0.0f);
  CHECK(std::signbit(decoded[4]));
}

TEST_CASE("errors do not add up to a bias") {
  std::mt19937 engine(11);
  std::uniform_real_distribution<float> uniform(0.001f, 1.0f);
  std::vector<float> values(128 * 200);
  for (float& value : values) value = uniform(engine);
  const std::vector<float> decoded = round_trip(values);
  double sum = 0, error = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i];
    error += static_cast<double>(decoded[i]) - values[i];
  }
  CHECK(std::fabs(error / sum) < 2e-4);
}

TEST_CASE("bf16 and fp16 rows encode like their fp32 values, and rounding gives the type back") {
  std::mt19937 engine(3);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::uint16_t> row(384);
    std::vector<float> values(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) {
      const float value = normal(engine);
      row[i] = dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
      values[i] = dtype == DType::kBFloat16 ? bf16_to_float(row[i]) : fp16_to_float(row[i]);
    }
    const auto hidden = static_cast<std::int64_t>(row.size());
    std::vector<std::uint8_t> narrow(static_cast<std::size_t>(logfmt_bytes(hidden))), wide(narrow.size());
    logfmt_encode(dtype, row.data(), hidden, narrow.data());
    logfmt_encode(DType::kFloat32, values.data(), hidden, wide.data());
    CHECK(narrow == wide);
    std::vector<std::uint16_t> rounded(row.size());
    round_row(dtype, values.data(), hidden, rounded.data());
    CHECK(rounded == row);
  }
}

TEST_CASE("every SIMD level gives the same codes and the same values") {
  std::vector<const SimdOps*> levels{&kGenericOps};
#if defined(DEEP_MOE_X86_SIMD)
  if (has_avx2()) levels.push_back(&kAvx2Ops);
  if (has_avx512()) levels.push_back(&kAvx512Ops);
#endif
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    std::vector<char> row(128 * 40 * dtype_bytes(dtype));
    for (std::size_t i = 0; i < row.size(); i += 2) {
      // Patterns at random, infinities and NaNs among them, and blocks of ordinary numbers.
      std::uint16_t raw = static_cast<std::uint16_t>(engine());
      if (i / 512 % 2 == 0)
        raw = dtype == DType::kFloat16 ? float_to_fp16(normal(engine)) : float_to_bf16(normal(engine));
      std::memcpy(row.data() + i, &raw, sizeof raw);
    }
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(logfmt_bytes(128 * 40))), expected_codes;
    std::vector<std::uint32_t> values(128 * 40), expected_values;
    for (const SimdOps* ops : levels) {
      ops->logfmt_encode(dtype, row.data(), 128 * 40, codes.data());
      ops->logfmt_decode(codes.data(), 128 * 40, reinterpret_cast<float*>(values.data()));
      if (ops == levels.front()) {
        expected_codes = codes;
        expected_values = values;
      }
      CHECK_MESSAGE(codes == expected_codes, ops->name);
      CHECK_MESSAGE(values == expected_values, ops->name);
    }
  }
}
