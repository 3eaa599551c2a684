// The low-latency calls of Buffers on GPUs, against the same scalar model as on the CPU: ranks are threads of this
// process that go round its GPUs.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "gpu_low_latency_buffer.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

void on_ranks(int num_ranks, const std::function<void(const Bootstrap&)>& body) {
  check_all(run_threads(num_ranks, body));
}

}  // namespace

TEST_CASE("low latency on GPU Buffers: all modes equal the scalar model" * doctest::skip(no_gpu())) {
  for (const int num_ranks : {1, 2, 3})
    for (const std::int64_t staging : {std::int64_t{0}, std::int64_t{32} << 20}) {
      CAPTURE(num_ranks);
      on_ranks(num_ranks, [&](const Bootstrap& bootstrap) {
        const int rank = bootstrap.rank;
        LowBuffer buffer(bootstrap, staging);
        LowShape shape;
        shape.num_ranks = num_ranks;
        shape.num_tokens.assign(static_cast<std::size_t>(num_ranks), 16);
        shape.num_tokens.back() = 5;
        shape.hidden = 1024;
        for (const bool hook : {false, true})
          for (const bool weights : {true, false})
            for (const int kind : {0, 1, 2}) {
              ++shape.seed;
              LowModel model(shape);
              const LowBufferMode mode{weights, hook, kind > 0, kind == 2};
              const LowLatencyDispatchResult result =
                  buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, weights), mode));
              expect(static_cast<bool>(result.hook) == hook, "a hook if asked for");
              if (result.hook) result.hook();
              check_rows(buffer, model, rank, result, mode);
              check_combine(buffer, model, rank, result, mode);
              buffer.clear();
            }
      });
    }
}

TEST_CASE("low latency on GPU Buffers: three in flight, a fourth is refused, hooks in any order" *
          doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20);
    const LowBufferMode mode{true, true, false, false};
    for (int round = 0; round < 20; ++round) {
      std::vector<std::unique_ptr<LowModel>> models;
      std::vector<LowLatencyDispatchResult> results;
      for (int i = 0; i < 3; ++i) {
        LowShape shape;
        shape.seed = static_cast<std::uint64_t>(3 * round + i + 1);
        models.push_back(std::make_unique<LowModel>(shape));
        results.push_back(buffer->low_latency_dispatch(on_gpu(buffer, models.back()->dispatch_args(rank, true), mode)));
      }
      const int first = rank == 0 ? 2 : 1;
      for (int i = 0; i < 3; ++i) results[static_cast<std::size_t>((first + i) % 3)].hook();
      for (std::size_t i = 0; i < 3; ++i) {
        check_rows(buffer, *models[i], rank, results[i], mode);
        check_combine(buffer, *models[i], rank, results[i], mode);
      }
      buffer.clear();
    }
  });
}

TEST_CASE("low latency on GPU Buffers: a refused call names the reason to the peers, and the next one works" *
          doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20);
    LowModel model{LowShape{}};
    const LowBufferMode mode;
    for (int round = 0; round < 6; ++round) {
      LowLatencyDispatchArgs args = on_gpu(buffer, model.dispatch_args(rank, true), mode);
      if (rank == 1) {
        args.num_max_dispatch_tokens_per_rank = 3;
        expect_throw<ArgumentError>([&] { buffer->low_latency_dispatch(args); }, "16");
      } else {
        const LowLatencyDispatchResult lost = buffer->low_latency_dispatch(args);
        buffer.sync();
        expect_throw<PeerRefusedError>([&] { buffer->check(); }, "num_max_dispatch_tokens_per_rank");
      }
      const LowLatencyDispatchResult result =
          buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, true), mode));
      check_rows(buffer, model, rank, result, mode);
      check_combine(buffer, model, rank, result, mode);
      buffer.clear();
    }
  });
}

TEST_CASE("low latency on GPU Buffers: a late rank is named" * doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20, 2.0);
    LowModel model{LowShape{}};
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(5));
      return;
    }
    const LowLatencyDispatchResult lost =
        buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, true), LowBufferMode{}));
    buffer.sync();
    expect_throw<TimeoutError>([&] { buffer->check(); }, "rank 1");
  });
}
