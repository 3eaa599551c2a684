// Low-latency dispatch and combine against a scalar model: what arrives and what is summed, in every form.
#include <doctest/doctest.h>

#include <memory>

#include "low_latency_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

BufferOptions low_options(double timeout_seconds = 30) {
  BufferOptions options;
  options.low_latency_mode = true;
  options.timeout_seconds = timeout_seconds;
  return options;
}

std::string name_of(const LowShape& shape) {
  return std::to_string(shape.num_ranks) + " ranks, " + dtype_name(shape.dtype) + ", hidden " +
         std::to_string(shape.hidden) + ", " + std::to_string(shape.num_experts) + " experts";
}

const std::vector<LowShape>& shapes() {
  static const std::vector<LowShape> all = {
      {1, {7}, 8, 128, 5, 3, DType::kBFloat16, 1},
      {2, {16, 16}, 16, 512, 16, 4, DType::kBFloat16, 2},
      {2, {0, 9}, 16, 256, 9, 4, DType::kFloat16, 3},
      {3, {5, 0, 12}, 12, 128, 7, 6, DType::kFloat32, 4},
      {4, {33, 1, 40, 17}, 64, 256, 30, 8, DType::kBFloat16, 5},
      {4, {6, 9, 3, 4}, 9, 128, 3, 2, DType::kBFloat16, 6},  // a rank without experts
  };
  return all;
}

// A call, and its hook if it has one.
template <typename Result>
Result finish(Result result, bool with_hook) {
  expect(static_cast<bool>(result.hook) == with_hook, "a hook exactly where one was asked for");
  if (result.hook) result.hook();
  return result;
}

}  // namespace

TEST_CASE("dispatch gives each local expert its rows, ordered by source rank and token") {
  for (const LowShape& shape : shapes()) {
    INFO(name_of(shape));
    check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
      LowModel model(shape);
      Buffer buffer(bootstrap, low_options());
      const int rank = bootstrap.rank;
      std::vector<std::int32_t> stats(static_cast<std::size_t>(model.blocks.num_local_experts(rank)), 5);
      std::vector<std::int64_t> costs(static_cast<std::size_t>(shape.num_ranks), 0);
      for (int round = 0; round < 6; ++round) {
        LowLatencyDispatchArgs args = model.dispatch_args(rank, round % 2 == 0, round % 3 == 1);
        args.return_recv_hook = round >= 3;
        args.cumulative_local_expert_recv_stats =
            TensorView::contiguous(stats.data(), DType::kInt32, {model.blocks.num_local_experts(rank)});
        args.wait_recv_cost_stats = TensorView::contiguous(costs.data(), DType::kInt64, {shape.num_ranks});
        const auto result = finish(buffer.low_latency_dispatch(args), args.return_recv_hook);
        model.check_plain_rows(rank, result);
        for (std::size_t local = 0; local < stats.size(); ++local)
          expect(stats[local] == 5 + (round + 1) * result.recv_count.as<std::int32_t>()[local], "stats add up");
        for (const std::int64_t cost : costs) expect(cost >= 0, "no negative wait");
      }
    }));
  }
}

TEST_CASE("dispatch casts to fp8 with fp32, rounded and packed scales") {
  for (LowShape shape : shapes()) {
    if (shape.num_ranks == 1) shape.hidden = 128 * 4 * 17;  // more blocks than one piece of the cast
    INFO(name_of(shape));
    check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
      LowModel model(shape);
      Buffer buffer(bootstrap, low_options());
      for (int form = 0; form < 3; ++form) {
        LowLatencyDispatchArgs args = model.dispatch_args(bootstrap.rank, true);
        args.use_fp8 = true;
        args.round_scale = form == 1;
        args.use_ue8m0 = form == 2;
        if (args.use_ue8m0 && shape.hidden % 512 != 0) {
          expect_throw<ArgumentError>([&] { buffer.low_latency_dispatch(args); }, "a multiple of 512");
          continue;
        }
        model.check_fp8_rows(bootstrap.rank, buffer.low_latency_dispatch(args), form >= 1, form == 2);
      }
    }));
  }
}

TEST_CASE("data with scales is not interpreted") {
  LowShape shape{3, {8, 3, 11}, 12, 64, 10, 4, DType::kFloat16, 8};
  for (const int num_scales : {0, 1, 5}) {  // 0: one a token, without a dimension
    for (const bool column_major : {false, true}) {
      check_all(run_threads(3, [&](const Bootstrap& bootstrap) {
        LowModel model(shape);
        Buffer buffer(bootstrap, low_options());
        const int rank = bootstrap.rank, per_row = std::max(1, num_scales);
        const std::int64_t tokens = shape.num_tokens[rank];
        const auto scale_of = [](int src, std::int64_t token, int s) {
          return static_cast<std::int16_t>(src * 1000 + token * 10 + s);
        };
        std::vector<std::int16_t> scales(static_cast<std::size_t>(tokens * per_row));
        LowLatencyDispatchArgs args = model.dispatch_args(rank, false);
        TensorView& view = args.x.scales;
        view = TensorView::contiguous(scales.data(), DType::kInt16, {tokens, per_row});
        if (num_scales == 0) view.num_dims = 1;
        if (column_major && num_scales > 0) {
          view.stride[0] = 1;
          view.stride[1] = tokens;
        }
        for (std::int64_t token = 0; token < tokens; ++token)
          for (int s = 0; s < per_row; ++s)
            scales[token * view.stride[0] + (num_scales > 0 ? s * view.stride[1] : 0)] = scale_of(rank, token, s);
        // The same bytes as another type: fp8 pairs instead of fp16.
        args.x.data.dtype = DType::kUInt8;
        args.x.data.shape[1] *= 2;
        args.x.data.stride[0] *= 2;
        args.use_fp8 = true;
        const auto result = buffer.low_latency_dispatch(args);
        expect(result.recv_x.data.view.dtype == DType::kUInt8 && result.recv_x.data.view.shape[2] == 128, "type kept");
        model.check_plain_rows(rank, result);
        const TensorView& got = result.recv_x.scales.view;
        expect(got.num_dims == (num_scales == 0 ? 2 : 3), "dimensions of the scales");
        model.for_each_row(rank, {}, [&](int local, std::int64_t slot, const LowModel::Source& source) {
          for (int s = 0; s < per_row; ++s)
            expect(got.as<std::int16_t>()[local * got.stride[0] + slot * got.stride[1] + s * got.stride[2]] ==
                       scale_of(source.rank, source.token, s),
                   "scale");
        });
      }));
    }
  }
}

TEST_CASE("combine sums in rank order, pre-reduced or by expert, also in logarithms") {
  for (const LowShape& shape : shapes()) {
    for (const bool logfmt : {false, true}) {
      INFO(name_of(shape), ", logfmt ", logfmt);
      check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
        LowModel model(shape);
        Buffer buffer(bootstrap, low_options());
        const int rank = bootstrap.rank;
        for (int form = 0; form < 4; ++form) {
          const bool weights = form % 2 == 0, hook = form >= 2;
          const auto dispatched = buffer.low_latency_dispatch(model.dispatch_args(rank, weights));
          std::vector<char> y = model.outputs(rank);
          LowLatencyCombineArgs args = model.combine_args(rank, y, dispatched.handle.view());
          args.use_logfmt = logfmt;
          args.return_recv_hook = hook;
          const auto combined = finish(buffer.low_latency_combine(args), hook);
          model.check_combined(rank, combined.combined_x.view, weights || !hook, logfmt);
        }
      }));
    }
  }
}

TEST_CASE("ranks that are processes") {
  const LowShape& shape = shapes()[4];
  check_all(run_processes(shape.num_ranks, [&](const Bootstrap& bootstrap) {
    LowModel model(shape);
    Buffer buffer(bootstrap, low_options());
    const int rank = bootstrap.rank;
    for (int round = 0; round < 4; ++round) {
      LowLatencyDispatchArgs args = model.dispatch_args(rank, round % 2 == 0);
      args.return_recv_hook = true;
      const auto dispatched = finish(buffer.low_latency_dispatch(args), true);
      model.check_plain_rows(rank, dispatched);
      std::vector<char> y = model.outputs(rank);
      LowLatencyCombineArgs back = model.combine_args(rank, y, dispatched.handle.view());
      back.return_recv_hook = true;
      const auto combined = finish(buffer.low_latency_combine(back), true);
      model.check_combined(rank, combined.combined_x.view, round % 2 == 0);
    }
  }));
}

TEST_CASE("rows with gaps between them are taken, as input and as output") {
  const LowShape& shape = shapes()[1];
  check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
    LowModel model(shape);
    Buffer buffer(bootstrap, low_options());
    const int rank = bootstrap.rank;
    const std::int64_t tokens = shape.num_tokens[rank], pitch = shape.hidden + 24;
    std::vector<std::uint16_t> spread(static_cast<std::size_t>(tokens * pitch));
    for (std::int64_t token = 0; token < tokens; ++token)
      std::memcpy(spread.data() + token * pitch, model.x_row(rank, token), static_cast<std::size_t>(shape.hidden * 2));
    LowLatencyDispatchArgs args = model.dispatch_args(rank, true);
    args.x.data.data = spread.data();
    args.x.data.stride[0] = pitch;
    const auto dispatched = buffer.low_latency_dispatch(args);
    model.check_plain_rows(rank, dispatched);

    std::vector<char> y = model.outputs(rank);
    std::vector<std::uint16_t> spread_y(y.size() / 2 + 8 * static_cast<std::size_t>(shape.num_experts * 64));
    LowLatencyCombineArgs back = model.combine_args(rank, y, dispatched.handle.view());
    back.x.data = spread_y.data();
    back.x.stride[1] = shape.hidden + 8;
    back.x.stride[0] = back.x.shape[1] * back.x.stride[1];
    for (std::int64_t row = 0; row < back.x.shape[0] * back.x.shape[1]; ++row)
      std::memcpy(spread_y.data() + row * back.x.stride[1], y.data() + row * shape.hidden * 2,
                  static_cast<std::size_t>(shape.hidden * 2));
    std::vector<std::uint16_t> out(static_cast<std::size_t>(tokens * pitch), 0x1234);
    back.out = TensorView::contiguous(out.data(), shape.dtype, {tokens, shape.hidden});
    back.out.stride[0] = pitch;
    const auto combined = buffer.low_latency_combine(back);
    expect(combined.combined_x.view.data == out.data(), "the result is in out");
    model.check_combined(rank, combined.combined_x.view, true);
    for (std::int64_t token = 0; token < tokens; ++token)
      for (std::int64_t h = shape.hidden; h < pitch; ++h) expect(out[token * pitch + h] == 0x1234, "nothing in gaps");
  }));
}

TEST_CASE("tokens that go nowhere combine to zeros, and a call may have no tokens at all") {
  LowShape shape = shapes()[1];
  for (const bool no_tokens : {false, true}) {
    if (no_tokens) shape.num_tokens = {0, 0};
    for (const bool hook : {false, true}) {
      check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
        LowModel model(shape);
        for (auto& id : model.inputs[bootstrap.rank].ids) id = -1;
        Buffer buffer(bootstrap, low_options());
        const auto dispatched = buffer.low_latency_dispatch(model.dispatch_args(bootstrap.rank, false));
        for (std::int64_t local = 0; local < dispatched.recv_count.view.shape[0]; ++local)
          expect(dispatched.recv_count.as<std::int32_t>()[local] == 0, "no rows");
        std::vector<char> y = model.outputs(bootstrap.rank);
        LowLatencyCombineArgs back = model.combine_args(bootstrap.rank, y, dispatched.handle.view());
        std::vector<std::uint16_t> out(static_cast<std::size_t>(shape.num_tokens[0] * shape.hidden), 0x1234);
        back.out = TensorView::contiguous(out.data(), shape.dtype, {shape.num_tokens[0], shape.hidden});
        back.return_recv_hook = hook;
        finish(buffer.low_latency_combine(back), hook);
        for (const std::uint16_t element : out) expect(element == 0, "zeros");
      }));
    }
  }
}

TEST_CASE("large rows, which several threads and streaming stores share") {
  ::setenv("DEEP_MOE_CPU_THREADS", "3", 1);
  const LowShape shape{2, {70, 90}, 96, 4096, 12, 6, DType::kBFloat16, 9};
  check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
    LowModel model(shape);
    Buffer buffer(bootstrap, low_options());
    for (int form = 0; form < 3; ++form) {
      LowLatencyDispatchArgs args = model.dispatch_args(bootstrap.rank, form == 0);
      const auto dispatched = buffer.low_latency_dispatch(args);
      model.check_plain_rows(bootstrap.rank, dispatched);
      std::vector<char> y = model.outputs(bootstrap.rank);
      LowLatencyCombineArgs back = model.combine_args(bootstrap.rank, y, dispatched.handle.view());
      back.return_recv_hook = form == 2;
      const auto combined = finish(buffer.low_latency_combine(back), form == 2);
      model.check_combined(bootstrap.rank, combined.combined_x.view, form != 2);
      args.use_fp8 = true;
      model.check_fp8_rows(bootstrap.rank, buffer.low_latency_dispatch(args), false, false);
    }
  }));
  ::unsetenv("DEEP_MOE_CPU_THREADS");
}

TEST_CASE("the same input gives the same bits, whatever comes between") {
  const LowShape& shape = shapes()[4];
  check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
    LowModel model(shape);
    Buffer buffer(bootstrap, low_options());
    std::vector<char> first;
    for (int round = 0; round < 3; ++round) {
      const auto dispatched = buffer.low_latency_dispatch(model.dispatch_args(bootstrap.rank, true));
      std::vector<char> y = model.outputs(bootstrap.rank);
      const auto combined = buffer.low_latency_combine(model.combine_args(bootstrap.rank, y, dispatched.handle.view()));
      const std::vector<char> bytes(combined.combined_x.as<char>(),
                                    combined.combined_x.as<char>() + combined.combined_x.view.num_bytes());
      if (round == 0) first = bytes;
      expect(bytes == first, "round " + std::to_string(round));
    }
  }));
}
