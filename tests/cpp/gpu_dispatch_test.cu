// Dispatch on a GPU against the same movement on the host, every byte of every heap compared: shapes, both paths,
// places, handles, refusals, time-outs, replay.
#include <doctest/doctest.h>

#include <deep_moe/error.hpp>

#include "gpu_rows.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using layout::NotifyOutcome;

#define GPU_TEST_CASE(name) TEST_CASE(name* doctest::skip(no_gpu()))

namespace {

constexpr double kLong = 100.0;

bool reduced() { return std::getenv("DEEP_MOE_GPU_STRESS_CALLS") != nullptr; }  // a checker is at work

struct Shape {
  int num_ranks, topk, num_experts, id_bytes;
  std::vector<std::int64_t> num_tokens;  // by rank, repeated
  RowShape rows;
};

void fill_random(World& world, Rows& rows, std::mt19937_64& random, const std::vector<std::int64_t>& num_tokens) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.set_ids(
        r, random_ids(random, num_tokens[r % num_tokens.size()], world.topk(), world.num_experts(), world.id_bytes()));
    rows.fill(r, random);
  }
  rows.count();
}

void poison_heaps(World& world, Rows& rows) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    rows.poison_heap(r);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  }
}

void reset(World& world, std::uint64_t epoch) {
  run(world.num_ranks(), [&](int r) {
    Rank& rank = world.rank(r);
    kernels::clear_error(rank.domain, rank.host, rank.stream);
    kernels::reset_state(rank.domain, epoch, rank.stream);
    cuda(cudaStreamSynchronize(rank.stream));
  });
}

void cached_all(World& world, Rows& rows, std::uint32_t sequence, NotifyOutcome wanted,
                const std::function<void(int, kernels::DispatchArgs&)>& change = {}) {
  std::vector<NotifyOutcome> outcomes(world.num_ranks());
  run(world.num_ranks(), [&](int r) {
    kernels::DispatchArgs args = rows.cached_args(r, sequence);
    if (change) change(r, args);
    kernels::dispatch(world.rank(r).domain, args, world.rank(r).stream);
    outcomes[r] = world.wait_outcome(r, sequence);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  for (const NotifyOutcome outcome : outcomes) CHECK_EQ(static_cast<int>(outcome), static_cast<int>(wanted));
}

}  // namespace

GPU_TEST_CASE("dispatch: equal to the host, all shapes, both paths") {
  const auto rows = [](std::int64_t row_bytes, int num_scales = 0, int scale_bytes = 4, int columns = 0, int hard = 0,
                       int num_sms = 3) {
    RowShape shape;
    shape.row_bytes = row_bytes;
    shape.num_scales = num_scales;
    shape.scale_bytes = scale_bytes;
    shape.column_ranks = columns;
    shape.hard_ranks = hard;
    shape.num_sms = num_sms;
    return shape;
  };
  std::vector<Shape> shapes = {
      {1, 8, 256, 8, {300}, rows(128)},
      {2, 8, 256, 8, {257}, rows(14336, 0, 4, 0, 0, 16)},
      {2, 8, 256, 8, {257}, rows(7168, 56)},
      {2, 8, 256, 8, {130, 0}, rows(7168, 56, 4, 3)},         // columns on both
      {2, 8, 256, 4, {130, 77}, rows(7168, 56, 4, 2, 1)},     // mixed, one hard
      {3, 4, 16, 8, {63, 65, 172}, rows(5760, 0, 4, 0, 7)},   // H=2880 bf16
      {2, 8, 256, 8, {37, 5}, rows(14336, 30, 4, 2, 1, 16)},  // few tokens, whose rows go in parts
      {4, 6, 37, 4, {0, 1, 100, 500}, rows(16, 1)},
      {8, 8, 60, 8, {100, 0, 57, 1}, rows(2048, 16, 1)},
      {8, 10, 30, 4, {0}, rows(256, 0, 4, 0, 0xff)},
      {4, 1, 4, 4, {900, 3}, rows(64, 100, 1, 4, 8)},
      {2, 64, 4096, 8, {150, 29}, rows(32768, 130, 2)},  // H=8192 fp32
      {5, 3, 3, 8, {120}, rows(3600, 9, 8, 9)},          // fewer experts than ranks
      {3, 33, 130, 4, {99, 52}, rows(1024, 70, 4, 0, 2)},
      {2, 8, 256, 8, {100}, rows(100016)},  // longer than any stage
      {12, 32, 130, 4, {30, 12}, rows(528)},
  };
  if (reduced()) shapes.erase(shapes.begin() + 9, shapes.end());
  std::mt19937_64 random(21);
  for (Shape& shape : shapes) {
    CAPTURE(shape.num_ranks);
    CAPTURE(shape.topk);
    CAPTURE(shape.rows.row_bytes);
    CAPTURE(shape.rows.num_scales);
    const std::int64_t most = *std::max_element(shape.num_tokens.begin(), shape.num_tokens.end());
    World world(shape.num_ranks, most, shape.topk, shape.num_experts, shape.id_bytes, kLong);
    for (const bool weights : {true, false}) {
      shape.rows.weights = weights;
      Rows moved(world, most, shape.rows);
      for (const bool vector_path : {false, true}) {
        CAPTURE(vector_path);
        moved.shape().vector_path = vector_path;
        fill_random(world, moved, random, shape.num_tokens);
        dispatch_all(world, moved);
        CHECK_EQ(moved.check_heaps(), "");
      }
    }
  }
}

GPU_TEST_CASE("dispatch: a large call, one hot expert, any number of blocks") {
  RowShape shape;
  shape.row_bytes = 14336;
  World world(2, 4096, 8, 256, 8, kLong);
  Rows rows(world, 4096, shape);
  std::mt19937_64 random(22);
  fill_random(world, rows, random, {reduced() ? 300 : 4096, 200});
  for (const int num_sms : {1, 2, 8, 16, 24, 60}) {
    if (reduced() && num_sms != 8) continue;
    CAPTURE(num_sms);
    rows.shape().num_sms = num_sms;
    poison_heaps(world, rows);
    dispatch_all(world, rows);
    CHECK_EQ(rows.check_heaps(), "");
  }
  for (int r = 0; r < 2; ++r) {  // all rows to rank 1
    world.set_ids(r, std::vector<std::int64_t>(500 * 8, 200));
    rows.fill(r, random);
  }
  rows.count();
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
}

GPU_TEST_CASE("dispatch: rows of x at any alignment and stride") {
  std::mt19937_64 random(23);
  World world(2, 150, 4, 16, 8, kLong);
  for (const std::int64_t gap : {16, 8, 4, 2, 1, 160}) {
    CAPTURE(gap);
    RowShape shape;
    shape.row_bytes = 1040;
    shape.x_gap = gap;
    Rows rows(world, 150, shape);
    fill_random(world, rows, random, {150, 111});
    dispatch_all(world, rows);
    CHECK_EQ(rows.check_heaps(), "");
  }
}

GPU_TEST_CASE("dispatch: nothing moves where some place is too small, and the next call works") {
  std::mt19937_64 random(24);
  World world(3, 200, 4, 16, 8, kLong);
  RowShape shape;
  shape.hard_ranks = 2;
  Rows rows(world, 200, shape);
  fill_random(world, rows, random, {200, 17, 90});
  std::uint32_t sequence = 0;
  for (const bool hard : {true, false}) {
    rows.shape().hard_ranks = hard ? 2 : 0;
    ++sequence;
    run(3, [&](int r) {
      kernels::NotifyArgs args = rows.notify_args(r, sequence);
      if (r == 1) args.place.capacity = rows.counts().total(1, 3) - 1;
      kernels::notify(world.rank(r).domain, args, world.rank(r).stream);
      kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
      cuda(cudaStreamSynchronize(world.rank(r).stream));
      if (world.wait_outcome(r, sequence) != (hard ? NotifyOutcome::kTooSmallHard : NotifyOutcome::kTooSmall))
        throw std::runtime_error("wrong outcome");
    });
    for (int r = 0; r < 3; ++r)
      CHECK_EQ(rows.compare_heap(r, std::vector<char>(rows.heap_bytes(), static_cast<char>(kPoison))), "");
    dispatch_all(world, rows);
    CHECK_EQ(rows.check_heaps(), "");
    poison_heaps(world, rows);
  }
  // The same for a handle's places.
  dispatch_all(world, rows);
  poison_heaps(world, rows);
  cached_all(world, rows, 3, NotifyOutcome::kTooSmall, [&](int r, kernels::DispatchArgs& args) {
    if (r == 2) args.start.place.capacity = rows.counts().total(2, 3) - 1;
  });
  for (int r = 0; r < 3; ++r)
    CHECK_EQ(rows.compare_heap(r, std::vector<char>(rows.heap_bytes(), static_cast<char>(kPoison))), "");
}

GPU_TEST_CASE("dispatch: by a handle, other rows each time; another handle is noticed") {
  std::mt19937_64 random(25);
  World world(4, 300, 6, 37, 4, kLong);
  RowShape shape;
  shape.row_bytes = 4096;
  shape.num_scales = 8;
  shape.hard_ranks = 4;
  shape.column_ranks = 2;
  Rows rows(world, 300, shape);
  fill_random(world, rows, random, {300, 0, 44, 129});
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
  std::uint32_t sequence = 0;
  for (int round = 0; round < 6; ++round) {
    rows.shape().vector_path = round % 2 == 1;
    for (int r = 0; r < 4; ++r) rows.fill(r, random);
    cached_all(world, rows, ++sequence, NotifyOutcome::kRowsFit);
    CHECK_EQ(rows.check_heaps(false), "");
  }
  poison_heaps(world, rows);
  cached_all(world, rows, ++sequence, NotifyOutcome::kMismatch, [](int r, kernels::DispatchArgs& args) {
    if (r == 3) args.start.signature.handle_hash = 78;
  });
  for (int r = 0; r < 4; ++r) {
    CHECK_EQ(world.error(r).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kCallMismatch));
    CHECK_EQ(world.error(r).peer_signature.handle_hash, r == 3 ? 77 : 78);
    CHECK_EQ(rows.compare_heap(r, std::vector<char>(rows.heap_bytes(), static_cast<char>(kPoison))), "");
    const OnGpuOf on(r);
    kernels::clear_error(world.rank(r).domain, world.rank(r).host, world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  }
  cached_all(world, rows, ++sequence, NotifyOutcome::kRowsFit);
  CHECK_EQ(rows.check_heaps(false), "");
}

GPU_TEST_CASE("dispatch: windows of any size, put together, are the whole; with ids and without, both paths") {
  std::mt19937_64 random(29);
  constexpr int R = 3;
  World world(R, 150, 4, 16, 8, kLong);
  RowShape shape;
  shape.row_bytes = 1040;
  shape.num_scales = 7;
  shape.column_ranks = 2;
  shape.hard_ranks = 4;
  Rows rows(world, 150, shape);
  fill_random(world, rows, random, {150, 20, 97});
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
  std::uint32_t sequence = 0;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{64, 29, 33}, {1000, 50, 7}, {0, 90, 100}}) {
    if (reduced() && sequence > 0) break;
    // Each rank takes its rows in windows of its own size; who is through, or takes none, opens empty ones.
    std::int64_t num_waves = 0;
    for (int r = 0; r < R; ++r)
      if (sizes[r] > 0) num_waves = std::max(num_waves, (rows.hard_capacity(r) + sizes[r] - 1) / sizes[r]);
    for (std::int64_t wave = 0; wave < num_waves; ++wave) {
      CAPTURE(wave);
      const bool with_ids = wave % 2 == 0;
      rows.shape().vector_path = wave % 4 >= 2;
      poison_heaps(world, rows);
      const auto capacity = [&](int r) {
        return std::min(sizes[r], std::max<std::int64_t>(0, rows.hard_capacity(r) - wave * sizes[r]));
      };
      cached_all(world, rows, ++sequence, NotifyOutcome::kRowsFit, [&](int r, kernels::DispatchArgs& args) {
        if (with_ids) {
          const kernels::DispatchArgs whole = rows.dispatch_args(r);
          args.ids = whole.ids;
          args.topk_weights = whole.topk_weights;
        }
        layout::Place& place = args.start.place;
        place.flags |= layout::kPlaceWindow;
        place.first_row = wave * sizes[r];
        place.capacity = capacity(r);
        if (place.capacity == 0) place.segment = -1;
      });
      for (int r = 0; r < R; ++r)
        CHECK_EQ(rows.compare_heap(r, rows.expected_window(r, wave * sizes[r], capacity(r), with_ids)), "");
    }
  }
}

GPU_TEST_CASE("dispatch: routing by a mask instead of ids") {
  std::mt19937_64 random(30);
  World world(3, 300, 4, 16, 8, kLong);
  RowShape shape;
  shape.row_bytes = 512;
  shape.hard_ranks = 2;
  Rows rows(world, 300, shape);
  fill_random(world, rows, random, {300, 0, 131});
  run(3, [&](int r) {
    Rank& rank = world.rank(r);
    rank.use_mask = true;
    kernels::notify(rank.domain, rows.notify_args(r, 1), rank.stream);
    kernels::DispatchArgs args = rows.dispatch_args(r);
    args.ids = {};
    args.topk_weights = nullptr;
    kernels::dispatch(rank.domain, args, rank.stream);
    cuda(cudaStreamSynchronize(rank.stream));
  });
  CHECK_EQ(rows.check_heaps(false), "");
}

GPU_TEST_CASE("dispatch: a place in a segment without address is reported, not written to") {
  std::mt19937_64 random(26);
  World world(2, 50, 4, 16, 8, 0.3);
  Rows rows(world, 50, {});
  fill_random(world, rows, random, {50});
  dispatch_all(world, rows);
  run(2, [&](int r) {
    kernels::DispatchArgs args = rows.cached_args(r, 1);
    if (r == 1) args.start.place.segment = 40;
    kernels::dispatch(world.rank(r).domain, args, world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  CHECK_EQ(world.error(0).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kUnknownSegment));
  CHECK_EQ(world.error(0).peer, 1);
  CHECK_EQ(world.error(0).seen, 40);
  reset(world, 9);
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
}

GPU_TEST_CASE("dispatch: wrong arguments are refused before anything is launched") {
  World world(2, 16, 4, 8, 8, kLong);
  Rows rows(world, 16, {});
  world.set_ids(0, std::vector<std::int64_t>(64, 1));
  const auto refused = [&](auto change) {
    kernels::DispatchArgs args = rows.dispatch_args(0);
    change(args);
    CHECK_THROWS_AS(kernels::dispatch(world.rank(0).domain, args, world.rank(0).stream), ArgumentError);
  };
  refused([](auto& args) { args.num_sms = 0; });
  refused([](auto& args) { args.row_bytes = 24; });
  refused([](auto& args) { args.x = nullptr; });
  refused([](auto& args) { args.segment_bases = nullptr; });
  refused([](auto& args) { args.scales.num_items = 3, args.scales.item_bytes = 3; });
  refused([](auto& args) { args.ids.num_tokens = 15; });
  refused([](auto& args) { args.ids.topk = 65; });
}

GPU_TEST_CASE("dispatch: captured calls replay on other ids and rows, beside eager ones") {
  constexpr int R = 3;
  std::mt19937_64 random(27);
  World world(R, 200, 4, 16, 4, kLong);
  RowShape shape;
  shape.row_bytes = 1024;
  shape.hard_ranks = 7;
  Rows rows(world, 200, shape);
  for (int r = 0; r < R; ++r) world.set_ids(r, random_ids(random, 120 + r, 4, 16, 4));
  rows.count();
  cudaGraphExec_t replay[R] = {};
  const std::int64_t capacity = 200 * R;
  const auto launch = [&](int r) {
    kernels::NotifyArgs args = rows.notify_args(r, 0);
    args.place.capacity = capacity;
    kernels::notify(world.rank(r).domain, args, world.rank(r).stream);
    kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
  };
  for (int r = 0; r < 2; ++r) {
    const OnGpuOf on(r);
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(world.rank(r).stream, cudaStreamCaptureModeThreadLocal));
    launch(r);
    cuda(cudaStreamEndCapture(world.rank(r).stream, &graph));
    cuda(cudaGraphInstantiate(&replay[r], graph, 0));
    cuda(cudaGraphUpload(replay[r], world.rank(r).stream));
    cuda(cudaGraphDestroy(graph));
  }
  for (int round = 0; round < 12; ++round) {
    for (int r = 0; r < R; ++r) {
      world.set_ids(r, random_ids(random, world.rank(r).num_tokens, 4, 16, 4));
      rows.fill(r, random);
    }
    rows.count();
    run(R, [&](int r) {
      for (int again = 0; again < 3; ++again) {
        if (replay[r]) {
          cuda(cudaGraphLaunch(replay[r], world.rank(r).stream));
        } else {
          launch(r);
        }
      }
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    for (int r = 0; r < R; ++r) {
      rows.shape().hard_tail = capacity - rows.counts().total(r, R);
      CHECK_EQ(rows.compare_heap(r, rows.expected_heap(r)), "");
    }
  }
  for (int r = 0; r < 2; ++r) cuda(cudaGraphExecDestroy(replay[r]));
}

GPU_TEST_CASE("time-out: dispatch names the rank that sends no rows, and a reset makes all good") {
  constexpr double kTimeout = 0.3;
  std::mt19937_64 random(28);
  World world(3, 100, 4, 16, 8, kTimeout);
  Rows rows(world, 100, {});
  fill_random(world, rows, random, {100});
  const auto check_record = [&](layout::WaitPhase phase) {
    for (int r = 0; r < 2; ++r) {
      CAPTURE(r);
      const layout::ErrorRecord& error = world.error(r);
      CHECK_EQ(error.kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout));
      CHECK_EQ(error.phase, static_cast<std::uint32_t>(phase));
      CHECK_EQ(error.rank, r);
      CHECK_EQ(error.peer, 2);
    }
  };
  const auto timed = [&](const std::function<void(int)>& body) {
    const auto start = std::chrono::steady_clock::now();
    run(3, [&](int r) {
      body(r);
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // Rank 2 takes part in notify alone.
  const double waited = timed([&](int r) {
    kernels::notify(world.rank(r).domain, rows.notify_args(r, 0), world.rank(r).stream);
    if (r != 2) kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
  });
  CHECK_GE(waited, kTimeout);
  CHECK_LT(waited, kTimeout + 1.0);
  check_record(layout::WaitPhase::kRowsDone);
  const double left = timed([&](int r) {  // failed: every launch leaves at once
    if (r == 2) return;
    kernels::notify(world.rank(r).domain, rows.notify_args(r, 0), world.rank(r).stream);
    kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
  });
  CHECK_LT(left, kTimeout / 2);
  reset(world, 5);
  poison_heaps(world, rows);
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
  // Rank 2 does not come to a cached call.
  CHECK_GE(timed([&](int r) {
             if (r == 2) return;
             kernels::dispatch(world.rank(r).domain, rows.cached_args(r, 9), world.rank(r).stream);
             CHECK_EQ(static_cast<int>(world.wait_outcome(r, 9)), static_cast<int>(NotifyOutcome::kFailed));
           }),
           kTimeout);
  check_record(layout::WaitPhase::kAnnounce);
  reset(world, 12);
  poison_heaps(world, rows);
  dispatch_all(world, rows);
  CHECK_EQ(rows.check_heaps(), "");
  cached_all(world, rows, 10, NotifyOutcome::kRowsFit);
}
