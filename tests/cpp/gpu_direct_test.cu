// Low-latency calls between nodes against the scalar model, over mapped memory. The CPU runs the same file with small
// numbers over a network of its own (emulation/direct_test.cc).
#include "gpu_direct.cuh"
#include "gpu_low_latency_cases.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr std::int64_t kMiB = 1 << 20;
#ifdef DEEP_MOE_EMULATED
constexpr bool kSmall = true;
using Ranks = WiredRanks;
#else
constexpr bool kSmall = false;
using Ranks = DirectRanks;
#endif

const NodeShape kShapes[] = {{2, 1}, {2, 2}, {3, 1}, {3, 2, true}};

int blocks_for(int num_ranks) { return kSmall ? 3 : std::min(33, 128 / ranks_a_gpu(num_ranks)); }

std::vector<std::int64_t> tokens(int num_ranks, std::int64_t most) {
  std::vector<std::int64_t> count;
  for (int r = 0; r < num_ranks; ++r) count.push_back(r % 3 == 1 ? most / 3 : std::max<std::int64_t>(most - r, 0));
  return count;
}

// Calls body(ranks, shape) with ranks of each of kShapes, and a shape for them but for its rows.
template <typename Body>
void on_all_shapes(Body body) {
  for (const NodeShape& nodes : kShapes) {
    CAPTURE(nodes.num_nodes);
    CAPTURE(nodes.num_local_ranks);
    Ranks ranks(nodes, kSmall ? kMiB / 4 : kMiB, kSmall ? 24 * kMiB : 256 * kMiB);
    LowShape shape;
    shape.num_ranks = nodes.num_ranks();
    shape.num_tokens = tokens(shape.num_ranks, kSmall ? 6 : 33);
    shape.max_tokens = kSmall ? 7 : 40;
    shape.num_experts = kSmall ? 15 : 30;
    shape.topk = kSmall ? 5 : 8;
    body(ranks, shape);
  }
}

// What rank r is told of a call that `odd` (-1: nobody) refuses, or makes another one of. Clears it. True: all is well.
bool check_told(Ranks& ranks, LowCall& call, int r, int odd, bool refuses) {
  ranks.sync(r);
  const layout::ErrorRecord& error = ranks.world.error(r);
  const auto kind = static_cast<layout::KernelErrorKind>(error.kind);
  if (odd < 0) {
    expect(error.kind == 0, "an error in a good call");
    return true;
  }
  if (r == odd && refuses) {
    expect(error.kind == 0, "an error where this rank refused");
  } else if (r == odd) {
    expect(kind == layout::KernelErrorKind::kCallMismatch, "no other call is told");
  } else {
    expect(kind == (refuses ? layout::KernelErrorKind::kPeerRefused : layout::KernelErrorKind::kCallMismatch),
           "nothing is told");
    expect(error.peer == odd, "another rank is named");
    if (refuses) expect(std::string(error.reason, error.num_reason_bytes) == "not today", "another reason");
  }
  if (error.kind != 0) kernels::clear_error(call.domain(), ranks.world.rank(r).host, call.stream());
  ranks.sync(r);
  return false;
}

}  // namespace

TEST_CASE("low latency between nodes: bf16 and fp8, at once and in halves" * doctest::skip(no_gpu())) {
  on_all_shapes([](Ranks& ranks, LowShape& shape) {
    shape.hidden = kSmall ? 1024 : 1536;
    const int R = shape.num_ranks;
    for (const bool halves : {false, true})
      for (const bool weights : {true, false})
        for (const int kind : {0, 1, 2, 3}) {
          CAPTURE(halves);
          CAPTURE(weights);
          CAPTURE(kind);
          shape.seed += 1;
          const int blocks = kind == 1 ? 2 : kind == 2 ? 2 * R + 1 : blocks_for(R);
          check_pair(ranks, shape, mode_of(halves, weights, kind, blocks), kind == 0 ? 3 : 1);
        }
  });
}

TEST_CASE("low latency between nodes: types, widths, experts a token, strides" * doctest::skip(no_gpu())) {
  Ranks ranks({2, 1}, kSmall ? kMiB : 16 * kMiB, kSmall ? 64 * kMiB : 512 * kMiB);
  std::vector<LowCase> cases = kSmallCases;
  cases.push_back({128, 2048, 8, 6, DType::kBFloat16, 3, 0, 0});
  cases.push_back({64, 40, 3, 600, DType::kBFloat16, 4, 0, 0});
  check_cases(ranks, cases);
}

TEST_CASE("low latency between nodes: logarithms" * doctest::skip(no_gpu())) {
  on_all_shapes([](Ranks& ranks, LowShape& shape) {
    shape.hidden = kSmall ? 640 : 1536;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
      for (const bool halves : {false, true})
        for (const bool weights : {true, false}) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(halves);
          CAPTURE(weights);
          shape.dtype = dtype;
          shape.wild = dtype != DType::kFloat16;
          shape.seed += 1;
          LowMode mode = mode_of(halves, weights, 0, blocks_for(shape.num_ranks));
          mode.logfmt = true;
          check_pair(ranks, shape, mode, dtype == DType::kBFloat16 ? 3 : 1);
        }
  });
  Ranks ranks({2, 1}, kSmall ? kMiB : 16 * kMiB, kSmall ? 64 * kMiB : 512 * kMiB);
  std::vector<LowCase> cases = {{128, 16, 32, 5, DType::kFloat16, 4, 2},
                                {256, 64, 64, 4, DType::kFloat32, 6, 0},
                                {2048, 32, 8, 4, DType::kBFloat16, 3, 32},
                                {896, 70, 40, 3, DType::kBFloat16, 1, 0}};
  if (!kSmall) cases.push_back({7168, 256, 8, 40, DType::kBFloat16, 60, 0});
  check_cases(ranks, cases, [](LowShape&, LowMode& mode) { mode.logfmt = true; });
}

TEST_CASE("low latency between nodes: logarithms fit where the same rows as they are do not, and need whole blocks" *
          doctest::skip(no_gpu())) {
  LowShape shape;
  LowMode mode = mode_of(true, false, 0, 3);
  mode.logfmt = true;
  kernels::LowLatencyCombineArgs needs;
  needs.call.max_tokens = shape.max_tokens;
  needs.call.num_experts = static_cast<int>(shape.num_experts);
  needs.ids.topk = static_cast<int>(shape.topk);
  needs.hidden = shape.hidden;
  needs.logfmt = true;
  Ranks ranks({2, 1}, internode::direct_part_bytes(2, needs, true), 16 * kMiB);
  check_pair(ranks, shape, mode);
  const auto refused = [&](const std::string& why) {
    ranks.clear(0);
    LowModel model(shape);
    LowCall call(ranks, model, 0, mode);
    expect_throw<ArgumentError>([&] { call.launch_combine(LowLatencyHalf::kReceive); }, why);
  };
  mode.logfmt = false;
  refused("part_bytes");
  mode.logfmt = true;
  shape.hidden = 200;
  refused("multiple of 128 with logfmt");
}

TEST_CASE("low latency between nodes: rows with scales of their own travel as they are" * doctest::skip(no_gpu())) {
  Ranks ranks({3, 1}, kMiB / 4, 32 * kMiB);
  for (const int item : {1, 2, 4, 8})
    for (const bool halves : {false, true}) {
      CAPTURE(item);
      CAPTURE(halves);
      LowShape shape;
      shape.num_ranks = 3;
      shape.num_tokens = {6, 0, 4};
      shape.max_tokens = 6;
      shape.hidden = 512;
      LowMode mode = mode_of(halves, true, 0, 4);
      mode.scale_items = item == 1 ? 1300 : item == 8 ? 300 : 56;
      mode.scale_bytes = item;
      check_pair(ranks, shape, mode);
    }
}

TEST_CASE("low latency between nodes: no tokens, one hot expert, one token" * doctest::skip(no_gpu())) {
  Ranks ranks({2, 1}, kMiB, 64 * kMiB);
  for (const bool halves : {false, true})
    for (const std::vector<std::int64_t>& count :
         std::vector<std::vector<std::int64_t>>{{0, 0}, {16, 0}, {0, 1}, {1, 1}}) {
      CAPTURE(halves);
      CAPTURE(count[0]);
      LowShape shape;
      shape.num_tokens = count;
      LowMode mode = mode_of(halves, true, 0, 3);
      check_pair(ranks, shape, mode);
      mode.logfmt = true;
      for (const bool weights : {true, false}) {
        mode.weights = weights;
        check_pair(ranks, shape, mode);
      }
    }
  LowShape shape;
  shape.num_tokens = {40, 40};
  shape.max_tokens = 40;
  shape.num_experts = 2;
  shape.topk = 1;
  check_pair(ranks, shape, mode_of(false, true, 0, 3));
}

TEST_CASE("low latency between nodes: three calls in flight, halves in any order" * doctest::skip(no_gpu())) {
  const NodeShape nodes{2, 2};
  const int R = nodes.num_ranks();
  Ranks ranks(nodes, kMiB, 64 * kMiB);
  const char* calls = std::getenv(kSmall ? "DEEP_MOE_EMULATED_ROUNDS" : "DEEP_MOE_GPU_STRESS_CALLS");
  const int rounds =
      kSmall ? (calls != nullptr ? std::atoi(calls) : 8) : (calls != nullptr ? std::atoi(calls) : 1000) / 8;
  check_in_flight(
      ranks, rounds, 20, kSmall ? 3000 : 300,
      [R](Random& same, Random& mine, int number) {
        const bool weights = same.below(2) == 0;
        LowMode mode = mode_of(true, weights, same.below(2) == 0 ? 1 : 0, 1 + static_cast<int>(mine.below(2 * R)));
        mode.short_ids = false;
        mode.logfmt = number % 3 == 1;
        return mode;
      },
      [](int, Random&) {});
}

TEST_CASE("low latency between nodes: a rank that never comes is masked" * doctest::skip(no_gpu())) {
  const NodeShape nodes{3, 1};
  const int R = 3, gone = 2;
  for (const int kind : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const bool halves = kind % 2 != 0, weights = kind / 2 % 2 == 0, logfmt = kind / 4 != 0;
    CAPTURE(halves);
    CAPTURE(weights);
    CAPTURE(logfmt);
    Ranks ranks(nodes, kMiB / 4, 16 * kMiB, 0.3);
    LowShape shape;
    shape.num_ranks = R;
    shape.num_tokens = {8, 5, 0};  // the model's rank that is gone has no tokens
    shape.max_tokens = 8;
    shape.hidden = 640;
    shape.num_experts = 12;
    LowModel model(shape);
    LowMode mode = mode_of(halves, weights, 1, 3);
    mode.logfmt = logfmt;
    Meeting together(R - 1);
    run(R - 1, [&](int r) {
      const Meeting::Leave leave{together};
      for (int call = 0; call < 6; ++call) {  // found out in the first, known in the others
        ranks.clear(r);
        LowCall one(ranks, model, r, mode);
        together.wait();
        const auto dispatch = [&](LowLatencyHalf half) {
          kernels::LowLatencyDispatchArgs args = one.dispatch_args(half);
          args.call.shrink = true;
          ranks.dispatch(r, args);
        };
        const auto combine = [&](LowLatencyHalf half) {
          kernels::LowLatencyCombineArgs args = one.combine_args(half);
          args.call.shrink = true;
          ranks.combine(r, args);
        };
        const auto in_halves = [&](const auto& launch) {
          if (!halves) return launch(LowLatencyHalf::kBoth);
          launch(LowLatencyHalf::kSend);
          launch(LowLatencyHalf::kReceive);
        };
        in_halves(dispatch);
        ranks.sync(r);
        expect(ranks.world.error(r).kind == 0, "an error in place of a mask");
        expect(ranks.world.rank(r).domain.host_words.masked(ranks.world.rank(r).host)[gone] == 1,
               "the rank is not masked");
        one.check_dispatch();
        one.make_outputs();
        together.wait();
        in_halves(combine);
        one.check_combine({gone});
        together.wait();
      }
    });
  }
}

TEST_CASE("low latency between nodes: a rank that does not come within the deadline is named" *
          doctest::skip(no_gpu())) {
  const NodeShape nodes{2, 1};
  Ranks ranks(nodes, kMiB / 4, 16 * kMiB, 0.3);
  LowModel model(LowShape{});
  run(1, [&](int r) {
    LowCall call(ranks, model, r, mode_of(false, true, 0, 3));
    call.dispatch();
    ranks.sync(r);
    const layout::ErrorRecord& error = ranks.world.error(r);
    expect(error.kind == static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout), "no time-out");
    expect(error.peer == 1, "another rank is named");
    expect(error.phase == static_cast<std::uint32_t>(layout::WaitPhase::kRouting), "another phase");
  });
}

// Those of a rank that encodes its rows where others do not, or the other way round, are other calls.
TEST_CASE("low latency between nodes: combines that are refused, or travel otherwise on one rank, are noticed" *
          doctest::skip(no_gpu())) {
  for (const NodeShape& nodes : {NodeShape{2, 1}, NodeShape{2, 2}})
    for (const bool halves : {false, true}) {
      CAPTURE(halves);
      CAPTURE(nodes.num_local_ranks);
      const int R = nodes.num_ranks();
      Ranks ranks(nodes, kMiB / 4, 16 * kMiB, 20.0);
      LowShape shape;
      shape.num_ranks = R;
      shape.num_tokens = tokens(R, 9);
      shape.max_tokens = 9;
      LowModel model(shape);
      Meeting together(R);
      run(R, [&](int r) {
        const Meeting::Leave leave{together};
        Random same(halves ? 17 : 18);
        for (int round = 0; round < (kSmall ? 16 : 60); ++round) {
          const int odd = same.below(3) == 0 ? -1 : static_cast<int>(same.below(R));
          const bool refuses = same.below(2) == 0;
          LowMode mode = mode_of(halves, same.below(2) == 0, 0, R + 1);
          mode.logfmt = same.below(2) == 0;
          ranks.clear(r);
          if (r == odd && !refuses) mode.logfmt = !mode.logfmt;
          LowCall call(ranks, model, r, mode);
          together.wait();
          call.dispatch();
          call.check_dispatch();
          if (halves) call.restore_inputs();
          call.make_outputs();
          together.wait();
          if (r == odd && refuses)
            ranks.refuse(r, call.combine_args(LowLatencyHalf::kBoth).call, "not today");
          else
            call.combine();
          if (check_told(ranks, call, r, odd, refuses)) call.check_combine();
          together.wait();
        }
      });
    }
}

// Refusals, and calls that differ, in each slot; whoever is in trouble has answered nobody, and yet the slots come
// round.
TEST_CASE("low latency between nodes: refused and different calls are noticed, named, and the next call works" *
          doctest::skip(no_gpu())) {
  for (const NodeShape& nodes : {NodeShape{2, 1}, NodeShape{2, 2}, NodeShape{3, 1}})
    for (const bool halves : {false, true}) {
      CAPTURE(halves);
      CAPTURE(nodes.num_nodes);
      const int R = nodes.num_ranks();
      Ranks ranks(nodes, kMiB / 4, 16 * kMiB, 20.0);
      LowShape shape;
      shape.num_ranks = R;
      shape.num_tokens = tokens(R, 9);
      shape.max_tokens = 9;
      LowModel model(shape);
      const LowMode mode = mode_of(halves, true, 0, R + 1);
      Meeting together(R);
      run(R, [&](int r) {
        const Meeting::Leave leave{together};
        Random same(halves ? 7 : 8);
        for (int round = 0; round < (kSmall ? 16 : 60); ++round) {
          const int odd = same.below(2) == 0 ? -1 : static_cast<int>(same.below(R));
          const bool refuses = same.below(3) > 0;
          ranks.clear(r);
          LowCall call(ranks, model, r, mode);
          together.wait();
          if (r == odd && refuses) {
            ranks.refuse(r, call.dispatch_args(LowLatencyHalf::kBoth).call, "not today");
          } else if (r == odd) {
            kernels::LowLatencyDispatchArgs args = call.dispatch_args(LowLatencyHalf::kBoth);
            args.call.signature.topk += 100;
            ranks.dispatch(r, args);
          } else {
            call.dispatch();
          }
          if (check_told(ranks, call, r, odd, refuses)) call.check_dispatch();
          together.wait();
        }
      });
    }
}

// Nobody has answered the calls of any slot when it comes round, and a block has several ranks to answer: a refusal is
// one block, and so may be a call.
TEST_CASE("low latency between nodes: slots come round where a block serves several ranks and all calls were refused" *
          doctest::skip(no_gpu())) {
  for (const NodeShape& nodes : {NodeShape{3, 1}, NodeShape{2, 3}, NodeShape{3, 2, true}}) {
    CAPTURE(nodes.num_nodes);
    const int R = nodes.num_ranks();
    Ranks ranks(nodes, kMiB / 4, 24 * kMiB, 10.0);
    LowShape shape;
    shape.num_ranks = R;
    shape.num_tokens = tokens(R, 6);
    shape.max_tokens = 6;
    LowModel model(shape);
    Meeting together(R);
    run(R, [&](int r) {
      const Meeting::Leave leave{together};
      const auto take_error = [&](LowCall& call) {
        ranks.sync(r);
        const auto kind = static_cast<layout::KernelErrorKind>(ranks.world.error(r).kind);
        if (kind != layout::KernelErrorKind::kNone)
          kernels::clear_error(call.domain(), ranks.world.rank(r).host, call.stream());
        ranks.sync(r);
        return kind;
      };
      for (const int refusers : {R, 1, R}) {  // of each call: the lowest ranks
        for (int number = 0; number < 2 * layout::kLowLatencySlots + 1; ++number) {
          LowCall call(ranks, model, r, mode_of(false, true, 0, 1));
          if (r < refusers)
            ranks.refuse(r, call.dispatch_args(LowLatencyHalf::kBoth).call, "not today");
          else
            call.dispatch();
          expect(take_error(call) ==
                     (r < refusers ? layout::KernelErrorKind::kNone : layout::KernelErrorKind::kPeerRefused),
                 "another outcome of a refused call");
        }
        for (int number = 0; number < layout::kLowLatencySlots + 1; ++number) {
          ranks.clear(r);
          together.wait();
          LowCall call(ranks, model, r, mode_of(false, true, 0, 1 + number % 2));
          call.dispatch();
          expect(take_error(call) == layout::KernelErrorKind::kNone, "an error in a good call");
          call.check_dispatch();
          together.wait();
        }
      }
    });
  }
}
