// Rows grouped by local expert, and sums of groups, against plain loops on the host; every byte, also those that must
// not change.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include <deep_moe/error.hpp>

#include "gpu_sums.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

#define GPU_TEST_CASE(name) TEST_CASE(name* doctest::skip(no_gpu()))

namespace {

struct Shape {
  std::int64_t num_received = 0;
  int num_experts = 1, topk = 1;
  std::int64_t alignment = 1;
  int id_bytes = 8;
  int hidden = 64;  // of bf16
  int num_scales = 0, scale_bytes = 4;
  bool columns = false;
  int none_in = 3;         // of so many entries one is -1; 0: none of them
  std::int64_t spare = 0;  // rows behind the groups, where the number of rows is a bound
};

// Memory of the current GPU, from and to vectors.
template <typename T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& values) : size_(values.size()) {
    cuda(cudaMalloc(&memory_, sizeof(T) * size_ + kGuard));
    cuda(cudaMemset(memory_, kPoison, sizeof(T) * size_ + kGuard));
    if (size_ > 0) cuda(cudaMemcpy(memory_, values.data(), sizeof(T) * size_, cudaMemcpyDefault));
  }
  explicit OnGpu(std::int64_t size) : size_(static_cast<std::size_t>(size)) {
    cuda(cudaMalloc(&memory_, sizeof(T) * size_ + kGuard));
    cuda(cudaMemset(memory_, kPoison, sizeof(T) * size_ + kGuard));
  }
  ~OnGpu() { cudaFree(memory_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  T* get() const { return static_cast<T*>(memory_); }
  // What it holds; what lies behind has not changed.
  std::vector<T> read() const {
    cuda(cudaDeviceSynchronize());
    std::vector<char> bytes(sizeof(T) * size_ + kGuard);
    cuda(cudaMemcpy(bytes.data(), memory_, bytes.size(), cudaMemcpyDefault));
    for (std::size_t i = sizeof(T) * size_; i < bytes.size(); ++i) REQUIRE(bytes[i] == static_cast<char>(kPoison));
    std::vector<T> values(size_);
    if (size_ > 0) std::memcpy(values.data(), bytes.data(), sizeof(T) * size_);
    return values;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_;
  void* memory_ = nullptr;
};

struct Model {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> offsets, counts, rows, experts;
  std::vector<float> weights, row_weights;

  Model(const Shape& shape, std::mt19937_64& random) {
    const std::int64_t entries = shape.num_received * shape.topk;
    for (std::int64_t i = 0; i < entries; ++i) {
      const bool none = shape.none_in > 0 && random() % static_cast<unsigned>(shape.none_in) == 0;
      ids.push_back(none ? -1 : static_cast<std::int64_t>(random() % static_cast<unsigned>(shape.num_experts)));
      weights.push_back(static_cast<float>(random() % 1000) / 997.0f);
    }
    counts.assign(static_cast<std::size_t>(shape.num_experts), 0);
    for (const std::int64_t id : ids)
      if (id >= 0) ++counts[static_cast<std::size_t>(id)];
    std::int64_t next = 0;
    std::vector<std::int64_t> at;
    for (const std::int32_t count : counts) {
      at.push_back(next);
      offsets.push_back(static_cast<std::int32_t>(next));
      next += (count + shape.alignment - 1) / shape.alignment * shape.alignment;
    }
    offsets.push_back(static_cast<std::int32_t>(next));
    experts.assign(static_cast<std::size_t>(next + shape.spare), -1);
    row_weights.assign(experts.size(), 0.0f);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) {
        rows.push_back(-1);
        continue;
      }
      const std::size_t row = static_cast<std::size_t>(at[static_cast<std::size_t>(ids[i])]++);
      rows.push_back(static_cast<std::int32_t>(row));
      experts[row] = static_cast<std::int32_t>(ids[i]);
      row_weights[row] = weights[i];
    }
  }
  std::int64_t num_rows() const { return static_cast<std::int64_t>(experts.size()); }
  // Whether a received row has rows in the groups.
  bool has_rows(const Shape& shape, std::int64_t received) const {
    const auto begin = rows.begin() + received * shape.topk;
    return std::any_of(begin, begin + shape.topk, [](std::int32_t row) { return row >= 0; });
  }
};

// The groups of a model as the kernels have found them.
struct Placed {
  OnGpu<std::int32_t> offsets, counts, rows, experts;
  OnGpu<float> row_weights;
  kernels::ExpertGroups groups;

  Placed(const Shape& shape, const Model& model)
      : offsets(shape.num_experts + 1),
        counts(shape.num_experts),
        rows(shape.num_received * shape.topk),
        experts(model.num_rows()),
        row_weights(model.num_rows()) {
    groups.num_experts = shape.num_experts;
    groups.topk = shape.topk;
    groups.num_received = shape.num_received;
    groups.num_rows = model.num_rows();
    groups.offsets = offsets.get();
    groups.counts = counts.get();
    groups.rows = rows.get();
    const std::vector<std::int32_t> narrow(model.ids.begin(), model.ids.end());
    const OnGpu<std::int64_t> wide_ids(model.ids);
    const OnGpu<std::int32_t> narrow_ids(narrow);
    const OnGpu<float> weights(model.weights);
    const OnGpu<std::int32_t> scratch(kernels::place_by_expert_words(groups));
    kernels::PlaceByExpertArgs args;
    args.groups = groups;
    args.ids = shape.id_bytes == 8 ? static_cast<const void*>(wide_ids.get()) : narrow_ids.get();
    args.id_bytes = shape.id_bytes;
    args.weights = weights.get();
    args.alignment = shape.alignment;
    args.scratch = scratch.get();
    args.experts = experts.get();
    args.row_weights = row_weights.get();
    kernels::place_by_expert(args, nullptr);
    (void)scratch.read();
  }
};

void check_places(const Placed& placed, const Model& model) {
  REQUIRE(placed.offsets.read() == model.offsets);
  REQUIRE(placed.counts.read() == model.counts);
  REQUIRE(placed.rows.read() == model.rows);
  REQUIRE(placed.experts.read() == model.experts);
  REQUIRE(placed.row_weights.read() == model.row_weights);
}

void check_rows(const Shape& shape, const Placed& placed, const Model& model, std::mt19937_64& random) {
  const std::int64_t row_bytes = 2 * shape.hidden, item = shape.scale_bytes, S = shape.num_scales;
  const std::int64_t N = shape.num_received, P = model.num_rows();
  const auto random_bytes = [&](std::int64_t count) {
    std::vector<char> bytes(static_cast<std::size_t>(count));
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
  };
  const std::vector<char> x = random_bytes(N * row_bytes), scales = random_bytes(N * S * item);
  // Padding is zero; what is behind the groups stays.
  const char poison = static_cast<char>(kPoison);
  std::vector<char> want(static_cast<std::size_t>(P * row_bytes), poison);
  std::vector<char> want_scales(static_cast<std::size_t>(P * S * item), poison);
  const auto scale_at = [&](std::int64_t row, std::int64_t s, std::int64_t rows) {
    return (shape.columns ? s * rows + row : row * S + s) * item;
  };
  std::fill_n(want.begin(), model.offsets.back() * row_bytes, char{0});
  for (std::int64_t row = 0; row < model.offsets.back(); ++row)
    for (std::int64_t s = 0; s < S; ++s) std::fill_n(want_scales.begin() + scale_at(row, s, P), item, char{0});
  for (std::size_t i = 0; i < model.rows.size(); ++i) {
    const std::int64_t received = static_cast<std::int64_t>(i) / shape.topk, row = model.rows[i];
    if (row < 0) continue;
    std::memcpy(want.data() + row * row_bytes, x.data() + received * row_bytes, static_cast<std::size_t>(row_bytes));
    for (std::int64_t s = 0; s < S; ++s)
      std::memcpy(want_scales.data() + scale_at(row, s, P), scales.data() + scale_at(received, s, N),
                  static_cast<std::size_t>(item));
  }
  const OnGpu<char> from(x), from_scales(scales), out(P * row_bytes), out_scales(P * S * item);
  kernels::GroupRowsArgs args;
  args.groups = placed.groups;
  args.x = from.get();
  args.out = out.get();
  args.row_bytes = row_bytes;
  args.scales = {from_scales.get(), shape.scale_bytes, S, shape.columns ? item : S * item,
                 shape.columns ? N * item : item};
  args.out_scales = out_scales.get();
  args.out_row_stride = shape.columns ? item : S * item;
  args.out_item_stride = shape.columns ? P * item : item;
  kernels::group_rows(args, nullptr);
  REQUIRE(out.read() == want);
  REQUIRE(out_scales.read() == want_scales);
}

void check_sums(const Shape& shape, const Placed& placed, const Model& model, SumType type, bool weighted, int gap,
                std::mt19937_64& random) {
  const std::int64_t H = shape.hidden, N = shape.num_received, P = model.num_rows();
  const std::int64_t item = type == SumType::kFp32 ? 4 : 2, stride = H * item + gap;
  std::vector<float> x(static_cast<std::size_t>(P * H));
  for (float& value : x) value = rounded(type, static_cast<float>(random() % 4096) / 512.0f - 4.0f);
  const std::vector<char> packed = as_bytes(type, x);
  std::vector<char> bytes(static_cast<std::size_t>(P * stride + gap), static_cast<char>(kPoison));
  for (std::int64_t row = 0; row < P; ++row)
    std::memcpy(bytes.data() + gap + row * stride, packed.data() + row * H * item, static_cast<std::size_t>(H * item));
  std::vector<float> sums;
  std::vector<float> by_entry;
  for (std::int64_t received = 0; received < N; ++received) {
    for (std::int64_t h = 0; h < H; ++h) {
      float sum = 0;
      for (int k = 0; k < shape.topk; ++k) {
        const std::int64_t row = model.rows[static_cast<std::size_t>(received * shape.topk + k)];
        if (row < 0) continue;
        const float value = x[static_cast<std::size_t>(row * H + h)];
        const volatile float product = weighted ? model.row_weights[static_cast<std::size_t>(row)] * value : value;
        sum += product;
      }
      sums.push_back(rounded(type, sum));
    }
    for (int k = 0; k < shape.topk; ++k) {
      const std::int64_t row = model.rows[static_cast<std::size_t>(received * shape.topk + k)];
      by_entry.push_back(row < 0 ? 0.0f : model.row_weights[static_cast<std::size_t>(row)]);
    }
  }
  const OnGpu<char> from(bytes), out(N * H * item);
  const OnGpu<float> weights(model.row_weights), out_weights(N * shape.topk);
  kernels::SumGroupsArgs args;
  args.groups = placed.groups;
  args.type = type;
  args.x = from.get() + gap;
  args.row_stride = stride;
  args.hidden = H;
  args.row_weights = weighted ? weights.get() : nullptr;
  args.out = out.get();
  args.weights = weights.get();
  args.out_weights = out_weights.get();
  kernels::sum_groups(args, nullptr);
  // Received rows without entries are passed over.
  std::vector<char> want = as_bytes(type, sums);
  for (std::int64_t received = 0; received < N; ++received) {
    if (model.has_rows(shape, received)) continue;
    std::fill_n(want.begin() + received * H * item, H * item, static_cast<char>(kPoison));
    std::memset(by_entry.data() + received * shape.topk, kPoison, sizeof(float) * static_cast<std::size_t>(shape.topk));
  }
  REQUIRE(out.read() == want);
  const std::vector<float> got_weights = out_weights.read();  // bit by bit: poison need not be a number
  REQUIRE(std::memcmp(got_weights.data(), by_entry.data(), sizeof(float) * by_entry.size()) == 0);
}

const Shape kShapes[] = {
    {0, 4, 2, 8},                                   // no rows, no groups
    {1, 1, 1, 1},                                   // a row
    {37, 3, 2, 16, 4},                              // narrow ids
    {300, 5, 8, 1, 8, 264, 2, 4, true},             // several blocks, scales by column
    {65, 70, 64, 4, 8, 8, 3, 1},                    // more experts than lanes, the largest top-k, scales of bytes
    {40, 2, 40, 128, 4, 520, 5, 8, false, 1},       // nothing but padding: every entry is -1
    {50, 1, 4, 7, 8, 1032, 1, 2, true, 0},          // one expert has everything
    {129, 1500, 3, 3, 4, 16},                       // fewer warps, for many experts
    {70, 6, 2, 8, 4, 264, 2, 4, true, 2, 531},      // rows behind the groups, and received rows without entries
    {33, 3, 2, 4, 8, 16, 1, 4, false, 1, 50},       // all of them so
    {20, kernels::kMaxGroupedExperts, 2, 2, 8, 8},  // as many as there may be
};

}  // namespace

GPU_TEST_CASE("rows by expert: places, rows, scales, padding, sums of every kind") {
  kernels::prepare();
  std::mt19937_64 random(17);
  for (const Shape& shape : kShapes) {
    CAPTURE(shape.num_received);
    CAPTURE(shape.num_experts);
    const Model model(shape, random);
    const Placed placed(shape, model);
    check_places(placed, model);
    check_rows(shape, placed, model, random);
    for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
      for (const bool weighted : {false, true})
        for (const int gap : {0, 4, 32}) check_sums(shape, placed, model, type, weighted, gap, random);
    }
  }
}

GPU_TEST_CASE("rows by expert: what is refused") {
  kernels::ExpertGroups groups;
  groups.num_experts = kernels::kMaxGroupedExperts + 1;
  groups.topk = 1;
  kernels::PlaceByExpertArgs place;
  place.groups = groups;
  CHECK_THROWS_AS(kernels::place_by_expert(place, nullptr), ArgumentError);
  kernels::GroupRowsArgs rows;
  rows.groups = groups;
  rows.groups.num_experts = 1;
  rows.groups.num_rows = 1;
  rows.row_bytes = 24;
  CHECK_THROWS_AS(kernels::group_rows(rows, nullptr), ArgumentError);
}
