// How waits of the host end.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include <deep_moe/error.hpp>

#include "runtime/poll.hpp"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

TEST_CASE("a wait for words ends with a time-out, a lost peer or an interrupt") {
  WaitRules rules{2, 0.2, {}, {}};
  const auto blame_1 = [] { return 1; };
  const auto describe = [](int) { return std::string("expected 7, saw 6"); };
  expect_throw<TimeoutError>([&] { poll_until(rules, "notify", blame_1, describe); },
                             "s for rank 1 in notify: expected 7, saw 6");
  rules.timeout_seconds = 30;
  rules.peer_gone = [](int peer, std::string* how) {
    *how = "has ended";
    return peer == 1;
  };
  expect_throw<PeerLostError>([&] { poll_until(rules, "notify", blame_1, describe); },
                              "rank 1 has ended while rank 2 waited for rank 1 in notify");
  rules.interrupt_check = [] { throw std::logic_error("interrupted"); };
  const auto blame_itself = [] { return 2; };  // its own kernel: no peer to look at
  CHECK_THROWS_AS(poll_until(rules, "notify", blame_itself, describe), std::logic_error);
  rules.interrupt_check = {};
  int looks = 0;
  poll_until(rules, "notify", [&] { return ++looks > 2000 ? -1 : 2; }, describe);
  CHECK(looks == 2001);
}

TEST_CASE("what a peer has said before its end counts at the deadline too") {
  bool gone = false;
  const auto until_gone = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the deadline passes before the first look for life
    return gone ? -1 : 1;
  };
  const WaitRules rules{2, 0.01, {}, [&](int, std::string*) { return gone = true; }};
  poll_until(rules, "notify", until_gone, [](int) { return std::string("its last word"); });
  CHECK(gone);
}
