// Cases that the low-latency tests share: on GPUs, between nodes, and on the CPU.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_low_latency.cuh"

namespace deep_moe::test {

// `kind`: 0 rows as they are, 1 fp8, 2 with rounded scales, 3 with UE8M0 scales.
inline LowMode mode_of(bool halves, bool weights, int kind, int num_blocks = 3) {
  LowMode mode;
  mode.halves = halves;
  mode.weights = weights;
  mode.fp8 = kind > 0;
  mode.round_scale = kind == 2;
  mode.ue8m0 = kind == 3;
  mode.short_ids = kind == 1;
  mode.num_blocks = num_blocks;
  return mode;
}

// Two ranks, the second with half as many tokens.
struct LowCase {
  std::int64_t hidden, experts, topk, max_tokens;
  DType dtype;
  int num_blocks;
  std::int64_t gap;
  int kind = 0;

  LowShape shape() const {
    LowShape shape;
    shape.num_tokens = {max_tokens, max_tokens / 2};
    shape.max_tokens = max_tokens;
    shape.hidden = hidden;
    shape.num_experts = experts;
    shape.topk = topk;
    shape.dtype = dtype;
    return shape;
  }
};

// Types, widths, experts a token, strides, few blocks; small enough for the CPU.
inline const std::vector<LowCase> kSmallCases = {
    {2880, 9, 4, 7, DType::kBFloat16, 5, 2, 0},   {8, 16, 1, 30, DType::kBFloat16, 3, 0, 0},
    {128, 16, 32, 5, DType::kFloat16, 4, 2, 1},   {4, 3, 2, 12, DType::kFloat32, 2, 4, 0},
    {640, 64, 64, 4, DType::kFloat32, 6, 0, 1},   {1024, 60, 22, 5, DType::kFloat16, 4, 0, 0},
    {512, 512, 6, 20, DType::kBFloat16, 4, 0, 2}, {256, 16, 14, 40, DType::kBFloat16, 1, 0, 0},
    {2048, 32, 8, 4, DType::kBFloat16, 3, 32, 3},
};

// Each at once and in halves, with and without weights; `adjust(shape, mode)` may change what is not of the case.
template <typename Adjust>
void check_cases(LowRanks& ranks, const std::vector<LowCase>& cases, Adjust adjust) {
  for (const LowCase& one : cases)
    for (const bool halves : {false, true})
      for (const bool weights : {false, true}) {
        CAPTURE(one.hidden);
        CAPTURE(halves);
        CAPTURE(weights);
        LowShape shape = one.shape();
        LowMode mode = mode_of(halves, weights, one.kind, one.num_blocks);
        mode.short_ids = false;
        mode.gap = one.gap;
        adjust(shape, mode);
        check_pair(ranks, shape, mode);
      }
}
inline void check_cases(LowRanks& ranks, const std::vector<LowCase>& cases) {
  check_cases(ranks, cases, [](LowShape&, LowMode&) {});
}

// `same` draws alike on all ranks.
inline LowShape drawn_shape(Random& same, int num_ranks, std::int64_t most_tokens) {
  LowShape shape;
  shape.num_ranks = num_ranks;
  shape.max_tokens = 1 + same.below(most_tokens);
  shape.num_tokens.clear();
  for (int rank = 0; rank < num_ranks; ++rank) shape.num_tokens.push_back(same.below(shape.max_tokens + 1));
  shape.hidden = 128 * (1 + same.below(6));
  shape.num_experts = num_ranks + same.below(40);
  shape.topk = 1 + same.below(9);
  shape.dtype = same.below(2) == 0 ? DType::kBFloat16 : DType::kFloat16;
  return shape;
}

// Rounds of up to three calls in flight, in halves, received in any order. `draw(same, mine, number)` is the mode of
// the number-th call, `mine` drawing for the rank alone; `between(r, same)` may make other calls.
template <typename Draw, typename Between>
void check_in_flight(LowRanks& ranks, int rounds, std::int64_t most_tokens, std::int64_t most_micros, Draw draw,
                     Between between) {
  const int R = ranks.world.num_ranks();
  Meeting together(R);
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    Random same(5), mine(static_cast<std::uint64_t>(r) + 11);
    for (int round = 0; round < rounds; ++round) {
      CAPTURE(round);
      ranks.clear(r);
      std::vector<std::unique_ptr<LowModel>> models;
      std::vector<std::unique_ptr<LowCall>> open;
      const int count = 1 + static_cast<int>(same.below(3));
      for (int i = 0; i < count; ++i) {
        LowShape shape = drawn_shape(same, R, most_tokens);
        shape.seed = static_cast<std::uint64_t>(round * 4 + i);
        models.push_back(std::make_unique<LowModel>(shape));
        open.push_back(std::make_unique<LowCall>(ranks, *models.back(), r, draw(same, mine, round + i)));
      }
      std::vector<std::size_t> order(open.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      const auto shuffle = [&] {
        for (std::size_t i = order.size(); i > 1; --i)
          std::swap(order[i - 1], order[static_cast<std::size_t>(mine.below(static_cast<std::int64_t>(i)))]);
      };
      for (auto& call : open) call->send_dispatch();
      if (mine.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine.below(most_micros)));
      shuffle();
      for (const std::size_t i : order) open[i]->receive_dispatch();
      between(r, same);
      for (auto& call : open) {
        call->check_dispatch();
        call->restore_inputs();
        call->make_outputs();
      }
      for (auto& call : open) call->send_combine();
      shuffle();
      for (const std::size_t i : order) open[i]->receive_combine();
      for (auto& call : open) call->check_combine();
    }
  });
}

}  // namespace deep_moe::test
