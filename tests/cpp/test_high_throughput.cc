// Dispatch and combine against a scalar model, as threads and as processes.
#include <doctest/doctest.h>

#include <algorithm>

#include "layout/experts.hpp"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

struct Shape {
  int num_ranks;
  std::vector<std::int64_t> num_tokens;
  std::int64_t hidden, num_experts, topk;
};

// One rank's input of one step; every rank can make every other's.
struct Input {
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  std::int64_t num_tokens;
};

Input make_input(const Shape& shape, int rank, std::uint64_t step, int max_tokens = -1) {
  Random random(step * 1000 + static_cast<std::uint64_t>(rank) + 17);
  Input input;
  input.num_tokens = max_tokens < 0 ? shape.num_tokens[rank] : random.below(max_tokens + 1);
  for (std::int64_t i = 0; i < input.num_tokens * shape.hidden; ++i) input.x.push_back(to_bf16(random.uniform()));
  for (std::int64_t i = 0; i < input.num_tokens * shape.topk; ++i) {
    input.ids.push_back(random.below(8) == 0 ? -1 : random.below(shape.num_experts));
    input.weights.push_back(random.uniform());
  }
  return input;
}

bool goes_to(const Shape& shape, const Input& input, std::int64_t token, int rank) {
  const layout::ExpertBlocks blocks(static_cast<int>(shape.num_experts), shape.num_ranks);
  for (std::int64_t k = 0; k < shape.topk; ++k) {
    const std::int64_t id = input.ids[token * shape.topk + k];
    if (id >= 0 && blocks.rank_of(static_cast<int>(id)) == rank) return true;
  }
  return false;
}

TensorView x_view(Input& input, const Shape& shape) {
  return TensorView::contiguous(input.x.data(), DType::kBFloat16, {input.num_tokens, shape.hidden});
}

DispatchArgs dispatch_args(Input& input, const Shape& shape) {
  DispatchArgs args;
  args.x.data = x_view(input, shape);
  args.topk_idx = TensorView::contiguous(input.ids.data(), DType::kInt64, {input.num_tokens, shape.topk});
  args.topk_weights = TensorView::contiguous(input.weights.data(), DType::kFloat32, {input.num_tokens, shape.topk});
  args.num_experts = shape.num_experts;
  return args;
}

// Checks rows, ids, weights and counts; returns the number of received rows.
std::int64_t check_received(const Shape& shape, std::vector<Input>& inputs, int rank, const DispatchResult& result) {
  const layout::ExpertBlocks blocks(static_cast<int>(shape.num_experts), shape.num_ranks);
  const int first = blocks.first_expert(rank), num_local = blocks.num_local_experts(rank);
  std::int64_t row = 0;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_local), 0);
  for (int src = 0; src < shape.num_ranks; ++src) {
    Input& input = inputs[static_cast<std::size_t>(src)];
    for (std::int64_t token = 0; token < input.num_tokens; ++token) {
      if (!goes_to(shape, input, token, rank)) continue;
      expect(row < result.recv_x.data.view.shape[0], "enough rows");
      expect(std::memcmp(result.recv_x.data.as<std::uint16_t>() + row * shape.hidden,
                         input.x.data() + token * shape.hidden, static_cast<std::size_t>(shape.hidden * 2)) == 0,
             "row " + std::to_string(row));
      expect(result.handle.recv_src_idx.as<std::int32_t>()[row] == token, "source token");
      for (std::int64_t k = 0; k < shape.topk; ++k) {
        std::int64_t local = input.ids[token * shape.topk + k] - first;
        if (local < 0 || local >= num_local) local = -1;
        if (local >= 0) ++counts[static_cast<std::size_t>(local)];
        expect(result.recv_topk_idx.as<std::int64_t>()[row * shape.topk + k] == local, "local id");
        expect(result.recv_topk_weights.as<float>()[row * shape.topk + k] ==
                   (local >= 0 ? input.weights[token * shape.topk + k] : 0.0f),
               "weight");
      }
      ++row;
    }
  }
  if (!result.num_recv_tokens_per_expert.empty()) expect(result.num_recv_tokens_per_expert == counts, "expert counts");
  return row;
}

// combine of what dispatch gave, times (rank + 1) so that ranks differ.
void check_combine(Buffer& buffer, const Shape& shape, Input& input, const DispatchResult& result, bool in_heap,
                   bool with_extras) {
  const std::int64_t rows = result.recv_x.data.view.shape[0];
  Tensor y = in_heap ? buffer.empty(DType::kBFloat16, {rows, shape.hidden})
                     : make_host_tensor(DType::kBFloat16, {rows, shape.hidden});
  for (std::int64_t i = 0; i < rows * shape.hidden; ++i)
    y.as<std::uint16_t>()[i] =
        to_bf16(from_bf16(result.recv_x.data.as<std::uint16_t>()[i]) * static_cast<float>(buffer.rank() + 1));
  CombineArgs args;
  args.x = y.view;
  args.handle = result.handle.view();
  if (with_extras) {
    args.topk_weights = result.recv_topk_weights.view;
    args.bias0 = x_view(input, shape);
  }
  const CombineResult combined = buffer.combine(args);
  for (std::int64_t token = 0; token < input.num_tokens; ++token) {
    for (std::int64_t h = 0; h < shape.hidden; ++h) {
      const float x = from_bf16(input.x[token * shape.hidden + h]);
      float sum = with_extras ? x : 0.0f;
      for (int rank = 0; rank < shape.num_ranks; ++rank) {
        if (goes_to(shape, input, token, rank)) sum += from_bf16(to_bf16(x * static_cast<float>(rank + 1)));
      }
      expect(combined.combined_x.as<std::uint16_t>()[token * shape.hidden + h] == to_bf16(sum), "combined value");
    }
    for (std::int64_t k = 0; with_extras && k < shape.topk; ++k) {
      const std::int64_t at = token * shape.topk + k;
      expect(combined.combined_topk_weights.as<float>()[at] == (input.ids[at] >= 0 ? input.weights[at] : 0.0f),
             "combined weight");
    }
  }
}

void round_trips(const Bootstrap& bootstrap, const Shape& shape, int steps, int max_tokens,
                 BufferOptions options = {}) {
  options.timeout_seconds = 30;
  Buffer buffer(bootstrap, options);
  for (int step = 0; step < steps; ++step) {
    std::vector<Input> inputs;
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      inputs.push_back(make_input(shape, rank, static_cast<std::uint64_t>(step), max_tokens));
    Input& mine = inputs[static_cast<std::size_t>(buffer.rank())];
    DispatchArgs args = dispatch_args(mine, shape);
    DispatchResult result = buffer.dispatch(args);
    const std::int64_t rows = check_received(shape, inputs, buffer.rank(), result);
    expect(rows == result.recv_x.data.view.shape[0], "number of rows");
    check_combine(buffer, shape, mine, result, step % 2 == 0, step % 3 != 0);
    // cached
    DispatchArgs again;
    again.x.data = x_view(mine, shape);
    const DispatchHandle handle = result.handle.view();
    again.handle = &handle;
    const DispatchResult cached = buffer.dispatch(again);
    expect(std::memcmp(cached.recv_x.data.view.data, result.recv_x.data.view.data,
                       result.recv_x.data.view.num_bytes()) == 0,
           "cached rows");
    // no more rows than a number that is known
    args.num_worst_tokens = 0;
    for (const Input& input : inputs) args.num_worst_tokens += input.num_tokens;
    args.num_worst_tokens += 3;
    const DispatchResult worst = buffer.dispatch(args);
    expect(check_received(shape, inputs, buffer.rank(), worst) == rows, "rows with num_worst_tokens");
    for (std::int64_t row = rows; row < args.num_worst_tokens; ++row)
      expect(worst.recv_topk_idx.as<std::int64_t>()[row * shape.topk] == -1, "tail");
    check_combine(buffer, shape, mine, worst, true, true);
  }
}

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
        const DispatchResult result = buffer.dispatch(dispatch_args(mine, shape));
        expect(check_received(shape, inputs, buffer.rank(), result) == result.recv_x.data.view.shape[0], "rows");
        check_combine(buffer, shape, mine, result, false, step != 1);
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
        kept.push_back(buffer.dispatch(dispatch_args(inputs[static_cast<std::size_t>(bootstrap.rank)], shape)));
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
