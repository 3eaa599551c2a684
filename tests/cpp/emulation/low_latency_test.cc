// The low-latency kernels on the CPU against the scalar model of the GPU tests: small shapes, for fibers are slow.
#include "../gpu_low_latency.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

LowMode mode_of(bool halves, bool weights, int fp8, int num_blocks = 3) {
  LowMode mode;
  mode.halves = halves;
  mode.weights = weights;
  mode.fp8 = fp8 > 0;
  mode.round_scale = fp8 == 2;
  mode.ue8m0 = fp8 == 3;
  mode.short_ids = fp8 == 1;
  mode.num_blocks = num_blocks;
  return mode;
}

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
  struct Case {
    std::int64_t hidden, experts, topk, max_tokens;
    DType dtype;
    int num_blocks;
    std::int64_t gap;
    int fp8;
  };
  const Case cases[] = {
      {2880, 9, 4, 7, DType::kBFloat16, 5, 2, 0},   {8, 16, 1, 30, DType::kBFloat16, 3, 0, 0},
      {128, 16, 32, 5, DType::kFloat16, 4, 2, 1},   {4, 3, 2, 12, DType::kFloat32, 2, 4, 0},
      {640, 64, 64, 4, DType::kFloat32, 6, 0, 1},   {1024, 60, 22, 5, DType::kFloat16, 4, 0, 0},
      {512, 512, 6, 20, DType::kBFloat16, 4, 0, 2}, {256, 16, 14, 40, DType::kBFloat16, 1, 0, 0},
      {2048, 32, 8, 4, DType::kBFloat16, 3, 32, 3},
  };
  for (const Case& one : cases)
    for (const bool halves : {false, true})
      for (const bool weights : {false, true}) {
        CAPTURE(one.hidden);
        CAPTURE(halves);
        CAPTURE(weights);
        LowShape shape;
        shape.num_tokens = {one.max_tokens, one.max_tokens / 2};
        shape.max_tokens = one.max_tokens;
        shape.hidden = one.hidden;
        shape.num_experts = one.experts;
        shape.topk = one.topk;
        shape.dtype = one.dtype;
        LowMode mode = mode_of(halves, weights, one.fp8, one.num_blocks);
        mode.short_ids = false;
        mode.gap = one.gap;
        check_pair(ranks, shape, mode);
      }
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
  Meeting together(R);
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    Random same(5), mine(static_cast<std::uint64_t>(r) + 11);
    for (int round = 0; round < rounds; ++round) {
      CAPTURE(round);
      ranks.clear(r);
      std::vector<std::unique_ptr<LowModel>> models;
      std::vector<std::unique_ptr<LowCall>> open;
      const int count = 1 + static_cast<int>(same.below(3));
      for (int i = 0; i < count; ++i) {
        LowShape shape;
        shape.max_tokens = 1 + same.below(20);
        shape.num_tokens = {same.below(shape.max_tokens + 1), same.below(shape.max_tokens + 1)};
        shape.hidden = 128 * (1 + same.below(6));
        shape.num_experts = 2 + same.below(40);
        shape.topk = 1 + same.below(9);
        shape.dtype = same.below(2) == 0 ? DType::kBFloat16 : DType::kFloat16;
        shape.seed = static_cast<std::uint64_t>(round * 4 + i);
        models.push_back(std::make_unique<LowModel>(shape));
        LowMode mode = mode_of(true, same.below(2) == 0, same.below(2) == 0 ? 1 : 0);
        mode.logfmt = (round + i) % 3 == 1;
        mode.short_ids = false;
        mode.num_blocks = 1 + static_cast<int>(mine.below(5));
        open.push_back(std::make_unique<LowCall>(ranks, *models.back(), r, mode));
      }
      std::vector<std::size_t> order(open.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      const auto shuffle = [&] {
        for (std::size_t i = order.size(); i > 1; --i)
          std::swap(order[i - 1], order[static_cast<std::size_t>(mine.below(static_cast<std::int64_t>(i)))]);
      };
      for (auto& call : open) call->send_dispatch();
      if (mine.below(4) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(mine.below(3)));
      shuffle();
      for (const std::size_t i : order) open[i]->receive_dispatch();
      for (std::int64_t others = same.below(7) - 3; others > 0; --others)  // any other call takes an epoch
        kernels::notify(ranks.world.rank(r).domain, ranks.world.args(r, 0), ranks.world.rank(r).stream);
      for (auto& call : open) {
        call->check_dispatch();
        call->restore_inputs();
        call->make_outputs();
      }
      for (auto& call : open) call->send_combine();
      shuffle();
      for (const std::size_t i : order) open[i]->receive_combine();
      for (auto& call : open) call->check_combine();
    }
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
