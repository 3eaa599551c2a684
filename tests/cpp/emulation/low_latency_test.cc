// The low-latency kernels on the CPU against the scalar model of the GPU tests: small shapes, for fibers are slow.
#include "../gpu_low_latency_cases.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

}  // namespace

TEST_CASE("low latency, emulated: ranks, halves, weights, rows as they are and cast") {
  for (const int num_ranks : {1, 2, 3, 4}) {
    CAPTURE(num_ranks);
    LowRanks ranks(num_ranks, 4 * kMiB, 16 * kMiB);
    LowShape shape;
    shape.num_ranks = num_ranks;
    shape.num_tokens.clear();
    for (int r = 0; r < num_ranks; ++r) shape.num_tokens.push_back(r % 3 == 1 ? 2 : 6 - r);
    shape.max_tokens = 7;
    shape.hidden = 1024;
    shape.num_experts = 15;
    shape.topk = 5;
    for (const bool halves : {false, true})
      for (const bool weights : {true, false})
        for (const int fp8 : {0, 1, 2, 3}) {
          CAPTURE(halves);
          CAPTURE(weights);
          CAPTURE(fp8);
          shape.seed += 1;
          check_pair(ranks, shape, mode_of(halves, weights, fp8, 2 + fp8), fp8 == 0 ? 2 : 1);
        }
  }
}

TEST_CASE("low latency, emulated: types, widths, experts a token, strides, few blocks") {
  LowRanks ranks(2, 16 * kMiB, 64 * kMiB);
  check_cases(ranks, kSmallCases);
}

TEST_CASE("low latency, emulated: rows with scales of their own travel as they are") {
  LowRanks ranks(3, 4 * kMiB, 16 * kMiB);
  for (const int item : {1, 2, 4, 8})
    for (const bool halves : {false, true}) {
      CAPTURE(item);
      CAPTURE(halves);
      LowShape shape;
      shape.num_ranks = 3;
      shape.num_tokens = {6, 0, 4};
      shape.max_tokens = 6;
      shape.hidden = 512;
      LowMode mode = mode_of(halves, true, 0);
      mode.scale_items = item == 1 ? 400 : 56;
      mode.scale_bytes = item;
      check_pair(ranks, shape, mode);
    }
}

TEST_CASE("low latency, emulated: no tokens, one hot expert, one token") {
  LowRanks ranks(2, 4 * kMiB, 16 * kMiB);
  for (const bool halves : {false, true})
    for (const std::vector<std::int64_t>& count :
         std::vector<std::vector<std::int64_t>>{{0, 0}, {16, 0}, {0, 1}, {1, 1}}) {
      CAPTURE(halves);
      CAPTURE(count[0]);
      LowShape shape;
      shape.num_tokens = count;
      check_pair(ranks, shape, mode_of(halves, true, 0));
    }
  LowShape shape;
  shape.num_tokens = {40, 40};
  shape.max_tokens = 40;
  shape.num_experts = 2;
  shape.topk = 1;
  check_pair(ranks, shape, mode_of(false, true, 0));
}

TEST_CASE("low latency, emulated: three calls in flight, halves in any order") {
  const int R = 2;
  LowRanks ranks(R, 2 * kMiB, 16 * kMiB);
  const char* calls = std::getenv("DEEP_MOE_EMULATED_ROUNDS");
  const int rounds = calls != nullptr ? std::atoi(calls) : 8;
  check_in_flight(
      ranks, rounds, 20, 3000,
      [](Random& same, Random& mine, int number) {
        const bool weights = same.below(2) == 0;
        LowMode mode = mode_of(true, weights, same.below(2) == 0 ? 1 : 0, 1 + static_cast<int>(mine.below(5)));
        mode.logfmt = number % 3 == 1;
        mode.short_ids = false;
        return mode;
      },
      [&](int r, Random& same) {
        for (std::int64_t others = same.below(7) - 3; others > 0; --others)  // any other call takes an epoch
          kernels::notify(ranks.world.rank(r).domain, ranks.world.args(r, 0), ranks.world.rank(r).stream);
      });
}

TEST_CASE("low latency, emulated: a rank that never comes is masked, and the others go on without it") {
  const int R = 3, gone = 2;
  for (const bool halves : {false, true}) {
    CAPTURE(halves);
    LowRanks ranks(R, 4 * kMiB, 16 * kMiB, 0.3);
    LowShape shape;
    shape.num_ranks = R;
    shape.num_tokens = {8, 5, 0};  // the model's rank that is gone has no tokens
    shape.max_tokens = 8;
    shape.hidden = 640;
    shape.num_experts = 12;
    LowModel model(shape);
    const LowMode mode = mode_of(halves, true, 1);
    Meeting together(R - 1);
    run(R - 1, [&](int r) {
      const Meeting::Leave leave{together};
      for (int call = 0; call < 3; ++call) {  // found out in the first, known in the others
        ranks.clear(r);
        LowCall one(ranks, model, r, mode);
        together.wait();
        const auto dispatch = [&](LowLatencyHalf half) {
          kernels::LowLatencyDispatchArgs args = one.dispatch_args(half);
          args.call.shrink = true;
          kernels::low_latency_dispatch(one.domain(), args, one.stream());
        };
        if (halves) {
          dispatch(LowLatencyHalf::kSend);
          dispatch(LowLatencyHalf::kReceive);
        } else {
          dispatch(LowLatencyHalf::kBoth);
        }
        expect(ranks.world.error(r).kind == 0, "an error in place of a mask");
        expect(ranks.world.rank(r).domain.host_words.masked(ranks.world.rank(r).host)[gone] == 1,
               "the rank is not masked");
        one.check_dispatch();
        together.wait();
      }
    });
  }
}

TEST_CASE("low latency, emulated: a rank that refuses is noticed, named, and the next call works") {
  for (const bool halves : {false, true}) {
    CAPTURE(halves);
    const int R = 2;
    LowRanks ranks(R, 4 * kMiB, 16 * kMiB, 10.0);
    LowShape shape;
    shape.num_tokens = {6, 9};
    shape.max_tokens = 9;
    LowModel model(shape);
    const LowMode mode = mode_of(halves, true, 0);
    Meeting together(R);
    run(R, [&](int r) {
      const Meeting::Leave leave{together};
      for (const int refuser : {-1, 1, -1, 0, -1}) {
        ranks.clear(r);
        LowCall call(ranks, model, r, mode);
        together.wait();
        if (r == refuser) {
          kernels::post_refusal(call.domain(), call.dispatch_args(LowLatencyHalf::kBoth).call.signature, "not today",
                                call.stream());
        } else {
          call.dispatch();
        }
        together.wait();
        const layout::ErrorRecord& error = ranks.world.error(r);
        if (refuser < 0) {
          expect(error.kind == 0, "an error in a good call");
          call.check_dispatch();
        } else if (r != refuser) {
          expect(error.kind == static_cast<std::uint32_t>(layout::KernelErrorKind::kPeerRefused), "no refusal is told");
          expect(error.peer == refuser, "another rank is named");
          expect(std::string(error.reason, error.num_reason_bytes) == "not today", "another reason");
          kernels::clear_error(call.domain(), ranks.world.rank(r).host, call.stream());
        }
        together.wait();
      }
    });
  }
}
