// A scalar model of dispatch and combine, for Buffers on any device.
#pragma once

#include <algorithm>
#include <functional>

#include "layout/experts.hpp"
#include "support.hpp"

namespace deep_moe::test {

struct Shape {
  int num_ranks;
  std::vector<std::int64_t> num_tokens;
  std::int64_t hidden, num_experts, topk;
  int num_local_ranks = 0;  // of a node; 0: all ranks are on one

  int node_of(int rank) const { return num_local_ranks > 0 ? rank / num_local_ranks : 0; }
};

// One rank's input of one step; every rank can make every other's.
struct Input {
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
  std::int64_t num_tokens;
};

inline Input make_input(const Shape& shape, int rank, std::uint64_t step, int max_tokens = -1) {
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

inline bool goes_to(const Shape& shape, const Input& input, std::int64_t token, int rank) {
  const layout::ExpertBlocks blocks(static_cast<int>(shape.num_experts), shape.num_ranks);
  for (std::int64_t k = 0; k < shape.topk; ++k) {
    const std::int64_t id = input.ids[token * shape.topk + k];
    if (id >= 0 && blocks.rank_of(static_cast<int>(id)) == rank) return true;
  }
  return false;
}

// Where the tensors of a test are: with the default, in ordinary memory.
struct Memory {
  // A tensor like the host's `view`, on the Buffer's device; `view` stays alive as long as the result is used.
  std::function<Tensor(Buffer&, const TensorView& view)> upload = [](Buffer&, const TensorView& view) {
    return Tensor{view, nullptr};
  };
  // The same in the Buffer's heap.
  std::function<Tensor(Buffer&, const TensorView& view)> upload_into_heap = [](Buffer& buffer, const TensorView& view) {
    Tensor tensor = buffer.empty(view.dtype, {view.shape[0], view.shape[1]});
    if (view.numel() > 0) std::memcpy(tensor.view.data, view.data, view.num_bytes());
    return tensor;
  };
  // A tensor that the host can read.
  std::function<Tensor(const Tensor&)> download = [](const Tensor& tensor) { return tensor; };
  // Before each call, once this rank's tensors are there.
  std::function<void()> meet = [] {};
};

inline TensorView x_view(Input& input, const Shape& shape) {
  return TensorView::contiguous(input.x.data(), DType::kBFloat16, {input.num_tokens, shape.hidden});
}

struct Uploaded {
  Tensor x, ids, weights;
};

inline Uploaded upload(Buffer& buffer, const Memory& memory, Input& input, const Shape& shape) {
  const auto view = [&](void* data, DType dtype, std::int64_t columns) {
    return TensorView::contiguous(data, dtype, {input.num_tokens, columns});
  };
  return {memory.upload(buffer, x_view(input, shape)),
          memory.upload(buffer, view(input.ids.data(), DType::kInt64, shape.topk)),
          memory.upload(buffer, view(input.weights.data(), DType::kFloat32, shape.topk))};
}

inline DispatchArgs dispatch_args(const Uploaded& uploaded, const Shape& shape) {
  DispatchArgs args;
  args.x.data = uploaded.x.view;
  args.topk_idx = uploaded.ids.view;
  args.topk_weights = uploaded.weights.view;
  args.num_experts = shape.num_experts;
  return args;
}

// Checks rows, ids, weights and counts; returns the number of received rows.
inline std::int64_t check_received(const Shape& shape, std::vector<Input>& inputs, int rank,
                                   const DispatchResult& result, const Memory& memory = {}) {
  const Tensor recv_x = memory.download(result.recv_x.data), recv_ids = memory.download(result.recv_topk_idx);
  const Tensor recv_weights = memory.download(result.recv_topk_weights);
  const Tensor src_idx = memory.download(result.handle.recv_src_idx);
  const layout::ExpertBlocks blocks(static_cast<int>(shape.num_experts), shape.num_ranks);
  const int first = blocks.first_expert(rank), num_local = blocks.num_local_experts(rank);
  std::int64_t row = 0;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_local), 0);
  for (int src = 0; src < shape.num_ranks; ++src) {
    Input& input = inputs[static_cast<std::size_t>(src)];
    for (std::int64_t token = 0; token < input.num_tokens; ++token) {
      if (!goes_to(shape, input, token, rank)) continue;
      expect(row < result.recv_x.data.view.shape[0], "enough rows");
      expect(std::memcmp(recv_x.as<std::uint16_t>() + row * shape.hidden, input.x.data() + token * shape.hidden,
                         static_cast<std::size_t>(shape.hidden * 2)) == 0,
             "row " + std::to_string(row));
      expect(src_idx.as<std::int32_t>()[row] == token, "source token");
      for (std::int64_t k = 0; k < shape.topk; ++k) {
        std::int64_t local = input.ids[token * shape.topk + k] - first;
        if (local < 0 || local >= num_local) local = -1;
        if (local >= 0) ++counts[static_cast<std::size_t>(local)];
        expect(recv_ids.as<std::int64_t>()[row * shape.topk + k] == local, "local id");
        expect(recv_weights.as<float>()[row * shape.topk + k] ==
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
inline void check_combine(Buffer& buffer, const Shape& shape, Input& input, const Uploaded& uploaded,
                          const DispatchResult& result, const Memory& memory, bool in_heap, bool with_extras) {
  const std::int64_t rows = result.recv_x.data.view.shape[0];
  const Tensor recv_x = memory.download(result.recv_x.data);
  const Tensor scaled = make_host_tensor(DType::kBFloat16, {rows, shape.hidden});
  for (std::int64_t i = 0; i < rows * shape.hidden; ++i)
    scaled.as<std::uint16_t>()[i] =
        to_bf16(from_bf16(recv_x.as<std::uint16_t>()[i]) * static_cast<float>(buffer.rank() + 1));
  const Tensor y = in_heap ? memory.upload_into_heap(buffer, scaled.view) : memory.upload(buffer, scaled.view);
  CombineArgs args;
  args.x = y.view;
  args.handle = result.handle.view();
  if (with_extras) {
    args.topk_weights = result.recv_topk_weights.view;
    args.bias0 = uploaded.x.view;
  }
  memory.meet();
  const CombineResult combined = buffer.combine(args);
  const Tensor sums = memory.download(combined.combined_x), weights = memory.download(combined.combined_topk_weights);
  for (std::int64_t token = 0; token < input.num_tokens; ++token) {
    for (std::int64_t h = 0; h < shape.hidden; ++h) {
      const float x = from_bf16(input.x[token * shape.hidden + h]);
      float sum = with_extras ? x : 0.0f;
      float part = 0.0f;  // of another node
      for (int rank = 0; rank < shape.num_ranks; ++rank) {
        const bool own = shape.node_of(rank) == shape.node_of(buffer.rank());
        if (goes_to(shape, input, token, rank))
          (own ? sum : part) += from_bf16(to_bf16(x * static_cast<float>(rank + 1)));
        const bool last = rank + 1 == shape.num_ranks || shape.node_of(rank + 1) != shape.node_of(rank);
        if (own || !last) continue;
        sum += from_bf16(to_bf16(part));
        part = 0.0f;
      }
      expect(sums.as<std::uint16_t>()[token * shape.hidden + h] == to_bf16(sum), "combined value");
    }
    for (std::int64_t k = 0; with_extras && k < shape.topk; ++k) {
      const std::int64_t at = token * shape.topk + k;
      expect(weights.as<float>()[at] == (input.ids[at] >= 0 ? input.weights[at] : 0.0f), "combined weight");
    }
  }
}

inline void round_trip(Buffer& buffer, const Shape& shape, std::uint64_t step, int max_tokens, const Memory& memory) {
  std::vector<Input> inputs;
  for (int rank = 0; rank < shape.num_ranks; ++rank) inputs.push_back(make_input(shape, rank, step, max_tokens));
  Input& mine = inputs[static_cast<std::size_t>(buffer.rank())];
  const Uploaded uploaded = upload(buffer, memory, mine, shape);
  DispatchArgs args = dispatch_args(uploaded, shape);
  memory.meet();
  const DispatchResult result = buffer.dispatch(args);
  const std::int64_t rows = check_received(shape, inputs, buffer.rank(), result, memory);
  expect(rows == result.recv_x.data.view.shape[0], "number of rows");
  check_combine(buffer, shape, mine, uploaded, result, memory, step % 2 == 0, step % 3 != 0);
  // cached
  DispatchArgs again;
  again.x.data = uploaded.x.view;
  const DispatchHandle handle = result.handle.view();
  again.handle = &handle;
  memory.meet();
  const DispatchResult cached = buffer.dispatch(again);
  memory.download(cached.recv_x.data);
  buffer.check();
  expect(std::memcmp(memory.download(cached.recv_x.data).view.data, memory.download(result.recv_x.data).view.data,
                     result.recv_x.data.view.num_bytes()) == 0,
         "cached rows");
  // no more rows than a number that is known
  for (const Input& input : inputs) args.num_worst_tokens += input.num_tokens;
  args.num_worst_tokens += 3;
  memory.meet();
  const DispatchResult worst = buffer.dispatch(args);
  expect(check_received(shape, inputs, buffer.rank(), worst, memory) == rows, "rows with num_worst_tokens");
  const Tensor worst_ids = memory.download(worst.recv_topk_idx);
  for (std::int64_t row = rows; row < args.num_worst_tokens; ++row)
    expect(worst_ids.as<std::int64_t>()[row * shape.topk] == -1, "tail");
  check_combine(buffer, shape, mine, uploaded, worst, memory, true, true);
}

inline void round_trips(const Bootstrap& bootstrap, const Shape& shape, int steps, int max_tokens,
                        BufferOptions options = {}, const Memory& memory = {}) {
  if (options.device == kCpuDevice) options.timeout_seconds = 30;
  Buffer buffer(bootstrap, options);
  for (int step = 0; step < steps; ++step)
    round_trip(buffer, shape, static_cast<std::uint64_t>(step), max_tokens, memory);
}

}  // namespace deep_moe::test
