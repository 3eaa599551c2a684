// Dispatch and combine against a scalar model, as threads and as processes.
#include <doctest/doctest.h>

#include "high_throughput_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

const Shape kShapes[] = {
    {1, {5}, 64, 4, 2},         {2, {16, 0}, 512, 16, 4},          {2, {0, 0}, 512, 16, 4},
    {3, {7, 33, 1}, 72, 10, 3}, {4, {100, 65, 63, 5}, 256, 30, 8}, {5, {3, 0, 9, 2, 4}, 8, 9, 2},
};

}  // namespace

TEST_CASE("dispatch and combine equal the scalar model") {
  for (const Form form : {Form::kThreads, Form::kProcesses}) {
    for (const Shape& shape : kShapes) {
      CAPTURE(shape.num_ranks);
      check_all(
          run_ranks(form, shape.num_ranks, [&](const Bootstrap& bootstrap) { round_trips(bootstrap, shape, 3, -1); }));
    }
  }
}

TEST_CASE("many calls with changing sizes grow the heap as needed") {
  for (const Form form : {Form::kThreads, Form::kProcesses}) {
    const Shape shape{3, {}, 1024, 24, 4};
    check_all(run_ranks(form, 3, [&](const Bootstrap& bootstrap) { round_trips(bootstrap, shape, 12, 700); }));
  }
}

TEST_CASE("a heap that cannot grow is filled in waves") {
  ::setenv("DEEP_MOE_MAX_HEAP_BYTES", "200000", 1);
  for (const Form form : {Form::kThreads, Form::kProcesses}) {
    const Shape shape{3, {150, 90, 200}, 512, 24, 4};
    check_all(run_ranks(form, 3, [&](const Bootstrap& bootstrap) {
      BufferOptions options;
      options.timeout_seconds = 30;
      Buffer buffer(bootstrap, options);
      std::vector<Input> inputs;
      for (int rank = 0; rank < 3; ++rank) inputs.push_back(make_input(shape, rank, 5));
      Input& mine = inputs[static_cast<std::size_t>(buffer.rank())];
      for (int step = 0; step < 3; ++step) {
        const Uploaded uploaded = upload(buffer, {}, mine, shape);
        const DispatchResult result = buffer.dispatch(dispatch_args(uploaded, shape));
        expect(check_received(shape, inputs, buffer.rank(), result) == result.recv_x.data.view.shape[0], "rows");
        check_combine(buffer, shape, mine, uploaded, result, {}, false, step != 1);
      }
    }));
  }
  ::unsetenv("DEEP_MOE_MAX_HEAP_BYTES");
}

TEST_CASE("tensors outlive the Buffer and are freed in any order") {
  check_all(run_ranks(Form::kThreads, 2, [&](const Bootstrap& bootstrap) {
    const Shape shape{2, {40, 50}, 128, 8, 2};
    std::vector<Input> inputs = {make_input(shape, 0, 1), make_input(shape, 1, 1)};
    std::vector<DispatchResult> kept;
    {
      Buffer buffer(bootstrap, BufferOptions{});
      for (int i = 0; i < 50; ++i) {
        kept.push_back(buffer.dispatch(
            dispatch_args(upload(buffer, {}, inputs[static_cast<std::size_t>(bootstrap.rank)], shape), shape)));
        if (i % 3 == 2) kept.erase(kept.begin() + i / 3);
      }
      expect(buffer.memory_stats().live_blocks > 0, "live blocks are reported");
      buffer.destroy();
      buffer.destroy();
      expect_throw<DestroyedError>([&] { buffer.memory_stats(); }, "destroyed");
    }
    for (const DispatchResult& result : kept) check_received(shape, inputs, bootstrap.rank, result);
  }));
}
