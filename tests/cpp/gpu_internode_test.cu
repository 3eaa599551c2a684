// The kernels between nodes over mapped memory, against the same movement and the same sums on the host: every byte of
// every heap and output; rings of few rows, so that a call goes round them many times. The CPU runs the same file, also
// over a network of its own (emulation/wired_test.cc).
#include <doctest/doctest.h>

#include <deep_moe/error.hpp>

#include "gpu_internode.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using layout::NotifyOutcome;

#define GPU_TEST_CASE(name) TEST_CASE(name* doctest::skip(no_gpu()))

namespace {

#ifdef DEEP_MOE_WIRED
using Rails = WiredRails;
#else
using Rails = RailWorld;
#endif

constexpr double kLong = 20.0;

bool reduced() { return std::getenv("DEEP_MOE_GPU_STRESS_CALLS") != nullptr; }  // a checker is at work

const RailShape kRails[] = {{2, 1}, {2, 2, 1}, {4, 1, 3}, {2, 4}, {4, 2, 2, 9000}, {3, 2, 2, 4096, true}};

void fill_random(World& world, Rows& rows, std::mt19937_64& random, const std::vector<std::int64_t>& num_tokens) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.set_ids(
        r, random_ids(random, num_tokens[r % num_tokens.size()], world.topk(), world.num_experts(), world.id_bytes()));
    rows.fill(r, random);
  }
  rows.count();
}

std::size_t slot_for(const RowShape& shape, int topk, int id_bytes, int num_local_ranks, std::size_t rows) {
  return rows * layout::RailRow(static_cast<std::size_t>(shape.row_bytes),
                                static_cast<std::size_t>(shape.num_scales * shape.scale_bytes),
                                static_cast<std::size_t>(topk * id_bytes), static_cast<std::size_t>(topk * 4),
                                num_local_ranks)
                    .stride;
}

struct Shape {
  int topk, num_experts, id_bytes;
  std::vector<std::int64_t> num_tokens;
  RowShape rows;
};

RowShape row_shape(std::int64_t row_bytes, int num_scales = 0, int scale_bytes = 4, int columns = 0, int hard = 0,
                   int num_sms = 2) {
  RowShape shape;
  shape.row_bytes = row_bytes;
  shape.num_scales = num_scales;
  shape.scale_bytes = scale_bytes;
  shape.column_ranks = columns;
  shape.hard_ranks = hard;
  shape.num_sms = num_sms;
  return shape;
}

}  // namespace

GPU_TEST_CASE("between nodes: dispatch is equal to the host, by ids and by a handle") {
  std::vector<Shape> shapes = {
      {8, 256, 8, {130, 40}, row_shape(1024)},
      {4, 30, 4, {65, 0, 77, 20}, row_shape(7168, 56, 4, 5, 2)},
      {6, 37, 8, {9, 200, 1}, row_shape(256, 3, 1, 0, 0xff, 3)},
      {64, 4096, 8, {70, 0, 3}, row_shape(16, 0, 4, 0, 0, 1)},
      {1, 5, 4, {0, 0, 0, 2}, row_shape(48)},  // fewer experts than some have ranks
  };
  std::mt19937_64 random(61);
  for (RailShape rail : kRails) {
    if (reduced() && rail.num_ranks() > 4) continue;
    CAPTURE(rail.num_nodes);
    CAPTURE(rail.num_local_ranks);
    for (const Shape& shape : shapes) {
      CAPTURE(shape.rows.row_bytes);
      for (const std::size_t chunk : {1, 3}) {
        rail.slot_bytes = slot_for(shape.rows, shape.topk, shape.id_bytes, rail.num_local_ranks, chunk);
        World world(rail.num_ranks(), 200, shape.topk, shape.num_experts, shape.id_bytes, kLong);
        Rows rows(world, 200, shape.rows);
        Rails rails(world, rows, rail, 200);
        for (int call = 0; call < 3; ++call) {
          fill_random(world, rows, random, shape.num_tokens);
          rails.dispatch_all();
          REQUIRE_EQ(rails.errors(), "");
          CHECK_EQ(rails.check_routes(), "");
          CHECK_EQ(rows.check_heaps(), "");
          for (int r = 0; r < rail.num_ranks(); ++r) rows.fill(r, random);
          rails.cached_all();
          REQUIRE_EQ(rails.errors(), "");
          CHECK_EQ(rows.check_heaps(false), "");
        }
      }
    }
  }
}

GPU_TEST_CASE("between nodes: more tokens than notify remembers the ranks of") {
  RailShape rail{2, 2, 3};
  rail.slot_bytes = slot_for(row_shape(16), 3, 8, 2, 8);
  std::mt19937_64 random(69);
  World world(4, 1500, 3, 9, 8, kLong);
  Rows rows(world, 1500, row_shape(16));
  Rails rails(world, rows, rail, 1500);
  for (const std::int64_t last : {1500, 1025, 257}) {
    fill_random(world, rows, random, {last, 3, 256, 1024});
    rails.dispatch_all();
    REQUIRE_EQ(rails.errors(), "");
    CHECK_EQ(rails.check_routes(), "");
    CHECK_EQ(rows.check_heaps(), "");
  }
}

GPU_TEST_CASE("between nodes: combine is equal to the host, rounded once more for the network") {
  std::mt19937_64 random(62);
  for (RailShape rail : kRails) {
    if (reduced() && rail.num_ranks() > 4) continue;
    CAPTURE(rail.num_nodes);
    CAPTURE(rail.num_local_ranks);
    for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32}) {
      SumShape sum;
      sum.type = type;
      sum.hidden = 264;
      sum.num_biases = static_cast<int>(type);
      sum.gap = 16;
      for (int r = 0; r < rail.num_ranks(); ++r) sum.node_of.push_back(rail.node_of(r));
      const RowShape row = row_shape(1056, 0, 4, 0, 0, 2);
      rail.slot_bytes = slot_for(row, 6, 8, rail.num_local_ranks, 2);
      World world(rail.num_ranks(), 120, 6, 37, 8, kLong);
      Rows rows(world, 120, row);
      Sums sums(world, rows, 120, sum);
      Rails rails(world, rows, rail, 120);
      rails.use_inputs(sums);
      for (int call = 0; call < 3; ++call) {
        fill_random(world, rows, random, {120, 0, 45, 88});
        rails.dispatch_all();
        REQUIRE_EQ(rails.errors(), "");
        for (const bool weights : {true, false}) {
          sums.shape().weights = weights;
          for (int r = 0; r < rail.num_ranks(); ++r) sums.fill(r, random);
          rails.combine_all(sums);
          REQUIRE_EQ(rails.errors(), "");
          CHECK_EQ(sums.check(), "");
        }
      }
    }
  }
}

GPU_TEST_CASE("between nodes: a launch whose map is too small moves nothing, and the next one all") {
  const RailShape rail{2, 2};
  std::mt19937_64 random(66);
  World world(4, 60, 4, 16, 8, kLong);
  Rows rows(world, 60, row_shape(512));
  Rails rails(world, rows, rail, 60);
  fill_random(world, rows, random, {60, 31});
  run(4, [&](int r) {
    const auto stream = world.rank(r).stream;
    internode::DispatchArgs args = rails.dispatch_args(r);
    rails.notify(r, rails.notify_args(r, 0));
    if (r % 2 == 0) {
      args.map_rows = 0;
      rails.dispatch(r, args);
      cuda(cudaStreamSynchronize(stream));
    }
    rails.dispatch(r, rails.dispatch_args(r));
    cuda(cudaStreamSynchronize(stream));
  });
  REQUIRE_EQ(rails.errors(), "");
  CHECK_EQ(rows.check_heaps(), "");
}

// The map of a rank whose number of rows is fixed has that many for each rank of its node.
GPU_TEST_CASE("between nodes: who may have to forward more than its map holds is known to all before any row moves") {
  const RailShape rail{2, 2};
  World world(4, 60, 1, 4, 8, kLong);
  RowShape shape = row_shape(512, 0, 4, 0, 1);
  shape.hard_tail = 3;
  Rows rows(world, 60, shape);
  Rails rails(world, rows, rail, 60);
  std::mt19937_64 random(68);
  std::uint32_t call = 0;
  for (const std::int64_t through : {30, 6, 7}) {  // rank 2's tokens go to rank 1 by rank 0, which takes 3 rows
    for (int r = 0; r < 4; ++r) {
      world.set_ids(r, std::vector<std::int64_t>(static_cast<std::size_t>(r == 2 ? through : r == 1 ? 60 : 0), 1));
      rows.fill(r, random);
    }
    rows.count();
    const bool fits = through <= 6;
    ++call;
    run(4, [&](int r) {
      const auto stream = world.rank(r).stream;
      rails.notify(r, rails.notify_args(r, call));
      if (world.wait_outcome(r, call) != (fits ? NotifyOutcome::kRowsFit : NotifyOutcome::kTooSmallHard))
        throw std::runtime_error("wrong outcome");
      internode::DispatchArgs args = rails.dispatch_args(r);
      if (r == 0) args.map_rows = 6;
      rails.dispatch(r, args);
      cuda(cudaStreamSynchronize(stream));
      const layout::ErrorRecord error = world.error(r);
      kernels::clear_error(rails.rank(r).domain.node, world.rank(r).host, stream);
      cuda(cudaStreamSynchronize(stream));
      if (fits) return;
      if (error.kind != static_cast<std::uint32_t>(layout::KernelErrorKind::kTooFewRows) || error.peer != 0 ||
          error.expected != 3 || error.seen != static_cast<std::uint64_t>((through + 1) / 2))
        throw std::runtime_error("another error");
    });
    if (fits) CHECK_EQ(rows.check_heaps(), "");
  }
}

// As launches do that a graph has kept: arguments are the same from the first call to the last.
GPU_TEST_CASE("between nodes: after a reset nothing of the generation before it is taken") {
  const RailShape rail{2, 2, 3};
  std::mt19937_64 random(67);
  World world(4, 90, 4, 16, 8, kLong);
  Rows rows(world, 90, row_shape(512));
  Rails rails(world, rows, rail, 90);
  for (std::uint64_t generation = 0; generation < 4; ++generation) {
    if (generation > 0) rails.restart(generation);
    for (const std::int64_t most : {3, 9, 90}) {
      fill_random(world, rows, random, {most, most / 2, 1});
      rails.dispatch_all();
      REQUIRE_EQ(rails.errors(), "");
      CHECK_EQ(rows.check_heaps(), "");
    }
  }
}

GPU_TEST_CASE("between nodes: a refused call moves nothing anywhere and leaves the rings in step") {
  const RailShape rail{2, 2};
  std::mt19937_64 random(63);
  World world(4, 100, 4, 16, 8, kLong);
  Rows rows(world, 100, row_shape(512));
  Rails rails(world, rows, rail, 100);
  for (std::uint32_t call = 1; call <= 12; ++call) {
    fill_random(world, rows, random, {100, 30});
    std::vector<NotifyOutcome> outcomes(4);
    const int refuser = static_cast<int>(call % 5);  // 4: none; calls 1 to 3 in a row are refused
    run(4, [&](int r) {
      const auto stream = world.rank(r).stream;
      internode::NotifyArgs args = rails.notify_args(r, call);
      args.refused = r == refuser;
      rails.notify(r, args);
      rails.dispatch(r, rails.dispatch_args(r));
      outcomes[r] = world.wait_outcome(r, call);
      cuda(cudaStreamSynchronize(stream));
      kernels::clear_error(rails.rank(r).domain.node, world.rank(r).host, stream);
      cuda(cudaStreamSynchronize(stream));
    });
    for (const NotifyOutcome outcome : outcomes)
      CHECK_EQ(static_cast<int>(outcome),
               static_cast<int>(refuser < 4 ? NotifyOutcome::kRefused : NotifyOutcome::kRowsFit));
    if (refuser == 4) CHECK_EQ(rows.check_heaps(), "");
  }
}

// What waits have left half done on the ranks that did begin: counts of slots, tokens taken, chunks that nobody read.
GPU_TEST_CASE("between nodes: a reset after a call that some ranks have not made, and the next calls") {
  const RailShape rail{2, 2, 3};
  std::mt19937_64 random(70);
  World world(4, 90, 4, 16, 8, 2.0);
  Rows rows(world, 90, row_shape(512));
  Rails rails(world, rows, rail, 90);
  for (std::uint64_t generation = 1; generation < 3; ++generation) {
    fill_random(world, rows, random, {90, 41});
    rails.dispatch_all();
    REQUIRE_EQ(rails.errors(), "");
    const int missing = static_cast<int>(generation);
    run(4, [&](int r) {
      rails.notify(r, rails.notify_args(r, 0));
      if (r != missing) rails.dispatch(r, rails.dispatch_args(r));
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    int failed = 0;
    for (int r = 0; r < 4; ++r)
      failed += world.error(r).kind == static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout);
    CHECK_EQ(failed, 3);
    rails.restart(generation);
    for (int r = 0; r < 4; ++r) {
      const OnGpuOf on(r);
      const kernels::DeviceDomain& node = rails.rank(r).domain.node;
      kernels::reset_state(node, 100 * generation, world.rank(r).stream);
      kernels::clear_error(node, world.rank(r).host, world.rank(r).stream);
      cuda(cudaStreamSynchronize(world.rank(r).stream));
      rows.fill(r, random);
    }
    rails.dispatch_all();
    REQUIRE_EQ(rails.errors(), "");
    CHECK_EQ(rows.check_heaps(), "");
  }
}

GPU_TEST_CASE("between nodes: another call on a rank of another rail is noticed by all") {
  const RailShape rail{2, 2};
  std::mt19937_64 random(64);
  World world(4, 50, 4, 16, 8, kLong);
  Rows rows(world, 50, row_shape(512));
  Rails rails(world, rows, rail, 50);
  fill_random(world, rows, random, {50});
  run(4, [&](int r) {
    const auto stream = world.rank(r).stream;
    internode::NotifyArgs args = rails.notify_args(r, 1);
    if (r == 3) args.signature.row_bytes = 99;
    rails.notify(r, args);
    rails.dispatch(r, rails.dispatch_args(r));
    if (world.wait_outcome(r, 1) != NotifyOutcome::kMismatch) throw std::runtime_error("wrong outcome");
    cuda(cudaStreamSynchronize(stream));
  });
  for (int r = 0; r < 4; ++r) {
    CHECK_EQ(world.error(r).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kCallMismatch));
    CHECK_EQ(rows.compare_heap(r, std::vector<char>(rows.heap_bytes(), static_cast<char>(kPoison))), "");
  }
}

GPU_TEST_CASE("between nodes: a rank that does not come is waited for until the deadline, and named") {
  const RailShape rail{2, 1};
  std::mt19937_64 random(65);
  World world(2, 50, 4, 16, 8, 0.2);
  Rows rows(world, 50, row_shape(512));
  Rails rails(world, rows, rail, 50);
  fill_random(world, rows, random, {50});
  const auto stream = world.rank(0).stream;
  rails.notify(0, rails.notify_args(0, 1));
  rails.dispatch(0, rails.dispatch_args(0));
  CHECK_EQ(static_cast<int>(world.wait_outcome(0, 1)), static_cast<int>(NotifyOutcome::kFailed));
  cuda(cudaStreamSynchronize(stream));
  CHECK_EQ(world.error(0).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout));
  CHECK_EQ(world.error(0).phase, static_cast<std::uint32_t>(layout::WaitPhase::kRecord));
  CHECK_EQ(world.error(0).peer, 1 + 1);  // the peer on node 1
}
