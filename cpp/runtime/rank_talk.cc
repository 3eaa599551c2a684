#include "runtime/rank_talk.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include <deep_moe/error.hpp>

#include "runtime/poll.hpp"

namespace deep_moe {
namespace {

// Of numbers that come round.
bool is_before(int a, int b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) - static_cast<std::uint32_t>(b)) < 0;
}

}  // namespace

RankTalk::RankTalk(ControlChannel& channel, std::recursive_mutex& mutex, Options options)
    : channel_(channel),
      mutex_(mutex),
      options_(std::move(options)),
      rank_(options_.rank),
      num_ranks_(options_.num_ranks),
      peers_(static_cast<std::size_t>(options_.num_ranks)) {}

void RankTalk::send(int peer, std::uint32_t kind, int id, std::uint64_t value, const std::string& text) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (closed(peer)) return;
  channel_.send_segment(peer, {.id = id, .bytes = value, .fd = -1, .kind = kind, .text = text});
}

void RankTalk::send_all(std::uint32_t kind, int id, std::uint64_t value, const std::string& text) {
  for (int peer = 0; peer < num_ranks_; ++peer)
    if (peer != rank_) send(peer, kind, id, value, text);
}

void RankTalk::take_message(int peer, ControlChannel::SegmentMessage& message) {
  Peer& entry = peers_[static_cast<std::size_t>(peer)];
  switch (message.kind) {
    case kSaid: entry.said.push_back({message.id, {message.bytes, message.text}}); break;
    case kSaidInCall: entry.said_in_call.push_back({message.id, {message.bytes, message.text}}); break;
    case kResetTo: entry.reset_to = {message.bytes, std::stoull(message.text), message.id}; break;
    case kResetReached: entry.reset_reached = message.bytes; break;
    case kDeparted:
      entry.departed = true;
      entry.failure = message.text;
      if (message.bytes == 1) options_.lost(peer, !message.text.empty());
      break;
    default:
      if (message.kind < kOther) throw Error("rank " + std::to_string(peer) + " sent an unknown control message");
      options_.other(peer, message);
  }
}

void RankTalk::take_messages() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    Peer& entry = peers_[static_cast<std::size_t>(peer)];
    if (peer == rank_ || entry.closed) continue;
    ControlChannel::SegmentMessage message;
    bool closed = false;
    while (channel_.receive_segment(peer, &message, &closed)) take_message(peer, message);
    entry.closed = closed;
    if (closed && !entry.departed) options_.lost(peer, true);
  }
}

int RankTalk::missing(const std::function<bool(Peer& peer)>& is_here) {
  int first = -1;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    Peer& entry = peers_[static_cast<std::size_t>(peer)];
    if (peer == rank_ || is_here(entry)) continue;
    if (entry.departed || entry.closed) return peer;
    if (first < 0) first = peer;
  }
  return first;
}

std::vector<RankTalk::Said> RankTalk::exchange(const char* phase, std::uint64_t value, const std::string& text) {
  int round = 0;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    round = ++round_;
  }
  send_all(kSaid, round, value, text);
  // What an earlier round, which some rank left by an error, has left behind is skipped.
  const auto heard = [&](Peer& peer) {
    while (!peer.said.empty() && peer.said.front().first < round) peer.said.pop_front();
    return !peer.said.empty() && peer.said.front().first == round;
  };
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return missing(heard);
  };
  wait(phase, first_missing, [&](int) { return "expected its word in round " + std::to_string(round); });
  std::vector<Said> all;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer)
    all.push_back(peer == rank_ ? Said{value, text} : peers_[static_cast<std::size_t>(peer)].said.front().second);
  return all;
}

std::vector<RankTalk::Said> RankTalk::exchange_in_call(const char* phase, int id, std::uint64_t value,
                                                       const std::string& text,
                                                       const std::function<void(int peer)>& look, std::uint64_t* masked,
                                                       bool mask_silent) {
  constexpr auto kLook = std::chrono::milliseconds(20);
  send_all(kSaidInCall, id, value, text);
  const auto takes_part = [&](int peer) { return peer != rank_ && (*masked >> peer & 1) == 0; };
  const auto heard = [&](Peer& peer) {
    auto& said = peer.said_in_call;
    while (!said.empty() && is_before(said.front().first, id)) said.pop_front();
    return !said.empty() && said.front().first == id;
  };
  auto last_look = std::chrono::steady_clock::now();
  int blamed = -1;
  const auto first_missing = [&] {
    take_messages();
    blamed = -1;
    {
      const std::lock_guard<std::recursive_mutex> lock(mutex_);
      for (int peer = 0; peer < num_ranks_ && blamed < 0; ++peer)
        if (takes_part(peer) && !heard(peers_[static_cast<std::size_t>(peer)])) blamed = peer;
    }
    const auto now = std::chrono::steady_clock::now();
    if (blamed < 0 || now - last_look < kLook) return blamed;
    last_look = now;
    look(blamed);
    return blamed;
  };
  const auto describe = [&](int) { return std::string("expected its part of what all ranks do together here"); };
  for (;;) {
    try {
      wait(phase, first_missing, describe);
      break;
    } catch (const TimeoutError&) {
      if (!mask_silent) throw;
    } catch (const PeerLostError&) {
      if (!mask_silent) throw;
    }
    *masked |= std::uint64_t{1} << blamed;
  }
  std::vector<Said> all(static_cast<std::size_t>(num_ranks_));
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    Said& said = all[static_cast<std::size_t>(peer)];
    if (peer == rank_) said = {value, text};
    if (!takes_part(peer)) continue;
    auto& theirs = peers_[static_cast<std::size_t>(peer)].said_in_call;
    said = std::move(theirs.front().second);
    theirs.pop_front();  // it would not be older any more once numbers have come round
  }
  return all;
}

void RankTalk::want_reset(std::uint64_t epoch) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  reset_to_ = {generation_ + 1, epoch, round_};
}

RankTalk::Reset RankTalk::agree_on_reset() {
  std::uint64_t said = 0;
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (const Peer& peer : peers_) reset_to_.generation = std::max(reset_to_.generation, peer.reset_to.generation);
    if (said != reset_to_.generation) {
      said = reset_to_.generation;
      send_all(kResetTo, reset_to_.round, said, std::to_string(reset_to_.epoch));
    }
    return missing([&](const Peer& peer) { return peer.reset_to.generation >= reset_to_.generation; });
  };
  wait("reset", first_missing, [](int) { return std::string("expected that it calls reset() too"); });
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Reset target = reset_to_;
  for (const Peer& peer : peers_) {
    target.epoch = std::max(target.epoch, peer.reset_to.epoch);
    target.round = std::max(target.round, peer.reset_to.round);
  }
  round_ = std::max(round_, target.round);
  return target;
}

void RankTalk::reset_reached(std::uint64_t generation) {
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (Peer& peer : peers_) peer.said_in_call.clear();
  }
  send_all(kResetReached, -1, generation, {});
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return missing([&](const Peer& peer) { return peer.reset_reached >= generation; });
  };
  wait("reset", first_missing,
       [&](int) { return "expected that it reaches generation " + std::to_string(generation); });
  generation_ = generation;
}

void RankTalk::wait(const char* phase, const std::function<int()>& first_missing,
                    const std::function<std::string(int)>& describe) {
  const WaitRules rules{rank_, options_.timeout_seconds, options_.interrupt_check,
                        [this](int peer, std::string* how) { return peer_gone(peer, how); }};
  poll_until(rules, phase, first_missing, describe);
}

bool RankTalk::peer_gone(int peer, std::string* how) {
  if (peer == rank_) return false;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  // Asked before the messages are taken: the last one of who closes says why.
  const bool end_is_seen = !options_.same_process[static_cast<std::size_t>(peer)] && channel_.peer_closed(peer);
  take_messages();
  const Peer& entry = peers_[static_cast<std::size_t>(peer)];
  if (entry.departed) {
    *how = "has destroyed its Buffer" + (entry.failure.empty() ? "" : ", which had failed (" + entry.failure + "),");
    return true;
  }
  if (entry.closed || end_is_seen) {
    *how = channel_.is_remote(peer) ? "has ended (its process is gone, or its machine cannot be reached)"
                                    : "has ended (its process is gone)";
    return true;
  }
  return false;
}

void RankTalk::depart(bool idle, const std::string& failure) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || closed(peer)) continue;
    try {
      send(peer, kDeparted, -1, idle ? 1u : 0u, failure);
    } catch (const Error&) {  // it is gone too
    }
    peers_[static_cast<std::size_t>(peer)].closed = true;
  }
  channel_.close();
}

}  // namespace deep_moe
