// The combine of rows that travel as logarithms: bit for bit what the CPU makes of them. Also run on the CPU.
#include "gpu_low_latency_cases.cuh"
#include "kernels/intranode/launch.hpp"
#include "kernels/low_latency/logfmt.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

// A lane's codes, as they come out of a unit, and its numbers again.
struct LaneResult {
  kernels::LogfmtCodes codes;
  float numbers[kernels::kLogfmtNumbers];
};

// Each warp encodes 256 numbers.
__global__ void round_trip_kernel(const float* numbers, int num_warps, LaneResult* results) {
  const int warp = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  if (warp >= num_warps) return;
  const int lane = warp * 32 + static_cast<int>(threadIdx.x % 32);
  float mine[kernels::kLogfmtNumbers];
  for (int i = 0; i < kernels::kLogfmtNumbers; ++i) mine[i] = numbers[lane * kernels::kLogfmtNumbers + i];
  LaneResult result;
  result.codes = kernels::LogfmtUnit::unpack(kernels::LogfmtUnit::pack(kernels::LogfmtMath::encode(mine), 7));
  kernels::LogfmtMath::decode(result.codes, result.numbers);
  results[lane] = result;
}

// Code `i` of a block as the CPU writes it.
std::uint32_t cpu_code(const std::uint8_t* block, int i) {
  return block[8 + i] | (static_cast<std::uint32_t>(block[8 + 128 + i % 32]) >> (2 * (i / 32)) & 3u) << 8;
}

std::uint32_t lane_code(const kernels::LogfmtCodes& codes, int i) {
  const std::uint64_t low = codes.word[0] | static_cast<std::uint64_t>(codes.word[1]) << 32;
  switch (i) {
    case 6: return static_cast<std::uint32_t>((low >> 30 & 3) | (low >> 62) << 2 | (codes.half & 0x3fu) << 4);
    case 7: return codes.half >> 6;
    default: return static_cast<std::uint32_t>(low >> (i / 3 * 32 + i % 3 * 10)) & 0x3ffu;
  }
}

void check_codes(std::vector<float> numbers) {
  numbers.resize((numbers.size() + 255) / 256 * 256, 1.0f);
  const auto hidden = static_cast<std::int64_t>(numbers.size());
  const int num_warps = static_cast<int>(hidden / 256);
  std::vector<std::uint8_t> want(static_cast<std::size_t>(hidden / kLogfmtBlock * kLogfmtBlockBytes));
  std::vector<float> want_numbers(numbers.size());
  cpu::kGenericOps.logfmt_encode(DType::kFloat32, numbers.data(), hidden, want.data());
  cpu::kGenericOps.logfmt_decode(want.data(), hidden, want_numbers.data());

  const OnGpuOf on(0);
  std::vector<LaneResult> got(numbers.size() / kernels::kLogfmtNumbers);
  void *in = nullptr, *out = nullptr;
  cuda(cudaMalloc(&in, numbers.size() * sizeof(float)));
  cuda(cudaMalloc(&out, got.size() * sizeof(LaneResult)));
  cuda(cudaMemcpy(in, numbers.data(), numbers.size() * sizeof(float), cudaMemcpyDefault));
  kernels::launch(round_trip_kernel, (num_warps + 3) / 4, 4, 0, nullptr, false, "round_trip",
                  static_cast<const float*>(in), num_warps, static_cast<LaneResult*>(out));
  cuda(cudaMemcpy(got.data(), out, got.size() * sizeof(LaneResult), cudaMemcpyDefault));
  cuda(cudaFree(in));
  cuda(cudaFree(out));

  std::int64_t num_wrong = 0;
  for (std::int64_t at = 0; at < hidden; ++at) {
    const LaneResult& lane = got[at / kernels::kLogfmtNumbers];
    const std::uint8_t* block = want.data() + at / kLogfmtBlock * kLogfmtBlockBytes;
    const int i = static_cast<int>(at % kernels::kLogfmtNumbers);
    const bool same = std::memcmp(block, &lane.codes.least, 4) == 0 &&
                      std::memcmp(block + 4, &lane.codes.step, 4) == 0 &&
                      cpu_code(block, static_cast<int>(at % kLogfmtBlock)) == lane_code(lane.codes, i) &&
                      std::memcmp(&want_numbers[at], &lane.numbers[i], 4) == 0;
    if (!same && num_wrong++ == 0)
      FAIL_CHECK(numbers[at], " at ", at, " became ", lane.numbers[i], ", expected ", want_numbers[at]);
  }
  CHECK(num_wrong == 0);
}

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef __CUDACC__
constexpr bool kOnGpu = true;
#else
constexpr bool kOnGpu = false;  // fibers are slow
#endif

}  // namespace

TEST_CASE("low latency, logarithms: codes of all kinds of numbers are the CPU's" * doctest::skip(no_gpu())) {
  std::mt19937_64 random(3);
  std::vector<float> numbers;
  SUBCASE("every bf16, once in order and once mixed") {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) numbers.push_back(from_bits(bits << 16));
    check_codes(numbers);
    std::shuffle(numbers.begin(), numbers.end(), random);
    check_codes(numbers);
  }
  SUBCASE("blocks of normal numbers, rounded and not") {
    std::normal_distribution<float> normal;
    for (int i = 0; i < (kOnGpu ? 1 << 21 : 1 << 15); ++i) {
      const float value = normal(random) * std::ldexp(1.0f, i / 128 % 40 - 20);
      numbers.push_back(i / 256 % 2 == 0 ? value : rounded(DType::kBFloat16, value));
    }
    check_codes(numbers);
  }
  SUBCASE("narrow blocks: all mantissas, neighbours, constants") {
    const std::uint32_t step = kOnGpu ? 1 : 511;
    for (std::uint32_t mantissa = 0; mantissa < 1u << 23; mantissa += step)
      numbers.push_back(from_bits(0x3f000000u + mantissa));
    for (std::uint32_t i = 0; i < 256; ++i) numbers.push_back(from_bits(0x3f7fff80u + i));
    for (std::uint32_t i = 0; i < 512; ++i) numbers.push_back(from_bits(0x3f800000u + i / 256 * (i & 1)));
    check_codes(numbers);
  }
  SUBCASE("any bits") {
    for (int i = 0; i < (kOnGpu ? 1 << 21 : 1 << 15); ++i)
      numbers.push_back(from_bits(static_cast<std::uint32_t>(random() >> 20)));
    check_codes(numbers);
  }
}

TEST_CASE("low latency, logarithms: ranks, halves, weights, types" * doctest::skip(no_gpu())) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    CAPTURE(num_ranks);
    LowRanks ranks(num_ranks, 4 * kMiB, 16 * kMiB);
    LowShape shape;
    shape.num_ranks = num_ranks;
    shape.num_tokens.clear();
    for (int r = 0; r < num_ranks; ++r) shape.num_tokens.push_back(r % 3 == 1 ? 2 : 6 - r);
    shape.max_tokens = 7;
    shape.num_experts = 15;
    shape.topk = 5;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
      for (const bool halves : {false, true})
        for (const bool weights : {true, false}) {
          CAPTURE(static_cast<int>(dtype));
          CAPTURE(halves);
          CAPTURE(weights);
          shape.dtype = dtype;
          shape.hidden = weights ? 1152 : 640;
          shape.seed += 1;
          shape.wild = shape.seed % 2 == 0 || halves;
          LowMode mode;
          mode.logfmt = true;
          mode.halves = halves;
          mode.weights = weights;
          mode.num_blocks = 3;
          check_pair(ranks, shape, mode);
        }
  }
}

TEST_CASE("low latency, logarithms: widths, many experts a token, gaps, few blocks" * doctest::skip(no_gpu())) {
  LowRanks ranks(2, 16 * kMiB, 512 * kMiB);
  std::vector<LowCase> cases = {{128, 16, 32, 5, DType::kFloat16, 4, 2},
                                {256, 64, 64, 4, DType::kFloat32, 6, 0},
                                {384, 9, 2, 9, DType::kFloat32, 2, 4},
                                {2048, 32, 8, 4, DType::kBFloat16, 3, 32},
                                {896, 70, 40, 3, DType::kBFloat16, 1, 0}};
  if (kOnGpu) cases.push_back({7168, 256, 8, 40, DType::kBFloat16, 60, 0});
  check_cases(ranks, cases, [](LowShape& shape, LowMode& mode) {
    shape.wild = mode.weights;
    mode.logfmt = true;
  });
}
