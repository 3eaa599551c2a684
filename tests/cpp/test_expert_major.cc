// Expert-major dispatch and combine against plain ones whose rows are regrouped and summed here.
#include <doctest/doctest.h>

#include "high_throughput_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

const Shape kShapes[] = {
    {1, {50}, 64, 4, 2},         {2, {16, 0}, 512, 16, 4},      {2, {0, 0}, 512, 16, 4},
    {3, {77, 33, 1}, 72, 10, 3}, {5, {3, 0, 9, 2, 4}, 8, 3, 2}, {4, {40, 65, 3, 5}, 64, 12, 5, 2},
};

void round_trip(const Bootstrap& bootstrap, const Shape& shape, std::int64_t alignment) {
  Buffer buffer(bootstrap, BufferOptions{});
  Input input = make_input(shape, buffer.rank(), 3);
  const Uploaded uploaded = upload(buffer, {}, input, shape);
  DispatchArgs args = dispatch_args(uploaded, shape);
  args.expert_alignment = alignment;
  const DispatchResult plain = buffer.dispatch(args);
  args.expert_major = true;
  const DispatchResult grouped = buffer.dispatch(args);

  const TensorView& rows = grouped.handle.expert_rows.view;
  const std::int64_t num_rows = grouped.recv_x.data.view.shape[0], hidden = shape.hidden;
  std::int64_t sum_of_sizes = 0;
  for (const std::int64_t size : grouped.num_recv_tokens_per_expert) sum_of_sizes += size;
  expect(sum_of_sizes == num_rows && rows.shape[0] == plain.recv_x.data.view.shape[0], "sizes");
  expect(grouped.num_recv_tokens_per_expert == plain.num_recv_tokens_per_expert, "sizes are the plain counts");

  std::vector<bool> is_row(static_cast<std::size_t>(num_rows), false);
  std::vector<std::uint16_t> sums;
  std::vector<std::int32_t> next(
      grouped.handle.expert_offsets.as<std::int32_t>(),
      grouped.handle.expert_offsets.as<std::int32_t>() + grouped.num_recv_tokens_per_expert.size());
  for (std::int64_t received = 0; received < rows.shape[0]; ++received) {
    const std::uint16_t* x = plain.recv_x.data.as<std::uint16_t>() + received * hidden;
    std::vector<float> total(static_cast<std::size_t>(hidden), 0.0f);
    for (std::int64_t at = received * shape.topk; at < (received + 1) * shape.topk; ++at) {
      const std::int64_t expert = plain.recv_topk_idx.as<std::int64_t>()[at], row = rows.as<std::int32_t>()[at];
      expect((expert < 0) == (row < 0), "an entry with an expert has a row");
      if (row < 0) continue;
      expect(row == next[static_cast<std::size_t>(expert)]++, "rows of a group are in the order of the entries");
      is_row[static_cast<std::size_t>(row)] = true;
      const float weight = plain.recv_topk_weights.as<float>()[at];
      expect(grouped.recv_topk_idx.as<std::int32_t>()[row] == expert, "expert of a row");
      expect(grouped.recv_topk_weights.as<float>()[row] == weight, "weight of a row");
      expect(std::memcmp(grouped.recv_x.data.as<std::uint16_t>() + row * hidden, x,
                         static_cast<std::size_t>(hidden * 2)) == 0,
             "row " + std::to_string(row));
      for (std::int64_t h = 0; h < hidden; ++h) {
        const volatile float product = weight * from_bf16(x[h]);
        total[static_cast<std::size_t>(h)] += product;
      }
    }
    for (const float value : total) sums.push_back(to_bf16(value));
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (is_row[static_cast<std::size_t>(row)]) continue;
    expect(grouped.recv_topk_idx.as<std::int32_t>()[row] == -1, "padding has no expert");
    for (std::int64_t h = 0; h < hidden; ++h)
      expect(grouped.recv_x.data.as<std::uint16_t>()[row * hidden + h] == 0, "padding is zero");
  }

  DispatchArgs again;
  const DispatchHandle handle = grouped.handle.view();
  again.x.data = uploaded.x.view;
  again.handle = &handle;
  const DispatchResult cached = buffer.dispatch(again);
  expect(cached.recv_x.data.view.shape[0] == num_rows &&
             std::memcmp(cached.recv_x.data.view.data, grouped.recv_x.data.view.data,
                         grouped.recv_x.data.view.num_bytes()) == 0,
         "the same rows by handle");

  CombineArgs from_groups;
  from_groups.x = grouped.recv_x.data.view;
  from_groups.handle = handle;
  from_groups.row_weights = from_groups.topk_weights = grouped.recv_topk_weights.view;
  const CombineResult got = buffer.combine(from_groups);
  CombineArgs from_rows;
  from_rows.x = TensorView::contiguous(sums.data(), DType::kBFloat16, {rows.shape[0], hidden});
  from_rows.handle = plain.handle.view();
  from_rows.topk_weights = plain.recv_topk_weights.view;
  const CombineResult want = buffer.combine(from_rows);
  const auto same = [](const Tensor& a, const Tensor& b) {
    return a.view.num_bytes() == b.view.num_bytes() &&
           (a.view.numel() == 0 || std::memcmp(a.view.data, b.view.data, a.view.num_bytes()) == 0);
  };
  expect(same(got.combined_x, want.combined_x), "sums");
  expect(same(got.combined_topk_weights, want.combined_topk_weights), "weights");
}

}  // namespace

TEST_CASE("expert-major rows are the plain ones, regrouped, and so are their sums") {
  for (const Form form : {Form::kThreads, Form::kProcesses}) {
    for (const Shape& shape : kShapes) {
      if (shape.num_local_ranks > 0) ::setenv("DEEP_MOE_LOCAL_RANKS", std::to_string(shape.num_local_ranks).c_str(), 1);
      for (const std::int64_t alignment : {1, 16}) {
        CAPTURE(shape.num_ranks);
        check_all(run_ranks(form, shape.num_ranks,
                            [&](const Bootstrap& bootstrap) { round_trip(bootstrap, shape, alignment); }));
      }
      ::unsetenv("DEEP_MOE_LOCAL_RANKS");
    }
  }
}
