#include "runtime/poll.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include <deep_moe/error.hpp>

#include "runtime/pause.hpp"

namespace deep_moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kUrgentSpin = std::chrono::milliseconds(1);
constexpr auto kUrgent = std::chrono::milliseconds(100);
constexpr auto kShortestNap = std::chrono::microseconds(10);
constexpr auto kLongestNap = std::chrono::microseconds(500);
constexpr auto kLookForLife = std::chrono::milliseconds(20);
constexpr auto kLookForInterrupts = std::chrono::milliseconds(50);

// While it lives, this thread's sleeps last little longer than asked for; the kernel's own slack is 50 us.
class ShortSleeps {
 public:
  ShortSleeps() : before_(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) {
    if (before_ > 0) ::prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);  // nanoseconds
  }
  ~ShortSleeps() {
    if (before_ > 0) ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before_), 0, 0, 0);
  }
  ShortSleeps(const ShortSleeps&) = delete;
  ShortSleeps& operator=(const ShortSleeps&) = delete;

 private:
  const int before_;
};

}  // namespace

void poll_until(const WaitRules& rules, const char* phase, const std::function<int()>& first_missing,
                const std::function<std::string(int)>& describe) {
  if (first_missing() < 0) return;
  const auto start = Clock::now();
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(rules.timeout_seconds));
  while (Clock::now() - start < (rules.urgent ? Clock::duration(kUrgentSpin) : Clock::duration(kSpin))) {
    for (int i = 0; i < 16; ++i) {
      if (first_missing() < 0) return;
      pause_cpu();
    }
  }
  std::optional<ShortSleeps> short_sleeps;
  if (rules.urgent) short_sleeps.emplace();
  auto nap = std::chrono::duration_cast<Clock::duration>(kShortestNap);
  auto last_interrupt_check = start, last_look_for_life = start;
  for (;;) {
    const int blamed = first_missing();
    if (blamed < 0) return;
    const auto who = [&] { return "rank " + std::to_string(blamed) + " in " + phase + ": " + describe(blamed); };
    const auto now = Clock::now();
    if (now - last_look_for_life >= kLookForLife && rules.peer_gone) {
      last_look_for_life = now;
      std::string how;
      // What the peer wrote before it went is still seen: look once more after its end was noticed.
      if (blamed != rules.rank && rules.peer_gone(blamed, &how)) {
        const int still_missing = first_missing();
        if (still_missing < 0) return;
        if (still_missing == blamed)
          throw PeerLostError("rank " + std::to_string(blamed) + " " + how + " while rank " +
                              std::to_string(rules.rank) + " waited for " + who());
      }
    }
    if (now >= deadline)
      throw TimeoutError("rank " + std::to_string(rules.rank) + " waited " +
                         std::to_string(std::chrono::duration<double>(now - start).count()) + " s for " + who());
    if (rules.interrupt_check && now - last_interrupt_check >= kLookForInterrupts) {
      last_interrupt_check = now;
      rules.interrupt_check();
    }
    std::this_thread::sleep_for(std::min(nap, deadline - now));
    if (!rules.urgent || now - start > kUrgent) nap = std::min<Clock::duration>(nap * 2, kLongestNap);
  }
}

}  // namespace deep_moe
