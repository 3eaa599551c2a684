// Calls that users get wrong in ways that used to go unnoticed elsewhere: each is an error, and the Buffer goes on.
#include <doctest/doctest.h>

#include <limits>

#include "high_throughput_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

const Shape kShape{2, {24, 24}, 64, 8, 2};

BufferOptions with_timeout(double seconds) {
  BufferOptions options;
  options.timeout_seconds = seconds;
  return options;
}

// A dispatch and what keeps its inputs alive.
struct Sent {
  Input input;
  Uploaded uploaded;
  DispatchResult result;
  Sent(Buffer& buffer, std::uint64_t step)
      : input(make_input(kShape, buffer.rank(), step)),
        uploaded(upload(buffer, {}, input, kShape)),
        result(buffer.dispatch(dispatch_args(uploaded, kShape))) {}
  CombineArgs combine_args() const {
    CombineArgs args;
    args.x = result.recv_x.data.view;
    args.handle = result.handle.view();
    return args;
  }
};

}  // namespace

TEST_CASE("high-throughput calls refuse to run while a rank is masked") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    BufferOptions options = with_timeout(5);
    options.enable_shrink = true;
    Buffer buffer(bootstrap, options);
    round_trip(buffer, kShape, 1, -1, {});
    if (buffer.rank() == 0) {
      buffer.update_mask(1, true);
      expect_throw<Error>([&] { Sent(buffer, 1); }, "dispatch: some rank is masked");
    } else {
      expect_throw<PeerRefusedError>([&] { Sent(buffer, 1); }, "some rank is masked");
    }
    buffer.clean_mask();
    round_trip(buffer, kShape, 2, -1, {});
  }));
}

TEST_CASE("a reset that nobody joined leaves nothing behind for the next one") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(0.4));
    Sent(buffer, 1);
    if (buffer.rank() == 0) expect_throw<TimeoutError>([&] { buffer.reset(); }, "rank 1 in reset");
    meet(bootstrap);
    Sent(buffer, 2);
    meet(bootstrap);
    if (buffer.rank() == 0) expect_throw<TimeoutError>([&] { Sent(buffer, 3); }, "rank 1");
    meet(bootstrap);
    if (buffer.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    buffer.reset();
    for (std::uint64_t step = 0; step < 5; ++step) round_trip(buffer, kShape, step, -1, {});
    buffer.reset();
    round_trip(buffer, kShape, 9, -1, {});
  }));
}

TEST_CASE("a handler that runs inside a wait may look at the Buffer and destroy it") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    std::unique_ptr<Buffer> buffer;
    BufferOptions options = with_timeout(30);
    bool looked = false;
    options.interrupt_check = [&] {
      if (!buffer || looked) return;
      looked = true;
      buffer->memory_stats();
      buffer->check();
      buffer->empty(DType::kInt8, {100});
      expect_throw<Error>([&] { buffer->reset(); }, "under way on this very thread");
      buffer->destroy();
    };
    buffer = std::make_unique<Buffer>(bootstrap, options);
    Sent(*buffer, 1);
    if (bootstrap.rank == 0) {
      expect_throw<DestroyedError>([&] { Sent(*buffer, 2); }, "destroyed during a call");
      expect_throw<DestroyedError>([&] { buffer->memory_stats(); }, "destroyed");
    }
    meet(bootstrap);
  }));
}

TEST_CASE("destroy() from another thread ends a wait") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(30));
    Sent(buffer, 1);
    if (bootstrap.rank == 0) {
      std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        buffer.destroy();
      });
      expect_throw<DestroyedError>([&] { Sent(buffer, 2); }, "destroyed");
      other.join();
    }
    meet(bootstrap);
  }));
}

TEST_CASE("an output that overlaps what is read, or itself, is refused") {
  check_all(run_threads(1, [](const Bootstrap& bootstrap) {
    const Shape shape{1, {24}, 64, 8, 2};
    Buffer buffer(bootstrap, with_timeout(5));
    Input input = make_input(shape, 0, 1);
    const Uploaded uploaded = upload(buffer, {}, input, shape);
    const DispatchResult sent = buffer.dispatch(dispatch_args(uploaded, shape));
    CombineArgs args;
    args.x = sent.recv_x.data.view;
    args.handle = sent.handle.view();
    Tensor wide = make_host_tensor(DType::kBFloat16, {25, 128});
    const auto columns = [&](std::int64_t first, std::int64_t row) {
      TensorView view = wide.view;
      view.data = wide.as<std::uint16_t>() + row * 128 + first;
      view.shape[0] = 24;
      view.shape[1] = 64;
      return view;
    };
    args.out = columns(0, 0);
    args.bias0 = columns(64, 0);
    buffer.combine(args);  // the other half of the same matrix
    args.bias0 = args.out;
    buffer.combine(args);  // in place
    args.bias0 = columns(0, 1);
    expect_throw<ArgumentError>([&] { buffer.combine(args); }, "out: got a tensor that overlaps bias");
    args.bias0 = {};
    args.out.stride[0] = 0;
    expect_throw<ArgumentError>([&] { buffer.combine(args); }, "out: got rows 0 elements apart");
    const TensorView rows = sent.recv_x.data.view;
    if (rows.shape[0] >= 24) {
      args.out = rows;
      args.out.shape[0] = 24;
      expect_throw<ArgumentError>([&] { buffer.combine(args); }, "out: got a tensor that overlaps x");
    }
  }));
}

TEST_CASE("handles of different dispatches with equal counts are told apart") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(5));
    const Sent first(buffer, 1), second(buffer, 1);
    expect_throw<CallMismatchError>([&] { buffer.combine((buffer.rank() == 0 ? first : second).combine_args()); },
                                    "handle #");
    buffer.combine(first.combine_args());
    buffer.combine(second.combine_args());
  }));
}

TEST_CASE("numbers beyond reason are refused or mean for ever") {
  for (const double seconds : {1e9, 9.3e9, 1e18, 1e300}) {
    check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, with_timeout(seconds));
      if (buffer.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
      Sent(buffer, 1);
    }));
  }
  check_all(run_threads(1, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(5));
    const std::int64_t large = std::int64_t{1} << 33;
    expect_throw<ArgumentError>([&] { buffer.empty(DType::kInt8, {large, large}); }, "shape: got more elements");
    expect_throw<ArgumentError>([&] { buffer.empty(DType::kFloat64, {std::int64_t{1} << 62}); }, "shape");
    BufferOptions options = with_timeout(5);
    options.num_nvl_bytes = std::int64_t{1} << 50;
    const auto bootstraps = make_thread_bootstraps(1);
    expect_throw<BufferTooSmallError>([&] { Buffer(bootstraps[0], options); }, "are available on this machine");
    Input input = make_input(Shape{1, {24}, 64, 8, 2}, 0, 1);
    const Shape shape{1, {24}, 64, 8, 2};
    const Uploaded uploaded = upload(buffer, {}, input, shape);
    DispatchArgs args = dispatch_args(uploaded, shape);
    args.num_worst_tokens = std::int64_t{1} << 54;
    expect_throw<ArgumentError>([&] { buffer.dispatch(args); }, "num_worst_tokens");
    args.num_worst_tokens = 0;
    args.expert_alignment = std::numeric_limits<std::int64_t>::max();
    expect_throw<ArgumentError>([&] { buffer.dispatch(args); }, "expert_alignment");
    args.expert_alignment = 1;
    args.topk_idx.shape[0] = args.topk_weights.shape[0] = args.x.data.shape[0] = large;
    expect_throw<ArgumentError>([&] { buffer.dispatch(args); }, "topk_idx: got 8589934592 tokens");
    expect_throw<ArgumentError>([&] { buffer.get_dispatch_layout(args.topk_idx, 8, {}); }, "tokens");
  }));
  ::setenv("DEEP_MOE_MAX_HEAP_BYTES", "1e30", 1);
  check_all(run_threads(1, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(5));
    buffer.empty(DType::kInt8, {1000});
  }));
  ::unsetenv("DEEP_MOE_MAX_HEAP_BYTES");
}
