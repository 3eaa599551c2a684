// Inputs of a combine for the ids of a World, and what comes out of it, on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu_rows.cuh"

namespace deep_moe::test {

using kernels::SumType;

// A number of any type, kept as fp32 that the type can hold.
inline float rounded(SumType type, float value) {
  switch (type) {
    case SumType::kBf16: return __bfloat162float(__float2bfloat16_rn(value));
    case SumType::kFp16: return __half2float(__float2half_rn(value));
    default: return value;
  }
}

inline std::vector<char> as_bytes(SumType type, const std::vector<float>& values) {
  const std::size_t item = type == SumType::kFp32 ? 4 : 2;
  std::vector<char> bytes(values.size() * item);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (type == SumType::kFp32) {
      std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    } else if (type == SumType::kBf16) {
      const __nv_bfloat16 value = __float2bfloat16_rn(values[i]);
      std::memcpy(bytes.data() + 2 * i, &value, 2);
    } else {
      const __half value = __float2half_rn(values[i]);
      std::memcpy(bytes.data() + 2 * i, &value, 2);
    }
  }
  return bytes;
}

struct SumShape {
  SumType type = SumType::kBf16;
  int hidden = 256;
  int num_biases = 0;
  bool weights = true;
  int gap = 0;  // bytes between rows of out and of the biases
  int num_sms = 3;
  bool vector_path = false;
  std::vector<int> node_of = {};  // by rank; empty: all ranks are on one node
};

class Sums {
 public:
  struct PerRank {
    char *x = nullptr, *bias[2] = {}, *out = nullptr;
    float *weights = nullptr, *out_weights = nullptr;
    char** segments = nullptr;
    std::vector<float> host_x, host_weights, host_bias[2];
  };

  Sums(World& world, Rows& rows, std::int64_t max_tokens, const SumShape& shape)
      : world_(world), rows_(rows), shape_(shape), ranks_(world.num_ranks()) {
    const int R = world.num_ranks();
    const std::int64_t most = max_tokens * R;
    for (int r = 0; r < R; ++r) {
      PerRank& rank = ranks_[r];
      rank.x = rows.allocate(r, most * row_bytes() + 512);
      rank.weights = reinterpret_cast<float*>(rows.allocate(r, most * world.topk() * 4 + 512));
      for (char*& bias : rank.bias) bias = rows.allocate(r, max_tokens * stride() + 64);
      rank.out = rows.allocate(r, max_tokens * stride() + 64);
      rank.out_weights = reinterpret_cast<float*>(rows.allocate(r, max_tokens * world.topk() * 4 + 4));
      rank.segments = reinterpret_cast<char**>(rows.allocate(r, sizeof(char*) * R * layout::kMaxSegments));
    }
    for (PerRank& rank : ranks_) {
      std::vector<char*> bases(R * layout::kMaxSegments, nullptr);
      for (int r = 0; r < R; ++r) {
        bases[r * layout::kMaxSegments + kInputSegment] = ranks_[r].x;
        bases[r * layout::kMaxSegments + kInputSegment + 1] = reinterpret_cast<char*>(ranks_[r].weights);
      }
      cuda(cudaMemcpy(rank.segments, bases.data(), bases.size() * sizeof(char*), cudaMemcpyDefault));
    }
  }

  SumShape& shape() { return shape_; }
  PerRank& rank(int r) { return ranks_[r]; }
  std::int64_t row_bytes() const {
    return static_cast<std::int64_t>(shape_.hidden) * (shape_.type == SumType::kFp32 ? 4 : 2);
  }
  std::int64_t stride() const { return row_bytes() + shape_.gap; }

  void fill(int r, std::mt19937_64& random) {
    const OnGpuOf on(r);
    PerRank& rank = ranks_[r];
    const std::int64_t N = rows_.counts().total(r, world_.num_ranks()), T = world_.rank(r).num_tokens;
    const auto numbers = [&](std::int64_t count, SumType type) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values)
        value = rounded(type,
                        (static_cast<float>(random() % 2000001) / 1e6f - 1.0f) * static_cast<float>(1 << random() % 6));
      return values;
    };
    rank.host_x = numbers(N * shape_.hidden, shape_.type);
    rank.host_weights = numbers(N * world_.topk(), SumType::kFp32);
    const std::vector<char> x = as_bytes(shape_.type, rank.host_x);
    rows_.upload(r, rank.x + 256, x.data(), x.size());
    rows_.upload(r, rank.weights + 3, rank.host_weights.data(), rank.host_weights.size() * 4);
    for (int b = 0; b < 2; ++b) {
      rank.host_bias[b] = numbers(T * shape_.hidden, shape_.type);
      const std::vector<char> packed = as_bytes(shape_.type, rank.host_bias[b]);
      for (std::int64_t t = 0; t < T; ++t)
        rows_.upload(r, rank.bias[b] + shape_.gap + t * stride(), packed.data() + t * row_bytes(), row_bytes());
    }
    cuda(cudaMemsetAsync(rank.out, kPoison, T * stride() + 64, world_.rank(r).stream));
    cuda(cudaMemsetAsync(rank.out_weights, kPoison, T * world_.topk() * 4, world_.rank(r).stream));
    cuda(cudaStreamSynchronize(world_.rank(r).stream));
  }

  kernels::CombineArgs args(int r, std::uint32_t sequence) {
    const Rank& words = world_.rank(r);
    const PerRank& rank = ranks_[r];
    kernels::CombineArgs args;
    args.type = shape_.type;
    args.num_tokens = words.num_tokens;
    args.hidden = shape_.hidden;
    args.send_position = words.out.send_position;
    args.rank_prefix_matrix = words.out.prefix;
    args.segment_bases = rank.segments;
    for (int b = 0; b < shape_.num_biases; ++b) {
      args.bias[b] = rank.bias[b] + shape_.gap;
      args.bias_stride[b] = stride();
    }
    args.out = rank.out + shape_.gap;
    args.out_stride = stride();
    args.topk = shape_.weights ? world_.topk() : 0;
    args.combined_topk_weights = shape_.weights ? rank.out_weights : nullptr;
    args.num_sms = shape_.num_sms;
    args.use_vector_path = shape_.vector_path;
    args.start.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCombine);
    args.start.signature.row_bytes = row_bytes();
    args.start.place = {kInputSegment, 0, 256, 0};
    args.start.weight_place = {kInputSegment + 1, 0, 12, 0};
    args.start.sequence = sequence;
    return args;
  }

  // Empty where the output of every rank, or of one, is as expected, gaps included.
  std::string check(int only = -1) {
    const int R = world_.num_ranks(), K = world_.topk(), H = shape_.hidden;
    for (int r = 0; r < R; ++r) {
      if (only >= 0 && r != only) continue;
      PerRank& rank = ranks_[r];
      const std::int64_t T = world_.rank(r).num_tokens;
      std::vector<char> expected(static_cast<std::size_t>(T * stride() + 64), static_cast<char>(kPoison));
      std::vector<float> sums(H), weights(static_cast<std::size_t>(T * K), 0.0f);
      for (std::int64_t t = 0; t < T; ++t) {
        for (int h = 0; h < H; ++h) {
          sums[h] = 0;
          for (int b = 0; b < shape_.num_biases; ++b) sums[h] += rank.host_bias[b][t * H + h];
        }
        const auto last = std::max_element(shape_.node_of.begin(), shape_.node_of.end());
        const int num_nodes = shape_.node_of.empty() ? 1 : *last + 1;
        for (int node = 0; node < num_nodes; ++node) {
          // What another node holds is summed there and rounded.
          const bool own = shape_.node_of.empty() || shape_.node_of[r] == node;
          std::vector<float> part(static_cast<std::size_t>(H), 0.0f), weight_part(static_cast<std::size_t>(K), 0.0f);
          for (int holder = 0; holder < R; ++holder) {
            const std::int32_t position = rows_.counts().layout[r].position[t * R + holder];
            if (position < 0 || (!shape_.node_of.empty() && shape_.node_of[holder] != node)) continue;
            const std::int64_t row = rows_.counts().first(r, holder, R) + position;
            float* const into = own ? sums.data() : part.data();
            float* const weights_into = own ? weights.data() + t * K : weight_part.data();
            for (int h = 0; h < H; ++h) into[h] += ranks_[holder].host_x[row * H + h];
            for (int k = 0; k < K; ++k) weights_into[k] += ranks_[holder].host_weights[row * K + k];
          }
          for (int h = 0; !own && h < H; ++h) sums[h] += rounded(shape_.type, part[h]);
          for (int k = 0; !own && k < K; ++k) weights[t * K + k] += weight_part[k];
        }
        const std::vector<char> bytes = as_bytes(shape_.type, sums);
        std::memcpy(expected.data() + shape_.gap + t * stride(), bytes.data(), bytes.size());
      }
      const std::vector<char> out = world_.read(r, rank.out, static_cast<std::int64_t>(expected.size()));
      if (out != expected) {
        const auto at = std::mismatch(out.begin(), out.end(), expected.begin()).first - out.begin();
        return "rank " + std::to_string(r) + ": byte " + std::to_string(at) + " of out";
      }
      if (shape_.weights && world_.read(r, rank.out_weights, T * K) != weights)
        return "rank " + std::to_string(r) + ": weights";
    }
    return {};
  }

 private:
  World& world_;
  Rows& rows_;
  SumShape shape_;
  std::vector<PerRank> ranks_;
};

}  // namespace deep_moe::test
