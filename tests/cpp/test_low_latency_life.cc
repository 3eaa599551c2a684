// Low-latency calls in their order: hooks, calls in flight, refusals, growth, masks, time-outs.
#include <doctest/doctest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "low_latency_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

BufferOptions low_options(double timeout_seconds = 30, bool enable_shrink = false) {
  BufferOptions options;
  options.low_latency_mode = true;
  options.timeout_seconds = timeout_seconds;
  options.enable_shrink = enable_shrink;
  return options;
}

LowShape shape_of(int num_ranks, std::uint64_t seed, std::int64_t max_tokens = 12, std::int64_t hidden = 128) {
  LowShape shape;
  shape.num_ranks = num_ranks;
  shape.num_tokens.clear();
  Random random(seed);
  for (int rank = 0; rank < num_ranks; ++rank) shape.num_tokens.push_back(random.below(max_tokens + 1));
  shape.max_tokens = max_tokens;
  shape.hidden = hidden;
  shape.seed = seed;
  return shape;
}

// A dispatch and the combine of it, each in flight or done.
struct Trip {
  std::unique_ptr<LowModel> model;
  LowLatencyDispatchResult dispatched;
  std::vector<char> y;
  LowLatencyCombineResult combined;
  bool weights = false, hook_on_combine = false;
};

Trip start(Buffer& buffer, const LowShape& shape, bool weights) {
  Trip trip;
  trip.model = std::make_unique<LowModel>(shape);
  trip.weights = weights;
  LowLatencyDispatchArgs args = trip.model->dispatch_args(buffer.rank(), weights);
  args.return_recv_hook = true;
  trip.dispatched = buffer.low_latency_dispatch(args);
  return trip;
}

// The hook of a combine that was started is left to the caller.
void turn(Buffer& buffer, Trip& trip, bool hook) {
  trip.model->check_plain_rows(buffer.rank(), trip.dispatched);
  trip.y = trip.model->outputs(buffer.rank());
  LowLatencyCombineArgs args = trip.model->combine_args(buffer.rank(), trip.y, trip.dispatched.handle.view());
  args.return_recv_hook = trip.hook_on_combine = hook;
  trip.combined = buffer.low_latency_combine(args);
}

void check(Buffer& buffer, const Trip& trip) {
  trip.model->check_combined(buffer.rank(), trip.combined.combined_x.view, trip.weights || !trip.hook_on_combine);
}

void whole_trip(Buffer& buffer, const LowShape& shape) {
  Trip trip = start(buffer, shape, false);
  trip.dispatched.hook();
  turn(buffer, trip, false);
  check(buffer, trip);
}

// A call of the high-throughput mode.
void plain_dispatch(Buffer& buffer, const LowShape& shape) {
  LowModel model(shape);
  const LowLatencyDispatchArgs low = model.dispatch_args(buffer.rank(), false);
  DispatchArgs args;
  args.x = low.x;
  args.topk_idx = low.topk_idx;
  args.num_experts = low.num_experts;
  buffer.dispatch(args);
}

}  // namespace

TEST_CASE("three calls may be in flight, in any order of their hooks; a fourth raises and changes nothing") {
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, low_options());
      for (std::uint64_t round = 0; round < 3; ++round) {
        std::vector<Trip> trips;
        for (std::uint64_t i = 0; i < 3; ++i) trips.push_back(start(buffer, shape_of(3, 10 * round + i), i == 1));
        const std::string text =
            expect_throw<Error>([&] { start(buffer, shape_of(3, 5), false); }, "call a hook first");
        expect(text.find("3 low-latency calls are in flight") != std::string::npos, text);
        for (const int i : order) trips[i].dispatched.hook();
        for (Trip& trip : trips) turn(buffer, trip, true);
        for (const int i : order) trips[i].combined.hook();
        for (const Trip& trip : trips) check(buffer, trip);
      }
    }));
  }
}

TEST_CASE("a hook may be called late, in the midst of other calls, or never") {
  check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    Trip old = start(buffer, shape_of(3, 1), false);
    for (std::uint64_t i = 0; i < 7; ++i) whole_trip(buffer, shape_of(3, 10 + i));
    old.dispatched.hook();
    turn(buffer, old, true);
    // One rank calls the hook at once, the others when the slot has come round.
    if (bootstrap.rank == 1) old.combined.hook();
    for (std::uint64_t i = 0; i < 7; ++i) whole_trip(buffer, shape_of(3, 20 + i));
    if (bootstrap.rank != 1) old.combined.hook();
    check(buffer, old);
    expect_throw<Error>([&] { old.combined.hook(); }, "called before");
    for (std::uint64_t i = 0; i < 9; ++i) start(buffer, shape_of(3, 30 + i), i % 2 == 0);  // dropped
    for (std::uint64_t i = 0; i < 5; ++i) whole_trip(buffer, shape_of(3, 40 + i));
  }));
}

TEST_CASE("a late hook of a call that a peer refused raises that, however late") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    whole_trip(buffer, shape_of(2, 9));  // makes the staging, for which all ranks must come together
    // Later low-latency calls take the slot; those of the other mode take the announcement's place.
    for (const std::uint64_t calls : {0, 2, 6, 20}) {
      for (const bool low : {true, false}) {
        Trip refused;
        if (bootstrap.rank == 0) {
          refused = start(buffer, shape_of(2, 1), false);
        } else {
          expect_throw<ArgumentTypeError>([&] { buffer.low_latency_dispatch({}); }, "topk_idx");
        }
        for (std::uint64_t i = 0; i < calls; ++i) {
          if (low)
            whole_trip(buffer, shape_of(2, 10 + i));
          else
            plain_dispatch(buffer, shape_of(2, 10 + i));
        }
        if (bootstrap.rank == 0) expect_throw<PeerRefusedError>([&] { refused.dispatched.hook(); }, "rank 1");
      }
    }
  }));
}

TEST_CASE("a hook runs once, in any thread, and not after destroy; a handle needs it") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    std::function<void()> left;
    {
      Buffer buffer(bootstrap, low_options());
      Trip trip = start(buffer, shape_of(2, 1), true);
      expect_throw<ArgumentError>(
          [&] {
            std::vector<char> y = trip.model->outputs(buffer.rank());
            buffer.low_latency_combine(trip.model->combine_args(buffer.rank(), y, trip.dispatched.handle.view()));
          },
          "hook of low_latency_dispatch");
      std::thread([&] { trip.dispatched.hook(); }).join();
      expect_throw<Error>([&] { trip.dispatched.hook(); }, "called before");
      turn(buffer, trip, false);
      check(buffer, trip);
      start(buffer, shape_of(2, 2), true);  // never called
      left = start(buffer, shape_of(2, 3), true).dispatched.hook;
      whole_trip(buffer, shape_of(2, 4));
    }
    expect_throw<DestroyedError>([&] { left(); }, "destroyed");
  }));
}

TEST_CASE("a refused call raises on every rank and the next one works, with hooks in flight or not") {
  for (const bool in_flight : {false, true}) {
    check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, low_options());
      const int rank = bootstrap.rank;
      for (std::uint64_t round = 0; round < 6; ++round) {
        Trip before;
        if (in_flight) before = start(buffer, shape_of(3, 50 + round), false);
        LowModel model(shape_of(3, 60 + round));
        LowLatencyDispatchArgs args = model.dispatch_args(rank, false);
        const bool hook = round % 2 == 1;
        args.return_recv_hook = hook;
        std::vector<std::int64_t> ids(4, 99);
        if (rank == 1) {
          args.topk_idx = TensorView::contiguous(ids.data(), DType::kInt64, {1, 4});
          args.x.data.shape[0] = 1;
          expect_throw<ArgumentError>([&] { buffer.low_latency_dispatch(args); }, "99");
        } else {
          expect_throw<PeerRefusedError>(
              [&] {
                const auto result = buffer.low_latency_dispatch(args);
                if (result.hook) result.hook();
              },
              "rank 1 refused");
        }
        if (in_flight) {
          before.dispatched.hook();
          turn(buffer, before, hook);
          if (hook) before.combined.hook();
          check(buffer, before);
        }
        whole_trip(buffer, shape_of(3, 70 + round));
      }
    }));
  }
}

TEST_CASE("more tokens than the cap: both numbers are named and no peer hangs") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    LowShape shape = shape_of(2, 1, 128);
    shape.num_tokens = {3, 129};
    LowModel model(shape);
    if (bootstrap.rank == 1) {
      const std::string text =
          expect_throw<ArgumentError>([&] { buffer.low_latency_dispatch(model.dispatch_args(1, false)); },
                                      "num_max_dispatch_tokens_per_rank: got 128");
      expect(text.find("129") != std::string::npos, text);
    } else {
      expect_throw<PeerRefusedError>([&] { buffer.low_latency_dispatch(model.dispatch_args(0, false)); }, "129");
    }
    whole_trip(buffer, shape_of(2, 2));
  }));
}

TEST_CASE("calls that differ raise on every rank, and the Buffer stays usable") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    const int rank = bootstrap.rank;
    for (std::uint64_t round = 0; round < 6; ++round) {
      // The cap, with and without room for both; a cast; weights; another mode.
      LowModel model(shape_of(2, 80 + round, rank == 0 && round < 2 ? 128 : 64));
      LowLatencyDispatchArgs args = model.dispatch_args(rank, rank == 0 && round == 3);
      args.use_fp8 = rank == 0 && round == 2;
      args.return_recv_hook = round % 2 == 1;
      const std::string text = expect_throw<CallMismatchError>(
          [&] {
            if (rank == 1 && round >= 4) {
              plain_dispatch(buffer, model.shape);
            } else {
              const auto result = buffer.low_latency_dispatch(args);
              if (result.hook) result.hook();
            }
          },
          "did not make the same call");
      if (round < 2) {
        expect(text.find("num_max_dispatch_tokens_per_rank=128") != std::string::npos, text);
        expect(text.find("num_max_dispatch_tokens_per_rank=64") != std::string::npos, text);
      }
      whole_trip(buffer, shape_of(2, 90 + round));
    }
  }));
}

TEST_CASE("a combine with another dispatch's handle, other ids or other weights is refused") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    const int rank = bootstrap.rank;
    LowShape shape = shape_of(2, 1);
    shape.num_tokens = {7, 7};
    Trip first = start(buffer, shape, true), second = start(buffer, shape, true);
    first.dispatched.hook();
    second.dispatched.hook();
    std::vector<char> y = first.model->outputs(rank);
    const Trip& chosen = rank == 0 ? first : second;
    const auto args = first.model->combine_args(rank, y, chosen.dispatched.handle.view());
    expect_throw<CallMismatchError>([&] { buffer.low_latency_combine(args); }, "handle #");

    const auto refused = [&](const LowLatencyCombineArgs& wrong, const char* what) {
      if (rank == 0)
        expect_throw<ArgumentError>([&] { buffer.low_latency_combine(wrong); }, what);
      else
        expect_throw<PeerRefusedError>([&] { buffer.low_latency_combine(args); }, what);
    };
    auto wrong = args;
    std::vector<std::int64_t> ids = first.model->inputs[rank].ids;
    ids[1] = ids[1] == 0 ? 1 : 0;
    wrong.topk_idx.data = ids.data();
    refused(wrong, "topk_idx");
    wrong = args;
    std::vector<float> weights = first.model->inputs[rank].weights;
    weights[2] += 1;
    wrong.topk_weights.data = weights.data();
    refused(wrong, "topk_weights");
    wrong = args;
    wrong.x.dtype = DType::kUInt8;
    if (rank == 0) {
      expect_throw<ArgumentTypeError>([&] { buffer.low_latency_combine(wrong); }, "bfloat16, float16 or float32");
    } else {
      expect_throw<PeerRefusedError>([&] { buffer.low_latency_combine(args); }, "bfloat16, float16 or float32");
    }
    turn(buffer, first, false);
    check(buffer, first);
  }));
}

TEST_CASE("the staging grows with the calls, also while one is in flight") {
  check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
    BufferOptions options = low_options();
    options.num_rdma_bytes = bootstrap.rank == 0 ? 1 << 16 : 1000;
    Buffer buffer(bootstrap, options);
    expect(buffer.memory_stats().ll_staging_bytes == 1 << 16, "the largest start that was asked for");
    Trip small = start(buffer, shape_of(3, 1, 4), false);
    Trip large = start(buffer, shape_of(3, 2, 60, 512), false);
    Trip larger = start(buffer, shape_of(3, 3, 100, 1024), true);
    for (Trip* trip : {&large, &small, &larger}) {
      trip->dispatched.hook();
      turn(buffer, *trip, true);
    }
    for (Trip* trip : {&small, &larger, &large}) {
      trip->combined.hook();
      check(buffer, *trip);
    }
    const std::int64_t grown = buffer.memory_stats().ll_staging_bytes;
    whole_trip(buffer, shape_of(3, 4, 100, 1024));
    expect(buffer.memory_stats().ll_staging_bytes == grown, "what is large enough is kept");
  }));
}

TEST_CASE("the size hint is enough") {
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    BufferOptions options = low_options();
    const LowShape shape = shape_of(2, 1, 40, 512);
    options.num_rdma_bytes = static_cast<std::int64_t>(low_latency_size_hint(40, 512, 2, shape.num_experts));
    Buffer buffer(bootstrap, options);
    Trip trip = start(buffer, shape, false);
    trip.dispatched.hook();
    turn(buffer, trip, true);
    trip.combined.hook();
    expect(buffer.memory_stats().ll_staging_bytes == options.num_rdma_bytes, "no growth");
  }));
}

TEST_CASE("staging that cannot be had is an error on every rank that names the bytes") {
  ::setenv("DEEP_MOE_MAX_HEAP_BYTES", "4000000", 1);
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    for (int round = 0; round < 3; ++round) {
      const std::string text = expect_throw<BufferTooSmallError>(
          [&] { start(buffer, shape_of(2, 1, 2000, 1024), false); }, "bytes of low-latency staging needed");
      expect(text.find("DEEP_MOE_MAX_HEAP_BYTES") != std::string::npos, text);
      whole_trip(buffer, shape_of(2, 2));
    }
  }));
  ::unsetenv("DEEP_MOE_MAX_HEAP_BYTES");
}

TEST_CASE("a silent rank is masked, what it owed is left out, and it can come back") {
  std::atomic<int> waiting{0};
  check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options(0.3, true));
    const int rank = bootstrap.rank;
    const LowShape shape = shape_of(3, 7);
    Trip trip = start(buffer, shape, false);  // with all ranks
    trip.dispatched.hook();
    for (int form = 0; form < 4 && rank != 2; ++form) {
      // The first of these calls finds rank 2 silent: it had sent rows to it.
      LowModel model(shape);
      LowLatencyDispatchArgs args = model.dispatch_args(rank, form % 2 == 1);
      args.return_recv_hook = form >= 2;
      const auto dispatched = buffer.low_latency_dispatch(args);
      if (dispatched.hook) dispatched.hook();
      model.check_plain_rows(rank, dispatched, {2});
      std::int32_t status[3];
      buffer.query_mask(status);
      expect(status[0] == 0 && status[1] == 0 && status[2] == 1, "rank 2 is masked");
      std::vector<char> y = model.outputs(rank, {2});
      LowLatencyCombineArgs back = model.combine_args(rank, y, dispatched.handle.view());
      back.return_recv_hook = form >= 2;
      const auto combined = buffer.low_latency_combine(back);
      if (combined.hook) combined.hook();
      model.check_combined(rank, combined.combined_x.view, form != 2, false, {2});
    }
    ++waiting;
    while (waiting < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank == 2) {
      buffer.update_mask(0, true);
      buffer.update_mask(1, true);
    }
    buffer.clean_mask();
    std::int32_t status[3];
    buffer.query_mask(status);
    expect(status[0] + status[1] + status[2] == 0, "nobody is masked");
    for (std::uint64_t i = 0; i < 5; ++i) whole_trip(buffer, shape_of(3, 40 + i));
  }));
}

TEST_CASE("a late rank is named, and after a reset the calls work again; old hooks do not") {
  std::atomic<bool> gave_up{false};
  check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options(0.5));
    const int rank = bootstrap.rank;
    whole_trip(buffer, shape_of(2, 1));
    Trip old = start(buffer, shape_of(2, 2), false);
    LowModel model(shape_of(2, 3));
    if (rank == 0) {
      const std::string text =
          expect_throw<TimeoutError>([&] { buffer.low_latency_dispatch(model.dispatch_args(0, false)); }, "rank 1");
      expect(text.find("low_latency_dispatch/receive") != std::string::npos, text);
      expect_throw<TimeoutError>([&] { buffer.check(); }, "rank 1");
      gave_up = true;
    } else {
      while (!gave_up) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      buffer.low_latency_dispatch(model.dispatch_args(1, false));  // whose rows were sent in time
      expect_throw<TimeoutError>([&] { buffer.low_latency_dispatch(model.dispatch_args(1, false)); }, "rank 0 gave up");
    }
    buffer.reset();
    expect_throw<Error>([&] { old.dispatched.hook(); }, "reset");
    for (std::uint64_t i = 0; i < 5; ++i) whole_trip(buffer, shape_of(2, 10 + i));
  }));
}

TEST_CASE("long programs of calls with hooks at different moments on different ranks") {
  const int num_ranks = 4;
  check_all(run_threads(num_ranks, [&](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, low_options());
    Random together(4), alone(100 + static_cast<std::uint64_t>(bootstrap.rank));
    std::vector<Trip> waiting;  // whose dispatch or combine is in flight
    std::vector<bool> turned;
    const auto advance = [&](std::size_t i) {
      if (turned[i]) {
        waiting[i].combined.hook();
        check(buffer, waiting[i]);
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
        turned.erase(turned.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        waiting[i].dispatched.hook();
        turn(buffer, waiting[i], true);
        turned[i] = true;
      }
    };
    for (std::uint64_t step = 0; step < 60; ++step) {
      if (alone.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(alone.below(300)));
      if (waiting.size() < 2 && together.below(3) > 0) {
        waiting.push_back(start(buffer, shape_of(num_ranks, 200 + step), together.below(2) == 0));
        turned.push_back(false);
      } else if (!waiting.empty()) {
        advance(static_cast<std::size_t>(together.below(static_cast<std::int64_t>(waiting.size()))));
      } else {
        whole_trip(buffer, shape_of(num_ranks, 200 + step));
      }
    }
    while (!waiting.empty()) advance(0);
  }));
}
