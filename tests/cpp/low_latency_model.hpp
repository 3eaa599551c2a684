// The low-latency calls of all ranks as scalar arithmetic, and checks of what the library gives against it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu/convert.hpp"
#include "cpu/simd.hpp"
#include "layout/blocks.hpp"
#include "layout/experts.hpp"
#include "support.hpp"

namespace deep_moe::test {

inline float load_as_float(DType dtype, const void* row, std::int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row)[i];
  const std::uint16_t raw = static_cast<const std::uint16_t*>(row)[i];
  return dtype == DType::kBFloat16 ? cpu::bf16_to_float(raw) : cpu::fp16_to_float(raw);
}

inline void store_float(DType dtype, void* row, std::int64_t i, float value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(row)[i] = value;
  else
    static_cast<std::uint16_t*>(row)[i] =
        dtype == DType::kBFloat16 ? cpu::float_to_bf16(value) : cpu::float_to_fp16(value);
}

inline float rounded(DType dtype, float value) {
  char raw[4];
  store_float(dtype, raw, 0, value);
  return load_as_float(dtype, raw, 0);
}

struct LowShape {
  int num_ranks = 2;
  std::vector<std::int64_t> num_tokens = {16, 16};
  std::int64_t max_tokens = 16, hidden = 256, num_experts = 16, topk = 4;
  DType dtype = DType::kBFloat16;
  std::uint64_t seed = 1;
  bool wild = false;  // the experts' outputs have zeros, infinities, NaNs and magnitudes of all kinds
};

// All ranks' inputs of one dispatch and the combine of it. Every rank makes the whole of it.
class LowModel {
 public:
  struct Input {
    std::vector<char> x;
    std::vector<std::int64_t> ids;
    std::vector<std::int32_t> short_ids;
    std::vector<float> weights;
  };
  struct Source {
    int rank;
    std::int64_t token;
  };

  explicit LowModel(const LowShape& shape_)
      : shape(shape_), blocks(static_cast<int>(shape.num_experts), shape.num_ranks), experts(shape.num_experts) {
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      Random random(shape.seed * 977 + static_cast<std::uint64_t>(rank));
      Input input;
      const std::int64_t tokens = shape.num_tokens[rank];
      input.x.resize(tokens * shape.hidden * dtype_bytes(shape.dtype));
      for (std::int64_t i = 0; i < tokens * shape.hidden; ++i)
        store_float(shape.dtype, input.x.data(), i, random.uniform() * static_cast<float>(1 + i % 7));
      for (std::int64_t i = 0; i < tokens * shape.topk; ++i) {
        std::int64_t id = random.below(6) == 0 ? -1 : random.below(shape.num_experts);
        if (i % shape.topk > 0 && random.below(8) == 0) id = input.ids.back();  // the same expert again
        if (i / shape.topk % 5 == 4) id = -1;                                   // a token that goes nowhere
        input.ids.push_back(id);
        input.short_ids.push_back(static_cast<std::int32_t>(id));
        input.weights.push_back(random.uniform());
      }
      inputs.push_back(std::move(input));
    }
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      for (std::int64_t token = 0; token < shape.num_tokens[rank]; ++token) {
        std::set<std::int64_t> distinct;
        for (std::int64_t k = 0; k < shape.topk; ++k)
          if (id(rank, token, k) >= 0) distinct.insert(id(rank, token, k));
        for (const std::int64_t expert : distinct) experts[expert].push_back({rank, token});
      }
  }

  std::int64_t id(int rank, std::int64_t token, std::int64_t k) const {
    return inputs[rank].ids[token * shape.topk + k];
  }
  char* x_row(int rank, std::int64_t token) {
    return inputs[rank].x.data() + token * shape.hidden * static_cast<std::int64_t>(dtype_bytes(shape.dtype));
  }
  std::int64_t expert_rows() const { return shape.num_ranks * shape.max_tokens; }

  LowLatencyDispatchArgs dispatch_args(int rank, bool with_weights, bool short_ids = false) {
    Input& input = inputs[rank];
    const std::int64_t tokens = shape.num_tokens[rank];
    LowLatencyDispatchArgs args;
    args.x.data = TensorView::contiguous(input.x.data(), shape.dtype, {tokens, shape.hidden});
    args.topk_idx = short_ids ? TensorView::contiguous(input.short_ids.data(), DType::kInt32, {tokens, shape.topk})
                              : TensorView::contiguous(input.ids.data(), DType::kInt64, {tokens, shape.topk});
    if (with_weights)
      args.topk_weights = TensorView::contiguous(input.weights.data(), DType::kFloat32, {tokens, shape.topk});
    args.num_max_dispatch_tokens_per_rank = shape.max_tokens;
    args.num_experts = shape.num_experts;
    args.use_fp8 = false;
    return args;
  }

  // Calls check(local expert, slot in its block, source) for each row that `rank` must have; rows of `masked` ranks are
  // not there.
  template <typename Check>
  void for_each_row(int rank, const std::set<int>& masked, const Check& check) const {
    for (int local = 0; local < blocks.num_local_experts(rank); ++local) {
      std::int64_t slot = 0;
      for (const Source& source : experts[blocks.first_expert(rank) + local])
        if (masked.count(source.rank) == 0) check(local, slot++, source);
    }
  }

  void check_counts(int rank, const LowLatencyDispatchResult& result, const std::set<int>& masked = {}) const {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(blocks.num_local_experts(rank)), 0);
    for_each_row(rank, masked, [&](int local, std::int64_t slot, const Source& source) {
      ++counts[local];
      expect(result.handle.src_info.as<std::int32_t>()[local * expert_rows() + slot] == source.token, "source token");
    });
    for (std::size_t local = 0; local < counts.size(); ++local)
      expect(result.recv_count.as<std::int32_t>()[local] == counts[local],
             "rows of local expert " + std::to_string(local) + ": " +
                 std::to_string(result.recv_count.as<std::int32_t>()[local]) + " for " + std::to_string(counts[local]));
    check_ranges(rank, result.handle.layout_range, masked);
  }

  // begin << 32 | count of each (local expert, source).
  void check_ranges(int rank, const Tensor& ranges, const std::set<int>& masked) const {
    for (int local = 0; local < blocks.num_local_experts(rank); ++local) {
      std::int64_t begin = 0;
      for (int src = 0; src < shape.num_ranks; ++src) {
        std::int64_t count = 0;
        for (const Source& source : experts[blocks.first_expert(rank) + local])
          count += source.rank == src && masked.count(src) == 0 ? 1 : 0;
        expect(ranges.as<std::int64_t>()[local * shape.num_ranks + src] == (begin << 32 | count), "range of a source");
        begin += count;
      }
    }
  }

  void check_plain_rows(int rank, const LowLatencyDispatchResult& result, const std::set<int>& masked = {}) {
    check_counts(rank, result, masked);
    const std::int64_t row_bytes = shape.hidden * static_cast<std::int64_t>(dtype_bytes(shape.dtype));
    for_each_row(rank, masked, [&](int local, std::int64_t slot, const Source& source) {
      expect(std::memcmp(result.recv_x.data.as<char>() + (local * expert_rows() + slot) * row_bytes,
                         x_row(source.rank, source.token), static_cast<std::size_t>(row_bytes)) == 0,
             "row " + std::to_string(slot) + " of local expert " + std::to_string(local));
    });
  }

  void check_fp8_rows(int rank, const LowLatencyDispatchResult& result, bool round_scale, bool ue8m0) {
    check_counts(rank, result);
    const TensorView& got = result.recv_x.scales.view;
    const std::int64_t num_blocks = shape.hidden / 128, rows = expert_rows();
    expect(result.recv_x.data.view.dtype == DType::kFloat8E4M3, "fp8 data");
    expect(got.stride[1] == 1 && got.stride[2] == rows, "column-major scales");
    std::vector<std::uint8_t> q(static_cast<std::size_t>(shape.hidden));
    std::vector<float> scales(static_cast<std::size_t>(num_blocks));
    for_each_row(rank, {}, [&](int local, std::int64_t slot, const Source& source) {
      cpu::kGenericOps.cast_fp8(shape.dtype, x_row(source.rank, source.token), shape.hidden, round_scale, q.data(),
                                scales.data());
      expect(std::memcmp(result.recv_x.data.as<std::uint8_t>() + (local * rows + slot) * shape.hidden, q.data(),
                         q.size()) == 0,
             "fp8 row");
      for (std::int64_t b = 0; b < num_blocks; ++b) {
        if (!ue8m0) {
          expect(got.as<float>()[local * got.stride[0] + b * rows + slot] == scales[b], "scale");
        } else {
          const std::int32_t word = got.as<std::int32_t>()[local * got.stride[0] + b / 4 * rows + slot];
          expect(std::ldexp(1.0f, (word >> (8 * (b % 4)) & 0xff) - 127) == scales[b], "packed scale");
        }
      }
    });
  }

  // What expert `expert` makes of a source's row: any numbers that every rank can make.
  float output(std::int64_t expert, const Source& source, std::int64_t h) const {
    std::uint64_t mix = static_cast<std::uint64_t>(expert * 1000003 + source.rank * 10007 + source.token * 101 + h);
    mix = (mix ^ shape.seed) * 0x9e3779b97f4a7c15ull;
    const float value = static_cast<float>(static_cast<std::int64_t>((mix ^ (mix >> 29)) >> 40)) / 8388608.0f - 1.0f;
    return rounded(shape.dtype, shape.wild ? made_wild(value, mix >> 7, h) : value);
  }

  // The combine's input of one rank: NaN where there is no row.
  std::vector<char> outputs(int rank, const std::set<int>& masked = {}) const {
    const std::int64_t num_elements = blocks.num_local_experts(rank) * expert_rows() * shape.hidden;
    std::vector<char> y(num_elements * dtype_bytes(shape.dtype));
    for (std::int64_t i = 0; i < num_elements; ++i) store_float(shape.dtype, y.data(), i, NAN);
    for_each_row(rank, masked, [&](int local, std::int64_t slot, const Source& source) {
      for (std::int64_t h = 0; h < shape.hidden; ++h)
        store_float(shape.dtype, y.data(), (local * expert_rows() + slot) * shape.hidden + h,
                    output(blocks.first_expert(rank) + local, source, h));
    });
    return y;
  }

  LowLatencyCombineArgs combine_args(int rank, std::vector<char>& y, const LowLatencyHandle& handle) {
    Input& input = inputs[rank];
    const std::int64_t tokens = shape.num_tokens[rank];
    LowLatencyCombineArgs args;
    args.x =
        TensorView::contiguous(y.data(), shape.dtype, {blocks.num_local_experts(rank), expert_rows(), shape.hidden});
    args.topk_idx = TensorView::contiguous(input.ids.data(), DType::kInt64, {tokens, shape.topk});
    args.topk_weights = TensorView::contiguous(input.weights.data(), DType::kFloat32, {tokens, shape.topk});
    args.handle = handle;
    return args;
  }

  // Bit-equal, also of rows that travel as logarithms.
  void check_combined(int rank, const TensorView& got, bool pre_reduced, bool logfmt = false,
                      const std::set<int>& masked = {}) const {
    expect(got.dtype == shape.dtype && got.shape[0] == shape.num_tokens[rank] && got.shape[1] == shape.hidden, "shape");
    const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(shape.dtype));
    for (std::int64_t token = 0; token < shape.num_tokens[rank]; ++token) {
      const std::vector<float> want = combined(rank, token, pre_reduced, logfmt, masked);
      const char* const row = static_cast<const char*>(got.data) + token * got.stride[0] * item;
      for (std::int64_t h = 0; h < shape.hidden; ++h) {
        char bits[4];
        store_float(shape.dtype, bits, 0, std::isnan(want[h]) ? NAN : want[h]);  // the one positive NaN
        if (std::memcmp(bits, row + h * item, static_cast<std::size_t>(item)) != 0)
          throw std::runtime_error("combined[" + std::to_string(token) + ", " + std::to_string(h) + "] is " +
                                   std::to_string(load_as_float(shape.dtype, row, h)) + ", expected " +
                                   std::to_string(want[h]));
      }
    }
  }

  const LowShape shape;
  const layout::ExpertBlocks blocks;
  std::vector<Input> inputs;
  std::vector<std::vector<Source>> experts;  // by global expert: its rows in order

 private:
  // Blocks of 128 columns that are each of another kind.
  static float made_wild(float value, std::uint64_t mix, std::int64_t h) {
    const std::int64_t kind = h / 128 % 5;
    if (kind == 0) return mix % 3 == 0 ? 0.0f : value;
    if (kind == 1) return mix % 50 == 0 ? INFINITY : mix % 50 == 1 ? -INFINITY : mix % 50 == 2 ? NAN : value;
    if (kind == 2) return std::ldexp(value, static_cast<int>(mix % 60) - 45);
    if (kind == 3) return std::ldexp(value, -static_cast<int>(mix % 140));
    return 0.75f;
  }
  // As combine makes it: rows as they travel, added to the sum in the order of the ranks.
  std::vector<float> combined(int rank, std::int64_t token, bool pre_reduced, bool logfmt,
                              const std::set<int>& masked) const {
    const auto size = static_cast<std::size_t>(shape.hidden);
    std::vector<float> total(size, 0.0f), row(size), part(size);
    const auto add = [](std::vector<float>& sum, float weight, const std::vector<float>& numbers) {
      for (std::size_t h = 0; h < sum.size(); ++h) {
        const volatile float product = weight * numbers[h];
        sum[h] = sum[h] + product;
      }
    };
    for (int holder = 0; holder < shape.num_ranks; ++holder) {
      if (masked.count(holder) != 0) continue;
      bool any = false;
      std::fill(part.begin(), part.end(), 0.0f);
      for (std::int64_t k = 0; k < shape.topk; ++k) {
        const std::int64_t expert = id(rank, token, k);
        if (expert < 0 || blocks.rank_of(static_cast<int>(expert)) != holder) continue;
        bool first = true;
        for (std::int64_t earlier = 0; earlier < k; ++earlier) first = first && id(rank, token, earlier) != expert;
        if (!first) continue;
        any = true;
        volatile float weight = 0;
        for (std::int64_t other = k; other < shape.topk; ++other)
          if (id(rank, token, other) == expert) weight = weight + inputs[rank].weights[token * shape.topk + other];
        for (std::int64_t h = 0; h < shape.hidden; ++h) row[h] = output(expert, {rank, token}, h);
        if (!pre_reduced && logfmt) through_logfmt(row);
        add(pre_reduced ? part : total, weight, row);
      }
      if (!pre_reduced || !any) continue;
      for (float& number : part) number = rounded(shape.dtype, number);
      if (logfmt) through_logfmt(part);
      add(total, 1.0f, part);
    }
    for (float& number : total) number = rounded(shape.dtype, number);
    return total;
  }
  static void through_logfmt(std::vector<float>& row) {
    const auto hidden = static_cast<std::int64_t>(row.size());
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(hidden / kLogfmtBlock * kLogfmtBlockBytes));
    cpu::kGenericOps.logfmt_encode(DType::kFloat32, row.data(), hidden, codes.data());
    cpu::kGenericOps.logfmt_decode(codes.data(), hidden, row.data());
  }
};

}  // namespace deep_moe::test
