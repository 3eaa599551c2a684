// Low-latency dispatch and combine between ranks: every mode and half against the scalar model.
#include "gpu_low_latency_cases.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

int blocks_for(int num_ranks) { return std::min(33, 128 / ranks_a_gpu(num_ranks)); }

std::vector<std::int64_t> tokens(int num_ranks, std::int64_t most) {
  std::vector<std::int64_t> count;
  for (int r = 0; r < num_ranks; ++r) count.push_back(r % 3 == 1 ? most / 3 : most - r);
  return count;
}

}  // namespace

TEST_CASE("low latency: bf16 and fp8, in one launch and in halves" * doctest::skip(no_gpu())) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    CAPTURE(num_ranks);
    LowRanks ranks(num_ranks, 64 * kMiB, 256 * kMiB);
    LowShape shape;
    shape.num_ranks = num_ranks;
    shape.num_tokens = tokens(num_ranks, 33);
    shape.max_tokens = 40;
    shape.hidden = 1536;
    shape.num_experts = 30;
    shape.topk = 8;
    for (const bool halves : {false, true})
      for (const bool weights : {true, false})
        for (const int kind : {0, 1, 2, 3}) {
          CAPTURE(halves);
          CAPTURE(weights);
          CAPTURE(kind);
          LowMode mode = mode_of(halves, weights, kind, blocks_for(num_ranks));
          if (ranks_a_gpu(num_ranks) == 1 && kind >= 2) {  // a rank may have all of its GPU
            mode.num_blocks = num_sms();
            mode.early = true;
          }
          shape.seed += 1;
          check_pair(ranks, shape, mode);
        }
  }
}

TEST_CASE("low latency: types, widths, experts a token, strides, few blocks" * doctest::skip(no_gpu())) {
  LowRanks ranks(2, 96 * kMiB, 512 * kMiB);
  check_cases(ranks, {{7168, 256, 8, 16, DType::kBFloat16, 3, 0, 1},
                      {7168, 256, 8, 16, DType::kBFloat16, 60, 32, 1},
                      {2880, 9, 4, 24, DType::kBFloat16, 5, 2, 0},
                      {8, 16, 1, 64, DType::kBFloat16, 7, 0, 0},
                      {128, 16, 32, 12, DType::kFloat16, 9, 2, 1},
                      {4, 3, 2, 50, DType::kFloat32, 3, 4, 0},
                      {640, 64, 64, 10, DType::kFloat32, 33, 0, 1},
                      {3072, 60, 22, 17, DType::kFloat16, 11, 0, 0},
                      {512, 2048, 6, 130, DType::kBFloat16, 31, 0, 1},
                      {256, 16, 14, 200, DType::kBFloat16, 4, 0, 0}});
}

TEST_CASE("low latency: rows with scales of their own travel as they are" * doctest::skip(no_gpu())) {
  LowRanks ranks(3, 64 * kMiB, 256 * kMiB);
  for (const int item : {1, 2, 4, 8})
    for (const bool halves : {false, true}) {
      LowShape shape;
      shape.num_ranks = 3;
      shape.num_tokens = {20, 0, 13};
      shape.max_tokens = 20;
      shape.hidden = 1024;
      LowMode mode;
      mode.scale_items = item == 1 ? 400 : 56;
      mode.scale_bytes = item;
      mode.halves = halves;
      check_pair(ranks, shape, mode);
    }
}

TEST_CASE("low latency: no tokens, one hot expert, one token" * doctest::skip(no_gpu())) {
  LowRanks ranks(2, 64 * kMiB, 512 * kMiB);
  for (const bool halves : {false, true})
    for (const std::vector<std::int64_t>& count :
         std::vector<std::vector<std::int64_t>>{{0, 0}, {16, 0}, {0, 1}, {1, 1}}) {
      LowShape shape;
      shape.num_tokens = count;
      LowMode mode;
      mode.halves = halves;
      check_pair(ranks, shape, mode);
    }
  LowShape shape;
  shape.num_tokens = {128, 128};
  shape.max_tokens = 128;
  shape.num_experts = 2;
  shape.topk = 1;
  check_pair(ranks, shape, LowMode{});
}

TEST_CASE("low latency: three calls in flight, halves in any order, other calls between" * doctest::skip(no_gpu())) {
  const int R = 2;
  LowRanks ranks(R, 16 * kMiB, 64 * kMiB);
  const char* calls = std::getenv("DEEP_MOE_GPU_STRESS_CALLS");
  const int rounds = (calls != nullptr ? std::atoi(calls) : 1000) / 8;  // of two calls and their combines, in halves
  check_in_flight(
      ranks, rounds, 60, 300,
      [](Random& same, Random& mine, int number) {
        const int kind = same.below(2) == 0 ? 1 : 0;
        LowMode mode = mode_of(true, same.below(2) == 0, kind, 3 + static_cast<int>(mine.below(40)));
        mode.logfmt = number % 3 == 1;
        mode.short_ids = false;
        return mode;
      },
      [&](int r, Random& same) {
        for (std::int64_t others = same.below(7) - 3; others > 0; --others) {  // any other call takes an epoch
          ranks.world.set_ids(r, {0});
          kernels::notify(ranks.world.rank(r).domain, ranks.world.args(r, 0), ranks.world.rank(r).stream);
        }
      });
}

TEST_CASE("low latency: a graph, replayed with new values" * doctest::skip(no_gpu())) {
  const int R = 2;
  LowRanks ranks(R, 32 * kMiB, 128 * kMiB);
  LowShape shape;
  shape.num_tokens = {17, 30};
  shape.max_tokens = 32;
  shape.hidden = 7168;
  shape.num_experts = 32;
  shape.topk = 8;
  LowModel model(shape);
  Meeting together(R);
  std::vector<std::unique_ptr<LowModel>> others;
  for (int i = 0; i < 20; ++i) {
    shape.seed = static_cast<std::uint64_t>(100 + i);
    others.push_back(std::make_unique<LowModel>(shape));
  }
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    LowMode mode;
    mode.fp8 = true;
    LowCall call(ranks, model, r, mode);
    cudaGraph_t graphs[2];
    cudaGraphExec_t ready[2];
    for (int half = 0; half < 2; ++half) {
      cuda(cudaStreamBeginCapture(call.stream(), cudaStreamCaptureModeThreadLocal));
      half == 0 ? call.dispatch() : call.combine();
      cuda(cudaStreamEndCapture(call.stream(), &graphs[half]));
      cuda(cudaGraphInstantiate(&ready[half], graphs[half], 0));
      cuda(cudaGraphUpload(ready[half], call.stream()));
    }
    ranks.sync(r);
    for (auto& other : others) {
      call.use(*other);
      together.wait();
      cuda(cudaGraphLaunch(ready[0], call.stream()));
      call.check_dispatch();
      call.make_outputs();
      cuda(cudaGraphLaunch(ready[1], call.stream()));
      call.check_combine();
    }
    for (const int half : {0, 1}) {
      cuda(cudaGraphExecDestroy(ready[half]));
      cuda(cudaGraphDestroy(graphs[half]));
    }
  });
}
