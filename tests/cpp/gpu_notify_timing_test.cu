// How long layout and notify take. Prints a table; fails if a call is wildly slower than it should be.
#include <doctest/doctest.h>

#include <algorithm>

#include "gpu_timing.cuh"
#include "gpu_world.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

constexpr GraphRuns kRuns{50, 10, 9};

struct Single {
  double events, host;
};

// One eager call at a time, ranks started together: event to event, and from launch to the last count at the host.
Single single_call(World& world) {
  const int R = world.num_ranks();
  std::vector<std::vector<double>> events(R), host(R);
  Meeting together(R);
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    Rank& rank = world.rank(r);
    cudaEvent_t begin, end;
    cuda(cudaEventCreate(&begin));
    cuda(cudaEventCreate(&end));
    const layout::ExpertBlocks experts(world.num_experts(), R);
    for (int i = 1; i <= 60; ++i) {
      together.wait();
      const auto start = std::chrono::steady_clock::now();
      cuda(cudaEventRecord(begin, rank.stream));
      kernels::notify(rank.domain, world.args(r, static_cast<std::uint32_t>(i)), rank.stream);
      cuda(cudaEventRecord(end, rank.stream));
      for (int l = 0; l < experts.num_local_experts(r); ++l)
        world.wait_host(r, rank.domain.host_words.expert_rows(rank.host)[l], static_cast<std::uint32_t>(i));
      world.wait_outcome(r, static_cast<std::uint32_t>(i));
      const double seen = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
      cuda(cudaStreamSynchronize(rank.stream));
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, begin, end));
      if (i > 10) events[r].push_back(1000.0 * ms), host[r].push_back(seen);
    }
    cuda(cudaEventDestroy(begin));
    cuda(cudaEventDestroy(end));
  });
  Single result{0, 0};
  for (int r = 0; r < R; ++r) {
    result.events = std::max(result.events, median(events[r]));
    result.host = std::max(result.host, median(host[r]));
  }
  return result;
}

__global__ void empty_kernel() {}

}  // namespace

TEST_CASE("timing: layout and notify" * doctest::skip(no_gpu())) {
  struct Row {
    int num_ranks;
    std::int64_t num_tokens;
    int num_experts, topk, num_blocks;
  };
  const std::vector<Row> rows = {{1, 4096, 256, 8, 0},  {2, 4096, 256, 8, 0},  {2, 4096, 256, 8, 8},
                                 {2, 4096, 256, 8, 4},  {2, 128, 256, 8, 0},   {2, 1, 256, 8, 0},
                                 {4, 4096, 256, 8, 0},  {8, 4096, 256, 8, 0},  {8, 4096, 256, 8, 8},
                                 {2, 4096, 4096, 8, 0}, {2, 16384, 256, 8, 0}, {2, 16384, 256, 8, 32}};
  std::printf("\n%5s %4s %7s %6s %4s %7s | %13s %12s %10s %10s\n", "ranks", "GPUs", "tokens", "E", "K", "blocks",
              "back to back", "one, events", "at host", "layout b2b");
  for (const Row& row : rows) {
    World world(row.num_ranks, row.num_tokens, row.topk, row.num_experts, 8, 100.0);
    for (int r = 0; r < row.num_ranks; ++r)
      world.set_ids(r, uniform_ids(row.num_tokens, row.topk, row.num_experts, static_cast<std::uint64_t>(r)));
    const double chained = time_in_graphs(world, kRuns, [&](int r) {
      kernels::NotifyArgs args = world.args(r, 1);
      args.num_blocks = row.num_blocks;
      kernels::notify(world.rank(r).domain, args, world.rank(r).stream);
    });
    // The captured calls left sequence 1 at the host; single_call counts from 1 too, so let it start from clean words.
    for (int r = 0; r < row.num_ranks; ++r) std::memset(world.rank(r).host, 0, layout::host_words_bytes(row.num_ranks));
    const Single single = single_call(world);
    const double layout_only = time_in_graphs(world, kRuns, [&](int r) {
      kernels::LayoutArgs args;
      args.ids = world.args(r, 0).ids;
      args.num_experts = row.num_experts;
      args.num_blocks = row.num_blocks;
      args.num_tokens_per_rank = world.rank(r).out.per_rank;
      args.num_tokens_per_expert = world.rank(r).out.per_expert;
      args.is_token_in_rank = world.rank(r).out.is_token_in_rank;
      kernels::get_dispatch_layout(world.rank(r).domain, args, world.rank(r).stream);
    });
    std::printf("%5d %4d %7lld %6d %4d %7d | %10.2f us %9.2f us %7.2f us %7.2f us\n", row.num_ranks,
                num_gpus_of(row.num_ranks), static_cast<long long>(row.num_tokens), row.num_experts, row.topk,
                row.num_blocks, chained, single.events, single.host, layout_only);
    std::fflush(stdout);
    CHECK_LT(chained, 100.0);
  }
  World world(2, 1, 1, 2, 8, 100.0);
  const double empty =
      time_in_graphs(world, kRuns, [&](int r) { empty_kernel<<<17, 256, 0, world.rank(r).stream>>>(); });
  std::printf("empty kernel of 17 blocks, back to back: %.2f us\n", empty);
}
