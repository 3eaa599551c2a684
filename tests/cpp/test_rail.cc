// The rings between nodes under a network that delays and reorders at random: every row and every sum has to be right;
// and where the network keeps less than it promises, that has to be noticed.
#include <doctest/doctest.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "rail_ranks.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

struct Outcome {
  std::vector<std::string> errors;
  std::int64_t num_overtakings = 0;
};

Outcome run(const World& world) {
  Shared shared(world);
  Outcome outcome;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank(shared, rank).run();
      } catch (const std::exception& error) {
        shared.failed = true;
        const std::lock_guard lock(mutex);
        outcome.errors.push_back("rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  outcome.num_overtakings = shared.network->num_overtakings();
  return outcome;
}

void must_pass(const World& world) {
  const Outcome outcome = run(world);
  for (const std::string& error : outcome.errors) MESSAGE(error);
  CHECK(outcome.errors.empty());
  CHECK(outcome.num_overtakings > 0);
}

}  // namespace

TEST_CASE("rows and sums arrive between nodes, whatever the network does") {
  const World worlds[] = {
      {2, 1, 2, 2, 6, 1, {40, 7, 0, 25}}, {2, 2, 2, 3, 10, 2, {30, 0, 17}}, {4, 1, 1, 1, 5, 3, {20, 9, 20}},
      {2, 4, 3, 2, 8, 4, {12, 15}},       {4, 2, 1, 2, 8, 5, {10, 11}},     {3, 2, 4, 8, 33, 6, {50, 3, 50}},
  };
  for (const World& world : worlds) {
    CAPTURE(world.seed);
    must_pass(world);
  }
}

TEST_CASE("a slow rank holds the others up and changes nothing") { must_pass({3, 2, 2, 2, 6, 7, {15, 15, 15}, true}); }

TEST_CASE("one call after the other over the same slots") { must_pass({2, 1, 1, 1, 4, 8, std::vector<int>(60, 3)}); }

// What the network breaks here is a data race as well, so not under a sanitizer that ends the program for that.
#if !defined(__SANITIZE_THREAD__)
TEST_CASE("signals that overtake their data are noticed") {
  const Outcome outcome = run({2, 2, 2, 4, 200, 9, {60, 60, 60}, false, Fault::kSignalsOvertakeData});
  CHECK_FALSE(outcome.errors.empty());
}

TEST_CASE("forged credits are noticed") {
  const Outcome outcome = run({2, 2, 2, 2, 50, 10, {60, 60, 60}, false, Fault::kForgedCredits});
  CHECK_FALSE(outcome.errors.empty());
}
#endif

TEST_CASE("a lost credit ends in a wait that says what is missing") {
  const Outcome outcome = run({2, 1, 2, 2, 6, 11, {100, 100}, false, Fault::kLostCredits});
  CHECK(std::any_of(outcome.errors.begin(), outcome.errors.end(), [](const std::string& error) {
    return error.find("waits for chunks or credits") != std::string::npos;
  }));
}

TEST_CASE("the regions of a rail's block do not overlap") {
  const layout::RailLayout rail({5, 3, 256, 100});
  // The last peer of node 1 is node 0, the first is node 2.
  CHECK(rail.word(RailRegion::kChunkArrived, 1, 0, 2) + 8 <= rail.word(RailRegion::kChunkCredit, 1, 2, 0));
  CHECK(rail.notify_word(7, 1, 0) + 8 <= rail.record(RailRegion::kNotifyIn, 0, 1, 2));
  CHECK(rail.record(RailRegion::kNotifyIn, 7, 1, 0) + 100 <= rail.record(RailRegion::kNotifyOut, 0, 1, 2));
  CHECK(rail.slot(RailRegion::kRingSlots, 1, 0, 2) + 256 <= rail.slot(RailRegion::kSendSlots, 1, 2, 0));
  CHECK(rail.slot(RailRegion::kSendSlots, 1, 0, 2) + 256 <= rail.bytes());
}

TEST_CASE("no two peers of a rank share a slot") {
  const layout::RailLayout rail({4, 2, 512, 100});
  for (int owner = 0; owner < 4; ++owner) {
    std::vector<std::size_t> seen;
    for (int peer = 0; peer < 4; ++peer) {
      for (int slot = 0; peer != owner && slot < 2; ++slot)
        seen.push_back(rail.slot(RailRegion::kRingSlots, owner, peer, slot));
    }
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
    CHECK(seen.back() + 512 <= rail.slot(RailRegion::kSendSlots, owner, (owner + 1) % 4, 0));
  }
}

TEST_CASE("a block within a number of bytes is at most that large, and as large as its slots allow") {
  for (const int nodes : {2, 3, 9, 128}) {
    CAPTURE(nodes);
    const std::size_t wanted = layout::rail_layout(nodes, 8, 8 * 14800).bytes();
    const layout::RailLayout within = layout::rail_layout_within(nodes, 8, wanted);
    CHECK(within.bytes() <= wanted);
    CHECK(within.shape().slot_bytes >= 8 * 14800);
    CHECK(layout::rail_layout_within(nodes, 8, 1).shape().slot_bytes == 0);
  }
}
