// Two ranks, as threads of this process, send two tokens each to the experts and sum what comes back.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include <deep_moe/buffer.hpp>

namespace consumer {

inline constexpr int kTokens = 2, kHidden = 64, kExperts = 4, kTopk = 2;

// Token 0 goes to both ranks, token 1 to expert 3 (on rank 1) alone: after dispatch and combine of the rows as they
// are, token 0 has doubled and token 1 is itself.
inline bool run_rank(const deep_moe::Bootstrap& bootstrap) {
  using deep_moe::DType;
  using deep_moe::TensorView;
  deep_moe::Buffer buffer(bootstrap, deep_moe::BufferOptions{});

  std::vector<float> x(kTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + 1000 * bootstrap.rank);
  std::vector<std::int64_t> topk_idx = {0, 2, 3, -1};

  deep_moe::DispatchArgs args;
  args.x.data = TensorView::contiguous(x.data(), DType::kFloat32, {kTokens, kHidden});
  args.topk_idx = TensorView::contiguous(topk_idx.data(), DType::kInt64, {kTokens, kTopk});
  args.num_experts = kExperts;
  const deep_moe::DispatchResult received = buffer.dispatch(args);

  deep_moe::CombineArgs combine_args;
  combine_args.x = received.recv_x.data.view;
  combine_args.handle = received.handle.view();
  const deep_moe::CombineResult combined = buffer.combine(combine_args);

  const float* sums = combined.combined_x.as<float>();
  for (int i = 0; i < kTokens * kHidden; ++i) {
    const float expected = i < kHidden ? 2 * x[i] : x[i];
    if (sums[i] != expected) {
      std::printf("rank %d, element %d: got %g, expected %g\n", bootstrap.rank, i, sums[i], expected);
      return false;
    }
  }
  std::printf("rank %d: %lld rows received\n", bootstrap.rank, static_cast<long long>(combine_args.x.shape[0]));
  return true;
}

inline void rank_thread(const deep_moe::Bootstrap& bootstrap, char& ok) {
  try {
    ok = run_rank(bootstrap);
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", bootstrap.rank, error.what());
  }
}

// True where both ranks got what they should.
inline bool exchange() {
  const std::vector<deep_moe::Bootstrap> bootstraps = deep_moe::make_thread_bootstraps(2);
  char ok[2] = {};
  std::thread other(rank_thread, std::cref(bootstraps[1]), std::ref(ok[1]));
  rank_thread(bootstraps[0], ok[0]);
  other.join();
  return ok[0] && ok[1];
}

}  // namespace consumer
