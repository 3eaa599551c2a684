// Random dispatches that every rank draws alike: inputs as functions of a seed, and where rows go.
#pragma once

#include <cuda_fp16.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "layout/experts.hpp"
#include "support.hpp"

namespace deep_moe::test {

// A number for every tuple of numbers.
template <typename... Numbers>
std::uint64_t mix(Numbers... numbers) {
  std::uint64_t state = 0x243f6a8885a308d3ull;
  for (const std::uint64_t number : {static_cast<std::uint64_t>(numbers)...}) {
    state = (state ^ number) * 0x9e3779b97f4a7c15ull;
    state ^= state >> 29;
  }
  state *= 0xbf58476d1ce4e5b9ull;
  return state ^ (state >> 32);
}

inline std::int64_t of(std::uint64_t number, std::int64_t bound) {
  return static_cast<std::int64_t>((number >> 11) % static_cast<std::uint64_t>(bound));
}

// Random bytes of one row of one rank's input.
inline void fill_row(char* out, std::int64_t bytes, std::uint64_t seed, int src, std::int64_t token) {
  std::uint64_t state = mix(seed, src, token);
  for (std::int64_t at = 0; at < bytes; at += 4) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint32_t word = static_cast<std::uint32_t>(state >> 32);
    std::memcpy(out + at, &word, 4);
  }
}

// Whole numbers up to 64 as elements of a type that combine sums.
inline void store_number(char* out, DType dtype, std::int64_t at, int value) {
  if (dtype == DType::kFloat32) {
    reinterpret_cast<float*>(out)[at] = static_cast<float>(value);
  } else if (dtype == DType::kBFloat16) {
    reinterpret_cast<std::uint16_t*>(out)[at] = to_bf16(static_cast<float>(value));
  } else {
    static const auto halves = [] {
      std::array<std::uint16_t, 129> all{};
      for (int i = 0; i < 129; ++i) all[i] = __half_as_ushort(__float2half(static_cast<float>(i - 64)));
      return all;
    }();
    reinterpret_cast<std::uint16_t*>(out)[at] = halves[static_cast<std::size_t>(value + 64)];
  }
}

inline int small_number(std::uint64_t row_seed, std::int64_t h) {
  return static_cast<int>(((row_seed >> (h % 13)) * 2654435761u + static_cast<std::uint64_t>(h)) >> 7 & 15) - 8;
}

// A dispatch, the same on all ranks.
struct Plan {
  std::uint64_t seed = 0;
  std::vector<std::int64_t> tokens;  // by rank
  std::int64_t hidden = 0, num_experts = 0, topk = 0, worst = 0;
  DType dtype = DType::kBFloat16;
  std::int64_t num_scales = 0;
  bool narrow_ids = false, weights = true;
  bool by_mask = false;  // routed by is_token_in_rank and counts; no ids and weights travel

  int num_ranks() const { return static_cast<int>(tokens.size()); }
  std::int64_t row_bytes() const { return hidden * static_cast<std::int64_t>(dtype_bytes(dtype)); }
  std::int64_t id(int src, std::int64_t token, std::int64_t k) const {
    if (mix(seed, 1, src, token) % 16 == 0) return -1;
    const std::uint64_t number = mix(seed, 2, src, token, k);
    return number % 8 == 0 ? -1 : of(number, num_experts);
  }
  float weight(int src, std::int64_t token, std::int64_t k) const {
    return static_cast<float>(of(mix(seed, 3, src, token, k), 1 << 20)) / 1024.0f;
  }
};

// Where its rows go.
struct Routes {
  std::vector<std::vector<std::pair<int, std::int64_t>>> rows;  // by rank: (source, token) of each row there
  std::vector<std::vector<std::int64_t>> index;                 // by source: [T, R] the token's row there, or -1
  std::vector<std::int64_t> entries;                            // by expert

  explicit Routes(const Plan& plan);
};

inline Routes::Routes(const Plan& plan) {
  const int num_ranks = plan.num_ranks();
  const layout::ExpertBlocks blocks(static_cast<int>(plan.num_experts), num_ranks);
  rows.resize(static_cast<std::size_t>(num_ranks));
  entries.assign(static_cast<std::size_t>(plan.num_experts), 0);
  for (int src = 0; src < num_ranks; ++src) {
    index.emplace_back(static_cast<std::size_t>(plan.tokens[src] * num_ranks), -1);
    for (std::int64_t token = 0; token < plan.tokens[src]; ++token) {
      for (std::int64_t k = 0; k < plan.topk; ++k) {
        const std::int64_t id = plan.id(src, token, k);
        if (id < 0) continue;
        ++entries[static_cast<std::size_t>(id)];
        const int rank = blocks.rank_of(static_cast<int>(id));
        std::int64_t& place = index[src][static_cast<std::size_t>(token * num_ranks + rank)];
        if (place >= 0) continue;
        place = static_cast<std::int64_t>(rows[rank].size());
        rows[rank].emplace_back(src, token);
      }
    }
  }
}

}  // namespace deep_moe::test
