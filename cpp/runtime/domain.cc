#include "runtime/domain.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>

#include "runtime/pause.hpp"
#include "runtime/text.hpp"

namespace deep_moe {
namespace {

using Clock = std::chrono::steady_clock;
using layout::Region;

constexpr auto kNap = std::chrono::milliseconds(20);  // between looks at whether a peer still lives

enum ErrorKind : std::uint32_t { kTimeoutKind = 1, kPeerLostKind, kOtherKind };

void futex_wait(std::uint32_t& word, std::uint32_t seen, std::chrono::nanoseconds timeout) {
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(timeout.count() / 1000000000);
  relative.tv_nsec = static_cast<long>(timeout.count() % 1000000000);
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

void futex_wake(std::uint32_t& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Counts a sleeper for as long as it looks at the doorbell.
class Sleeper {
 public:
  explicit Sleeper(layout::Control& control) : waiters_(control.num_waiters) { waiters_.fetch_add(1); }
  ~Sleeper() { waiters_.fetch_sub(1); }

 private:
  std::atomic_ref<std::uint32_t> waiters_;
};

[[noreturn]] void throw_kind(std::uint32_t kind, const std::string& text) {
  if (kind == kTimeoutKind) throw TimeoutError(text);
  if (kind == kPeerLostKind) throw PeerLostError(text);
  throw Error(text);
}

std::uint32_t kind_of(const std::exception& error) {
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return kTimeoutKind;
  if (dynamic_cast<const PeerLostError*>(&error) != nullptr) return kPeerLostKind;
  if (dynamic_cast<const DestroyedError*>(&error) != nullptr) return kPeerLostKind;
  return kOtherKind;
}

// An announcement is written over one of kAnnounceDepth calls earlier, which a late hook may still look at. So the
// epoch is 0 while the rest changes, every word is stored with release and loaded with acquire, and the epoch is looked
// at again at the end: whoever has met a new word then meets its epoch too.
using RecordWord = std::uint64_t __attribute__((may_alias));

RecordWord* words_of(layout::Announce& record) { return reinterpret_cast<RecordWord*>(&record); }

constexpr std::size_t num_words(std::size_t num_reason_bytes) {
  return (offsetof(layout::Announce, reason) + num_reason_bytes + 7) / 8;
}

void write_announce(layout::Announce& slot, layout::Announce& record, std::uint64_t epoch) {
  store_release(slot.epoch, std::uint64_t{0});
  // The reason is long and mostly empty: only what is used of it crosses.
  for (std::size_t i = 1; i < num_words(record.num_reason_bytes); ++i)
    __atomic_store_n(words_of(slot) + i, words_of(record)[i], __ATOMIC_RELEASE);
  store_release(slot.epoch, epoch);
}

// False where the slot does not (or no longer) hold this epoch.
bool read_announce(layout::Announce& slot, std::uint64_t epoch, layout::Announce* record) {
  if (load_acquire(slot.epoch) != epoch) return false;
  const auto copy = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      words_of(*record)[i] = __atomic_load_n(words_of(slot) + i, __ATOMIC_ACQUIRE);
  };
  copy(1, 2);  // status and length
  if (record->num_reason_bytes > layout::kReasonBytes) return false;
  copy(2, num_words(record->num_reason_bytes));
  return load_acquire(slot.epoch) == epoch;
}

}  // namespace

void Domain::ring(int peer) {
  layout::Control& control = workspaces_[peer].control();
  std::atomic_ref<std::uint32_t>(control.doorbell).fetch_add(1);
  if (std::atomic_ref<std::uint32_t>(control.num_waiters).load() != 0) futex_wake(control.doorbell);
}

std::shared_ptr<Segment> Domain::fetch_segment(int peer, int id) {
  Peer& entry = peers_[peer];
  const auto known = [&]() -> std::shared_ptr<Segment> {
    return static_cast<std::size_t>(id) < entry.segments.size() ? entry.segments[id] : nullptr;
  };
  const auto keep = [&](int which, std::shared_ptr<Segment> segment) {
    if (entry.segments.size() <= static_cast<std::size_t>(which)) entry.segments.resize(which + 1);
    entry.segments[which] = std::move(segment);
  };
  if (auto segment = known()) return segment;
  if (peer == rank_) {
    keep(id, heap_->segment(id));
    return known();
  }
  if (entry.local) {
    if (auto segment = find_local_segment(entry.uid, id)) keep(id, std::move(segment));
    if (auto segment = known()) return segment;
    throw PeerLostError("rank " + std::to_string(peer) + " has freed the memory it had offered to rank " +
                        std::to_string(rank_));
  }
  const auto deadline = Clock::now() + std::chrono::duration<double>(options_.timeout_seconds);
  for (;;) {
    ControlChannel::SegmentMessage message;
    bool closed = false;
    while (channel_->receive_segment(peer, &message, &closed))
      keep(message.id, HostSegment::map(message.fd, message.bytes));
    if (auto segment = known()) return segment;
    if (closed)
      throw PeerLostError("rank " + std::to_string(peer) + " was lost before rank " + std::to_string(rank_) +
                          " could map its segment " + std::to_string(id));
    if (Clock::now() > deadline)
      throw TimeoutError("rank " + std::to_string(rank_) + " waited for segment " + std::to_string(id) + " of rank " +
                         std::to_string(peer));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

char* Domain::address(int peer, int segment, std::size_t offset) {
  Peer& entry = peers_[peer];
  if (segment >= 0 && static_cast<std::size_t>(segment) < entry.segments.size() && entry.segments[segment])
    return entry.segments[segment]->base() + offset;
  return fetch_segment(peer, segment)->base() + offset;
}

void Domain::announce_segment(int id, const std::shared_ptr<Segment>& segment) {
  register_local_segment(uid_, id, segment);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || peers_[peer].local) continue;
    channel_->send_segment(peer, {.id = id, .bytes = segment->bytes(), .fd = segment->fd()});
  }
}

void Domain::flow_control(std::uint64_t epoch) {
  const auto behind = [&](int peer) {
    if (peer == rank_ || masked_[peer]) return false;
    if (last_seen_[peer] + layout::kAnnounceDepth - 2 >= epoch) return false;
    for (int i = 0; i < layout::kAnnounceDepth; ++i)
      last_seen_[peer] = std::max(last_seen_[peer], load_acquire(mine().announce(i, peer).epoch));
    return last_seen_[peer] + layout::kAnnounceDepth - 2 < epoch;
  };
  wait_or_mask(
      "starting a call", epoch,
      [&] {
        for (int peer = 0; peer < num_ranks_; ++peer)
          if (behind(peer)) return peer;
        return -1;
      },
      [&](int peer) {
        return "it is at call " + std::to_string(last_seen_[peer]) + ", more than " +
               std::to_string(layout::kAnnounceDepth - 2) + " behind";
      });
}

std::uint64_t Domain::begin_call() {
  flow_control(epoch_ + 1);
  return epoch_ + 1;
}

std::uint64_t Domain::announce(const layout::Announce& announce) {
  const std::uint64_t epoch = begin_call();
  epoch_ = epoch;
  layout::Announce words = announce;
  words.hash = layout::signature_hash(words.signature);
  for (int i = 0; i < num_ranks_; ++i) {
    const int peer = (rank_ + 1 + i) % num_ranks_;
    write_announce(workspaces_[peer].announce(epoch, rank_), words, epoch);
    ring(peer);
  }
  return epoch;
}

void Domain::announce_refusal(const layout::CallSignature& signature, const std::string& reason) noexcept {
  try {
    layout::Announce words{};
    words.status = static_cast<std::uint32_t>(layout::CallStatus::kRefused);
    words.signature = signature;
    words.num_reason_bytes = copy_text(reason, words.reason, sizeof(words.reason));
    announce(words);
  } catch (...) {
    // The peers are lost or silent, or an interrupt has ended the wait: the refusal itself is still what the caller
    // sees.
    fail(std::current_exception());
  }
}

void Domain::check_announcement(int peer, std::uint64_t epoch) {
  if (peer == rank_) return;
  layout::Announce theirs, ours;
  if (!read_announce(mine().announce(epoch, peer), epoch, &theirs)) return;
  if (theirs.status == static_cast<std::uint32_t>(layout::CallStatus::kRefused)) {
    throw PeerRefusedError("rank " + std::to_string(peer) + " refused its " + call_name(theirs.signature.kind) +
                           " (call " + std::to_string(epoch) +
                           "): " + std::string(theirs.reason, theirs.num_reason_bytes));
  }
  if (!read_announce(mine().announce(epoch, rank_), epoch, &ours)) return;
  if (theirs.hash != ours.hash) {
    throw CallMismatchError("the ranks did not make the same call (call " + std::to_string(epoch) + "): rank " +
                            std::to_string(rank_) + " called " + describe_signature(ours.signature) + ", rank " +
                            std::to_string(peer) + " called " + describe_signature(theirs.signature));
  }
}

void Domain::gather_announcements(const char* phase, std::uint64_t epoch) {
  wait(
      phase, epoch,
      [&] {
        for (int peer = 0; peer < num_ranks_; ++peer) {
          if (!masked_[peer] && load_acquire(mine().announce(epoch, peer).epoch) < epoch) return peer;
        }
        return -1;
      },
      [&](int peer) {
        return "expected its call " + std::to_string(epoch) + ", last heard " + std::to_string(last_seen_[peer]);
      });
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (masked_[peer]) continue;
    const std::uint64_t newest = load_acquire(mine().announce(epoch, peer).epoch);
    if (newest != epoch)
      throw CallMismatchError("rank " + std::to_string(peer) + " is at call " + std::to_string(newest) +
                              " already and has skipped call " + std::to_string(epoch));
    last_seen_[peer] = std::max(last_seen_[peer], epoch);
    check_announcement(peer, epoch);
  }
}

bool Domain::peer_gone(int peer, std::string* how) {
  if (peer == rank_) return false;
  // Asked before the word is read, which is written before the end.
  const bool end_is_seen = !peers_[peer].local && channel_->peer_closed(peer);
  if (load_acquire(mine().word(Region::kDeparted, peer)) != 0) {
    *how = "has destroyed its Buffer";
    return true;
  }
  if (end_is_seen) {
    *how = "has ended (its process is gone)";
    return true;
  }
  return false;
}

void Domain::throw_if_aborted(int waiting_for) {
  for (int i = 0; i < num_ranks_; ++i) {
    const int peer = (waiting_for + i) % num_ranks_;
    layout::Abort& word = mine().abort(peer);
    if (peer == rank_ || masked_[peer] || load_acquire(word.generation) != generation_) continue;
    throw_kind(word.error_kind,
               "rank " + std::to_string(peer) + " gave up: " + std::string(word.reason, word.num_reason_bytes));
  }
}

void Domain::wait_impl(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
                       const std::function<std::string(int)>& describe, bool in_call) {
  own_verdict_ = false;
  for (int i = 0; i <= spin_rounds_; ++i) {
    if (first_missing() < 0) return;
    pause_cpu();
  }
  const auto start = Clock::now();
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_seconds));
  layout::Control& control = mine().control();
  auto last_interrupt_check = start;
  bool look_for_life = false;
  const Sleeper sleeper(control);
  for (;;) {
    const std::uint32_t bell = std::atomic_ref<std::uint32_t>(control.doorbell).load();
    const int blamed = first_missing();
    if (blamed < 0) return;
    if (in_call) {
      check_announcement(blamed, epoch);
      throw_if_aborted(blamed);
    }
    const auto who = [&] {
      return "rank " + std::to_string(blamed) + " in " + phase + " (call " + std::to_string(epoch) +
             "): " + describe(blamed);
    };
    std::string how;
    // What the peer wrote before it went is still seen: look once more after its end was noticed.
    if (look_for_life && peer_gone(blamed, &how)) {
      const int still_missing = first_missing();
      if (still_missing < 0) return;
      if (still_missing == blamed) {
        if (in_call) throw_if_aborted(blamed);
        own_verdict_ = true;
        throw PeerLostError("rank " + std::to_string(blamed) + " " + how + " while rank " + std::to_string(rank_) +
                            " waited for " + who());
      }
    }
    const auto now = Clock::now();
    if (now >= deadline) {
      own_verdict_ = true;
      throw TimeoutError("rank " + std::to_string(rank_) + " waited " +
                         std::to_string(std::chrono::duration<double>(now - start).count()) + " s for " + who());
    }
    if (options_.interrupt_check && now - last_interrupt_check >= std::chrono::milliseconds(50)) {
      last_interrupt_check = now;
      options_.interrupt_check();
    }
    const auto nap = std::min<std::chrono::nanoseconds>(kNap, deadline - now);
    futex_wait(control.doorbell, bell, nap);
    look_for_life = Clock::now() - now >= kNap / 2;
  }
}

void Domain::wait(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
                  const std::function<std::string(int)>& describe) {
  wait_impl(phase, epoch, first_missing, describe, true);
}

void Domain::wait_or_mask(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
                          const std::function<std::string(int)>& describe) {
  if (!options_.enable_shrink) return wait(phase, epoch, first_missing, describe);
  int blamed = -1;
  const auto first_unmasked = [&] { return blamed = first_missing(); };
  for (;;) {
    try {
      return wait(phase, epoch, first_unmasked, describe);
    } catch (const TimeoutError&) {
      if (!own_verdict_) throw;  // another rank's failure, which says nothing about the one that is missing here
      masked_[blamed] = true;
    } catch (const PeerLostError&) {
      if (!own_verdict_) throw;
      masked_[blamed] = true;
    }
  }
}

void Domain::fail(std::exception_ptr error) noexcept {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_) return;
    failure_ = error;
  }
  std::string text = "an unknown error";
  std::uint32_t kind = kOtherKind;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    text = e.what();
    kind = kind_of(e);
  } catch (...) {
  }
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    layout::Abort& word = workspaces_[peer].abort(rank_);
    if (load_acquire(word.generation) == generation_) continue;
    word.error_kind = kind;
    word.num_reason_bytes = copy_text(text, word.reason, sizeof(word.reason));
    store_release(word.generation, generation_);
    ring(peer);
  }
}

void Domain::check_failed() const {
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    failure = failure_;
  }
  if (failure) std::rethrow_exception(failure);
}

bool Domain::failed() const {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_ != nullptr;
}

bool Domain::any_masked() const { return std::find(masked_.begin(), masked_.end(), true) != masked_.end(); }

// Every rank proposes the generation and the epoch that it would go to, takes the largest of all proposals, and leaves
// once all ranks say that they take the same. One that gives up withdraws its words, so that no later reset meets them.
void Domain::reset(bool unmask) {
  const auto takes_part = [&](int peer) { return peer == rank_ || unmask || !masked_[peer]; };
  const auto post = [&](Region region, std::uint64_t value) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (!takes_part(peer)) continue;
      store_release(workspaces_[peer].word(region, rank_), value);
      ring(peer);
    }
  };
  const auto seen = [&](Region region, int peer) { return load_acquire(mine().word(region, peer)); };
  std::uint64_t agreed = layout::pack_reset(generation_ + 1, epoch_);
  try {
    post(Region::kResetProposal, agreed);
    wait_impl(
        "reset", epoch_,
        [&] {
          for (int peer = 0; peer < num_ranks_; ++peer)
            if (takes_part(peer) && seen(Region::kResetProposal, peer) == 0) return peer;
          return -1;
        },
        [](int) { return std::string("it has not called reset()"); }, false);
    post(Region::kResetAgreed, agreed);
    wait_impl(
        "reset", epoch_,
        [&] {
          std::uint64_t largest = agreed;
          for (int peer = 0; peer < num_ranks_; ++peer) {
            if (takes_part(peer))
              largest = std::max({largest, seen(Region::kResetProposal, peer), seen(Region::kResetAgreed, peer)});
          }
          if (largest != agreed) post(Region::kResetAgreed, agreed = largest);
          for (int peer = 0; peer < num_ranks_; ++peer)
            if (takes_part(peer) && seen(Region::kResetAgreed, peer) != agreed) return peer;
          return -1;
        },
        [&](int) { return "it has not agreed to generation " + std::to_string(layout::reset_generation(agreed)); },
        false);
  } catch (...) {
    post(Region::kResetProposal, 0);
    post(Region::kResetAgreed, 0);
    throw;
  }
  post(Region::kResetProposal, 0);  // all have seen it: they have agreed
  // Past every ring slot that the old generation may have left half used.
  epoch_ = layout::reset_epoch(agreed) + 2 * layout::kAnnounceDepth;
  generation_ = layout::reset_generation(agreed);
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_ = nullptr;
  }
  for (int peer = 0; peer < num_ranks_; ++peer) {
    last_seen_[peer] = epoch_;
    if (unmask) masked_[peer] = false;
  }
  heap_->release_quarantine();
}

void Domain::log_once(const std::string& text) {
  if (logged_) return;
  logged_ = true;
  std::fprintf(stderr, "deep_moe: rank %d %s\n", rank_, text.c_str());
}

void Domain::depart() noexcept {
  for (int peer = 0; peer < num_ranks_ && static_cast<std::size_t>(peer) < workspaces_.size(); ++peer) {
    if (peer == rank_) continue;
    store_release(workspaces_[peer].word(Region::kDeparted, rank_), std::uint64_t{1});
    ring(peer);
  }
  if (channel_) channel_->close();
  forget_local_segments(uid_);
}

Domain::~Domain() = default;

}  // namespace deep_moe
