// Layout and notify on a GPU against the same computation on the host: counts, positions, refusals, time-outs, replay.
#include <doctest/doctest.h>

#include <algorithm>

#include <deep_moe/error.hpp>

#include "gpu_world.cuh"
#include "layout/workspace.hpp"

using namespace deep_moe;
using namespace deep_moe::test;
using layout::NotifyOutcome;

#define GPU_TEST_CASE(name) TEST_CASE(name* doctest::skip(no_gpu()))

namespace {

// Waits are long where all ranks come; a checker makes kernels a hundred times slower.
constexpr double kLong = 100.0;

struct Shape {
  int num_ranks, topk, num_experts, id_bytes;
  std::vector<std::int64_t> num_tokens;  // by rank, repeated
  int num_blocks = 0;
};

// Compares what one notify of all ranks has left with the host's layout of the same ids.
void check_notify(World& world, std::uint32_t sequence) {
  const int R = world.num_ranks(), E = world.num_experts();
  const layout::ExpertBlocks experts(E, R);
  std::vector<HostLayoutResult> expected;
  std::vector<std::int32_t> matrix, prefix(R * R), totals(R, 0), expert_totals(E, 0);
  for (int src = 0; src < R; ++src) {
    expected.push_back(layout_on_host(world.rank(src).host_ids, world.topk(), E, R));
    for (int dst = 0; dst < R; ++dst) {
      matrix.push_back(expected[src].per_rank[dst]);
      prefix[src * R + dst] = totals[dst] += expected[src].per_rank[dst];
    }
    for (int e = 0; e < E; ++e) expert_totals[e] += expected[src].per_expert[e];
  }
  for (int r = 0; r < R; ++r) {
    CAPTURE(r);
    Rank& rank = world.rank(r);
    const HostLayoutResult& mine = expected[r];
    CHECK((world.read(r, rank.out.send_position, rank.num_tokens * R) == mine.position));
    CHECK((world.read(r, rank.out.is_token_in_rank, rank.num_tokens * R) == mine.in_rank));
    CHECK((world.read(r, rank.out.per_rank, R) == mine.per_rank));
    CHECK((world.read(r, rank.out.per_expert, E) == mine.per_expert));
    CHECK((world.read(r, rank.out.matrix, R * R) == matrix));
    CHECK((world.read(r, rank.out.prefix, R * R) == prefix));
    const int first = experts.first_expert(r), num_local = experts.num_local_experts(r);
    const std::vector<std::int32_t> local(expert_totals.begin() + first, expert_totals.begin() + first + num_local);
    CHECK((world.read(r, rank.out.recv, num_local) == local));
    if (sequence == 0) continue;
    const layout::HostLayout& words = rank.domain.host_words;
    for (int dst = 0; dst < R; ++dst) {
      CHECK_EQ(world.wait_host(r, words.rank_rows(rank.host)[dst], sequence), totals[dst]);
      CHECK_EQ(world.wait_host(r, words.rank_fit(rank.host)[dst], sequence), 0);
    }
    for (int l = 0; l < num_local; ++l) {
      CHECK_EQ(world.wait_host(r, words.expert_rows(rank.host)[l], sequence), local[l]);
    }
  }
}

// One call on every rank; all must come to `wanted`.
void notify_all(World& world, std::uint32_t sequence, NotifyOutcome wanted = NotifyOutcome::kRowsFit,
                const std::function<void(int, kernels::NotifyArgs&)>& change = {}) {
  std::vector<NotifyOutcome> outcomes(world.num_ranks());
  run(world.num_ranks(), [&](int r) {
    kernels::NotifyArgs args = world.args(r, sequence);
    if (change) change(r, args);
    kernels::notify(world.rank(r).domain, args, world.rank(r).stream);
    outcomes[r] = world.wait_outcome(r, sequence);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  for (int r = 0; r < world.num_ranks(); ++r) {
    CAPTURE(r);
    CHECK_EQ(static_cast<int>(outcomes[r]), static_cast<int>(wanted));
  }
}

void fill_random(World& world, std::mt19937_64& random, const std::vector<std::int64_t>& num_tokens, int id_bytes) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.set_ids(r,
                  random_ids(random, num_tokens[r % num_tokens.size()], world.topk(), world.num_experts(), id_bytes));
    world.poison(r);
  }
}

void clear_errors(World& world) {
  run(world.num_ranks(), [&](int r) {
    kernels::clear_error(world.rank(r).domain, world.rank(r).host, world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
}

int stress_calls() {
  const char* value = std::getenv("DEEP_MOE_GPU_STRESS_CALLS");
  return value ? std::atoi(value) : 20000;
}

}  // namespace

TEST_CASE("notify: the words of DeviceLayout are those of Workspace, and regions do not overlap") {
  for (const int R : {1, 2, 3, 8, 64}) {
    std::vector<char> memory(layout::device_workspace_bytes(R));
    const layout::Workspace workspace(memory.data(), R);
    const layout::DeviceLayout words(R);
    for (std::uint64_t epoch = 0; epoch < 20; ++epoch) {
      for (int src = 0; src < R; ++src)
        CHECK_EQ(&workspace.announce(epoch, src), &words.announce(memory.data(), epoch, src));
    }
    const char* begin = memory.data() + layout::workspace_bytes(R);
    CHECK_GE(reinterpret_cast<char*>(&words.state(memory.data())), begin);
    const std::uint64_t* last = words.expert_words(memory.data(), layout::kAnnounceDepth - 1, R - 1);
    CHECK_LE(reinterpret_cast<const char*>(last + layout::expert_count_stride(R)), memory.data() + memory.size());
  }
}

GPU_TEST_CASE("notify: equal to the host for every rank count, id type, uneven experts, no tokens") {
  const std::vector<Shape> shapes = {
      {1, 8, 256, 8, {4096}},
      {2, 8, 256, 8, {4096}},
      {2, 8, 256, 4, {4095, 0}},
      {3, 4, 16, 8, {63, 65, 672}},
      {4, 6, 37, 4, {0, 1, 300, 5000}},
      {8, 8, 60, 8, {100, 0, 257, 1}},
      {8, 10, 30, 4, {0}},
      {2, 64, 4096, 8, {300, 129}},
      {4, 1, 4096, 4, {20000, 3}},
      {5, 3, 3, 8, {400}},  // fewer experts than ranks
      {1, 22, layout::kMaxExperts, 8, {1000}},
      {64, 8, 200, 8, {40, 0, 300}},
      {12, 32, 130, 4, {999, 512}},
      {2, 8, 256, 8, {4096, 1000}, 1},  // one block reads all
      {3, 7, 256, 8, {9000}, 64},
  };
  std::mt19937_64 random(7);
  for (const Shape& shape : shapes) {
    CAPTURE(shape.num_ranks);
    CAPTURE(shape.topk);
    CAPTURE(shape.num_experts);
    CAPTURE(shape.id_bytes);
    const std::int64_t most = *std::max_element(shape.num_tokens.begin(), shape.num_tokens.end());
    World world(shape.num_ranks, most, shape.topk, shape.num_experts, shape.id_bytes, kLong);
    for (std::uint32_t sequence = 1; sequence <= 3; ++sequence) {
      fill_random(world, random, shape.num_tokens, shape.id_bytes);
      notify_all(world, sequence, NotifyOutcome::kRowsFit,
                 [&](int, kernels::NotifyArgs& args) { args.num_blocks = shape.num_blocks; });
      check_notify(world, sequence);
    }
    // The same from masks and counts, on some ranks.
    fill_random(world, random, shape.num_tokens, shape.id_bytes);
    for (int r = 0; r < shape.num_ranks; ++r) world.rank(r).use_mask = r % 3 != 1;
    notify_all(world, 4, NotifyOutcome::kRowsFit,
               [&](int, kernels::NotifyArgs& args) { args.num_blocks = shape.num_blocks; });
    check_notify(world, 4);
  }
}

GPU_TEST_CASE("notify: rows of ids may have a stride, and outputs may be left out") {
  std::mt19937_64 random(8);
  World world(2, 600, 6, 50, 8, kLong);
  fill_random(world, random, {600, 333}, 8);
  const std::vector<std::int64_t> all[2] = {world.rank(0).host_ids, world.rank(1).host_ids};
  notify_all(world, 1, NotifyOutcome::kRowsFit, [&](int r, kernels::NotifyArgs& args) {
    args.ids.topk = 5;  // the first five of six
    args.send_position = nullptr;
    args.num_tokens_per_rank = nullptr;
    args.rank_prefix_matrix = nullptr;
    args.recv_per_expert = nullptr;
    args.ids.num_tokens = world.rank(r).num_tokens;
  });
  for (int r = 0; r < 2; ++r) {
    std::vector<std::int64_t> five;
    for (std::size_t i = 0; i < all[r].size(); ++i)
      if (i % 6 != 5) five.push_back(all[r][i]);
    const HostLayoutResult expected = layout_on_host(five, 5, 50, 2);
    CHECK((world.read(r, world.rank(r).out.is_token_in_rank, world.rank(r).num_tokens * 2) == expected.in_rank));
    CHECK((world.read(r, world.rank(r).out.per_expert, 50) == expected.per_expert));
    CHECK_EQ(world.read(r, world.rank(r).out.recv, 1)[0], 0x5a5a5a5a);
  }
}

GPU_TEST_CASE("get_dispatch_layout: equal to the host") {
  std::mt19937_64 random(9);
  for (const Shape& shape : std::vector<Shape>{{1, 8, 256, 8, {4096}},
                                               {3, 4, 16, 4, {63}},
                                               {8, 8, 4096, 8, {0}},
                                               {64, 33, 300, 4, {9001}},
                                               {2, 9, layout::kMaxExperts, 8, {700}, 3}}) {
    World world(shape.num_ranks, shape.num_tokens[0], shape.topk, shape.num_experts, shape.id_bytes, kLong);
    for (int round = 0; round < 3; ++round) {
      world.set_ids(0, random_ids(random, shape.num_tokens[0], shape.topk, shape.num_experts, shape.id_bytes));
      world.poison(0);
      Rank& rank = world.rank(0);
      kernels::LayoutArgs args;
      args.ids = world.args(0, 0).ids;
      args.num_experts = shape.num_experts;
      args.num_blocks = shape.num_blocks;
      args.num_tokens_per_rank = rank.out.per_rank;
      args.num_tokens_per_expert = rank.out.per_expert;
      args.is_token_in_rank = rank.out.is_token_in_rank;
      kernels::get_dispatch_layout(rank.domain, args, rank.stream);
      const HostLayoutResult expected = layout_on_host(rank.host_ids, shape.topk, shape.num_experts, shape.num_ranks);
      CHECK((world.read(0, rank.out.per_rank, shape.num_ranks) == expected.per_rank));
      CHECK((world.read(0, rank.out.per_expert, shape.num_experts) == expected.per_expert));
      CHECK((world.read(0, rank.out.is_token_in_rank, rank.num_tokens * shape.num_ranks) == expected.in_rank));
    }
  }
}

GPU_TEST_CASE("notify: wrong arguments are refused before anything is launched") {
  World world(2, 16, 4, 8, 8, kLong);
  world.set_ids(0, std::vector<std::int64_t>(64, 1));
  const auto refused = [&](auto change) {
    kernels::NotifyArgs args = world.args(0, 1);
    kernels::DeviceDomain domain = world.rank(0).domain;
    change(domain, args);
    CHECK_THROWS_AS(kernels::notify(domain, args, world.rank(0).stream), ArgumentError);
  };
  refused([](auto&, auto& args) { args.ids.topk = layout::kMaxTopk + 1; });
  refused([](auto&, auto& args) { args.ids.id_bytes = 2; });
  refused([](auto&, auto& args) { args.ids.row_stride = 3; });
  refused([](auto&, auto& args) { args.ids.num_tokens = -1; });
  refused([](auto&, auto& args) { args.ids.data = nullptr; });
  refused([](auto&, auto& args) { args.ids.topk = 0; });
  refused([](auto&, auto& args) { args.num_experts = 0; });
  refused([](auto&, auto& args) { args.num_blocks = layout::kMaxNotifyBlocks + 1; });
  refused([](auto& domain, auto&) { domain.num_ranks = layout::kMaxKernelRanks + 1; });
  refused([](auto& domain, auto&) { domain.rank = 2; });
  cuda(cudaStreamSynchronize(world.rank(0).stream));
  CHECK_EQ(world.read(0, &world.rank(0).domain.words.state(world.rank(0).domain.workspaces[0]).epoch, 1)[0], 0);
}

GPU_TEST_CASE("notify: every rank sees whose place is too small") {
  std::mt19937_64 random(10);
  World world(3, 200, 4, 16, 8, kLong);
  fill_random(world, random, {200}, 8);
  std::int64_t rows_at_1 = 0;
  for (int src = 0; src < 3; ++src) rows_at_1 += layout_on_host(world.rank(src).host_ids, 4, 16, 3).per_rank[1];
  const auto place = [&](std::int64_t capacity, std::int32_t flags) {
    return [=](int r, kernels::NotifyArgs& args) {
      if (r != 1) return;
      args.place.capacity = capacity;
      args.place.flags = flags;
    };
  };
  const auto fits = [&](std::uint32_t sequence) {
    std::vector<std::uint32_t> seen;
    for (int r = 0; r < 3; ++r) {
      const layout::HostLayout& words = world.rank(r).domain.host_words;
      for (int dst = 0; dst < 3; ++dst)
        seen.push_back(world.wait_host(r, words.rank_fit(world.rank(r).host)[dst], sequence));
    }
    return seen;
  };
  notify_all(world, 1, NotifyOutcome::kRowsFit, place(rows_at_1, layout::kPlaceHard));
  CHECK((fits(1) == std::vector<std::uint32_t>(9, 0)));
  notify_all(world, 2, NotifyOutcome::kTooSmall, place(rows_at_1 - 1, 0));
  CHECK((fits(2) == std::vector<std::uint32_t>{0, 1, 0, 0, 1, 0, 0, 1, 0}));
  notify_all(world, 3, NotifyOutcome::kTooSmallHard, place(0, layout::kPlaceHard));
  CHECK((fits(3) == std::vector<std::uint32_t>{0, 2, 0, 0, 2, 0, 0, 2, 0}));
  for (int r = 0; r < 3; ++r) {
    const layout::ErrorRecord& error = world.error(r);
    CHECK(error.kind == static_cast<std::uint32_t>(layout::KernelErrorKind::kTooFewRows));
    CHECK(error.peer == 1);
    CHECK(error.expected == 0);
    CHECK(error.seen == static_cast<std::uint64_t>(rows_at_1));
  }
}

GPU_TEST_CASE("notify: ranks that make different calls all see it, and the next call works") {
  std::mt19937_64 random(11);
  World world(3, 100, 4, 16, 8, kLong);
  fill_random(world, random, {100, 0, 50}, 8);
  notify_all(world, 1, NotifyOutcome::kMismatch, [](int r, kernels::NotifyArgs& args) {
    if (r == 2) args.signature.row_bytes = 4096, args.num_experts = 15;
  });
  for (int r = 0; r < 3; ++r) {
    CAPTURE(r);
    const layout::ErrorRecord& error = world.error(r);
    CHECK_EQ(error.kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kCallMismatch));
    CHECK_EQ(error.rank, r);
    CHECK_EQ(error.epoch, 1);
    CHECK_EQ(error.peer == 2, r != 2);
    CHECK_EQ(error.peer_signature.row_bytes, r == 2 ? 0 : 4096);
    CHECK_EQ(error.seen, layout::signature_hash(error.peer_signature));
  }
  clear_errors(world);
  for (int r = 0; r < 3; ++r) world.poison(r);
  notify_all(world, 2);
  check_notify(world, 2);
  CHECK_EQ(world.error(0).kind, 0);
}

GPU_TEST_CASE("notify: a refusal reaches every peer with its reason; refusals may run ahead; the next call works") {
  std::mt19937_64 random(12);
  World world(3, 100, 4, 16, 8, kLong);
  fill_random(world, random, {100, 0, 50}, 8);
  const std::string reason = "num_experts is 0; allowed: 1 to 16384";
  const layout::CallSignature signature = world.args(1, 0).signature;
  constexpr std::uint32_t kRounds = 30;
  run(3, [&](int r) {
    Rank& rank = world.rank(r);
    for (std::uint32_t sequence = 1; sequence <= kRounds; ++sequence) {
      if (r == 1) {
        kernels::post_refusal(rank.domain, signature, reason, rank.stream);  // as far ahead as the ring lets it
        continue;
      }
      if (sequence % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      kernels::notify(rank.domain, world.args(r, sequence), rank.stream);
      if (world.wait_outcome(r, sequence) != NotifyOutcome::kRefused) throw std::runtime_error("not refused");
    }
    cuda(cudaStreamSynchronize(rank.stream));
  });
  for (const int r : {0, 2}) {
    const layout::ErrorRecord& error = world.error(r);
    CHECK_EQ(error.kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kPeerRefused));
    CHECK_EQ(error.peer, 1);
    CHECK_EQ(error.epoch, 1);  // the first is kept until it is taken
    CHECK_EQ(std::string(error.reason, error.num_reason_bytes), reason);
  }
  // All refuse at once, oftener than the ring is deep, each at its own pace.
  run(3, [&](int r) {
    for (int i = 0; i < 40; ++i) kernels::post_refusal(world.rank(r).domain, signature, reason, world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  clear_errors(world);
  for (int r = 0; r < 3; ++r) world.poison(r);
  notify_all(world, kRounds + 1);
  check_notify(world, kRounds + 1);
}

GPU_TEST_CASE("time-out: who does not come is named, the others leave in time, a reset makes all good") {
  std::mt19937_64 random(13);
  constexpr double kTimeout = 0.3;
  World world(3, 300, 4, 16, 8, kTimeout);
  fill_random(world, random, {300}, 8);
  const auto launch_two = [&](std::uint32_t sequence) {
    const auto start = std::chrono::steady_clock::now();
    run(2, [&](int r) {
      kernels::notify(world.rank(r).domain, world.args(r, sequence), world.rank(r).stream);
      CHECK_EQ(static_cast<int>(world.wait_outcome(r, sequence)), static_cast<int>(NotifyOutcome::kFailed));
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto check_record = [&](layout::WaitPhase phase, std::uint64_t epoch, std::uint64_t expected) {
    for (int r = 0; r < 2; ++r) {
      CAPTURE(r);
      const layout::ErrorRecord& error = world.error(r);
      CHECK_EQ(error.kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout));
      CHECK_EQ(std::string(wait_phase_name(static_cast<layout::WaitPhase>(error.phase))), wait_phase_name(phase));
      CHECK_EQ(error.rank, r);
      CHECK_EQ(error.peer, 2);
      CHECK_EQ(error.epoch, epoch);
      CHECK_EQ(error.expected, expected);
      CHECK_NE(error.seen, expected);
    }
  };
  const auto reset = [&](std::uint64_t epoch) {
    clear_errors(world);
    run(3, [&](int r) {
      kernels::reset_state(world.rank(r).domain, epoch, world.rank(r).stream);
      cuda(cudaStreamSynchronize(world.rank(r).stream));
      world.poison(r);
    });
  };

  // Rank 2 never launches.
  const double waited = launch_two(1);
  CHECK_GE(waited, kTimeout);
  CHECK_LT(waited, kTimeout + 1.0);
  check_record(layout::WaitPhase::kAnnounce, 1, 1);
  CHECK_LT(launch_two(2), kTimeout / 2);  // failed: every launch leaves at once
  check_record(layout::WaitPhase::kAnnounce, 1, 1);
  reset(5);
  notify_all(world, 3);
  check_notify(world, 3);

  // Rank 2 announces epoch 7 and is never heard of again.
  for (int r = 0; r < 2; ++r) {
    layout::Announce last = {};
    last.epoch = 7;
    last.hash = layout::signature_hash(world.args(2, 0).signature);
    layout::Announce& slot = layout::Workspace(world.rank(r).domain.workspaces[r], 3).announce(7, 2);
    cuda(cudaMemcpyAsync(&slot, &last, sizeof(last), cudaMemcpyDefault, world.rank(r).stream));
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  }
  CHECK_GE(launch_two(4), kTimeout);
  check_record(layout::WaitPhase::kCountWords, 7, layout::tag_count(7, 0));
  reset(7);
  for (std::uint32_t sequence = 5; sequence < 25; ++sequence) {
    // A refusal right after a reset must not wait for epochs before it.
    if (sequence == 5) {
      run(3, [&](int r) { kernels::post_refusal(world.rank(r).domain, {}, "no", world.rank(r).stream); });
    }
    notify_all(world, sequence);
  }
  check_notify(world, 24);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

GPU_TEST_CASE("stress: thousands of calls with other ids each time, ranks at their own pace") {
  constexpr int R = 4, kTopk = 6, E = 37, kSets = 24, kMaxTokens = 700;
  struct Set {
    std::int64_t num_tokens;
    std::int64_t offset;  // in the bank
    HostLayoutResult expected;
  };
  std::mt19937_64 random(14);
  World world(R, kSets * kMaxTokens, kTopk, E, 8, kLong);
  std::vector<Set> sets[R];
  for (int r = 0; r < R; ++r) {
    std::vector<std::int64_t> bank;
    for (int s = 0; s < kSets; ++s) {
      const std::int64_t num_tokens = s % 6 == 0 ? 0 : static_cast<std::int64_t>(random() % kMaxTokens);
      const std::vector<std::int64_t> ids = random_ids(random, num_tokens, kTopk, E, 8);
      sets[r].push_back({num_tokens, static_cast<std::int64_t>(bank.size()), layout_on_host(ids, kTopk, E, R)});
      bank.insert(bank.end(), ids.begin(), ids.end());
    }
    world.set_ids(r, bank);
  }
  const layout::ExpertBlocks experts(E, R);
  const auto set_of = [&](int call, int r) -> const Set& {
    return sets[r]
               [(static_cast<std::uint64_t>(call) * 2654435761u + static_cast<std::uint64_t>(r) * 40503u) / 7 % kSets];
  };
  std::atomic<std::int64_t> wrong{0};
  Meeting together(R);
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    Rank& rank = world.rank(r);
    std::mt19937 pace(r);
    for (int call = 1; call <= stress_calls(); ++call) {
      const Set& set = set_of(call, r);
      kernels::NotifyArgs args = world.args(r, static_cast<std::uint32_t>(call));
      args.ids.data = static_cast<const std::int64_t*>(rank.ids) + set.offset;
      args.ids.num_tokens = set.num_tokens;
      args.num_blocks = 1 + static_cast<int>(pace() % 20);  // ranks need not agree on it
      kernels::notify(rank.domain, args, rank.stream);
      if (pace() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 500));
      wrong += world.wait_outcome(r, args.sequence) != NotifyOutcome::kRowsFit;
      std::vector<std::int32_t> expert_totals(E, 0), totals(R, 0);
      for (int src = 0; src < R; ++src) {
        const HostLayoutResult& theirs = set_of(call, src).expected;
        for (int dst = 0; dst < R; ++dst) totals[dst] += theirs.per_rank[dst];
        for (int e = 0; e < E; ++e) expert_totals[e] += theirs.per_expert[e];
      }
      for (int dst = 0; dst < R; ++dst) {
        const std::uint32_t rows = world.wait_host(r, rank.domain.host_words.rank_rows(rank.host)[dst], args.sequence);
        wrong += rows != static_cast<std::uint32_t>(totals[dst]);
      }
      for (int l = 0; l < experts.num_local_experts(r); ++l) {
        const std::uint32_t rows = world.wait_host(r, rank.domain.host_words.expert_rows(rank.host)[l], args.sequence);
        wrong += rows != static_cast<std::uint32_t>(expert_totals[experts.first_expert(r) + l]);
      }
      if (call % 8 != 0) continue;
      together.wait();  // copies run while no kernel waits: some checkers let neither end before the other
      wrong += world.read(r, rank.out.send_position, set.num_tokens * R) != set.expected.position;
      together.wait();
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

GPU_TEST_CASE("graph: replays take new epochs and new ids, beside ranks that launch") {
  std::mt19937_64 random(15);
  constexpr int R = 3, kReplays = 40;
  World world(R, 300, 4, 16, 4, kLong);
  fill_random(world, random, {300, 120, 0}, 4);
  cudaGraphExec_t replay[R] = {};
  for (int r = 0; r < 2; ++r) {  // rank 2 launches
    const OnGpuOf on(r);
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(world.rank(r).stream, cudaStreamCaptureModeThreadLocal));
    kernels::notify(world.rank(r).domain, world.args(r, 0), world.rank(r).stream);
    cuda(cudaStreamEndCapture(world.rank(r).stream, &graph));
    cuda(cudaGraphInstantiate(&replay[r], graph, 0));
    cuda(cudaGraphUpload(replay[r], world.rank(r).stream));
    cuda(cudaGraphDestroy(graph));
  }
  for (int i = 0; i < kReplays; ++i) {
    for (int r = 0; r < R; ++r) {
      world.set_ids(r, random_ids(random, world.rank(r).num_tokens, 4, 16, 4));
      world.poison(r);
    }
    run(R, [&](int r) {
      for (int again = 0; again < 5; ++again) {
        if (replay[r]) {
          cuda(cudaGraphLaunch(replay[r], world.rank(r).stream));
        } else {
          kernels::notify(world.rank(r).domain, world.args(r, 0), world.rank(r).stream);
        }
      }
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    check_notify(world, 0);
  }
  for (int r = 0; r < R; ++r) {
    const layout::NotifyState& state = world.rank(r).domain.words.state(world.rank(r).domain.workspaces[r]);
    CHECK_EQ(world.read(r, &state.epoch, 1)[0], 5 * kReplays);
    if (replay[r]) cuda(cudaGraphExecDestroy(replay[r]));
  }
}
