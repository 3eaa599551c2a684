// What the hosts of all ranks do together after construction: exchanges, growth, resets.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/device_world.hpp"
#include "cuda/device_world_messages.hpp"
#include "cuda/retire.hpp"

namespace deep_moe::cuda {

std::vector<DeviceWorld::Said> DeviceWorld::exchange(const char* phase, std::uint64_t value, const std::string& text) {
  int round = 0;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    round = ++round_;
  }
  send_all(kSaid, round, value, text);
  // What an earlier round, which some rank left by an error, has left behind is skipped.
  const auto heard = [&](int peer) {
    auto& said = peers_[peer].said;
    while (!said.empty() && said.front().first < round) said.pop_front();
    return !said.empty() && said.front().first == round;
  };
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_ && !heard(peer)) return peer;
    }
    return -1;
  };
  wait(phase, first_missing, [&](int) { return "expected its word in round " + std::to_string(round); });
  std::vector<Said> all;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer)
    all.push_back(peer == rank_ ? Said{value, text} : peers_[peer].said.front().second);
  return all;
}

std::vector<DeviceWorld::Said> DeviceWorld::exchange_in_call(const char* phase, int id, std::uint64_t value,
                                                             const std::string& text,
                                                             const std::function<void(int peer)>& look,
                                                             std::uint64_t* masked, bool mask_silent) {
  constexpr auto kLook = std::chrono::milliseconds(20);
  send_all(kSaidInCall, id, value, text);
  const auto takes_part = [&](int peer) { return peer != rank_ && (*masked >> peer & 1) == 0; };
  const auto heard = [&](int peer) {
    auto& said = peers_[peer].said_in_call;
    while (!said.empty() && said.front().first < id) said.pop_front();
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
        if (takes_part(peer) && !heard(peer)) blamed = peer;
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
    if (peer == rank_) all[static_cast<std::size_t>(peer)] = {value, text};
    if (takes_part(peer)) all[static_cast<std::size_t>(peer)] = peers_[peer].said_in_call.front().second;
  }
  return all;
}

bool DeviceWorld::announced(int peer, layout::Announce* record) {
  char* const base = workspace_->base();
  copy_from_device(&word_mirror_[kMirrorEpoch], &domain_.words.state(base).epoch, sizeof(std::uint64_t));
  wait_copied();
  const std::uint64_t next = layout::epoch_of(word_mirror_[kMirrorEpoch]) + 1;
  copy_from_device(announce_mirror_, &domain_.words.announce(base, next, peer), sizeof(*record));
  wait_copied();
  *record = *announce_mirror_;
  return record->epoch == next;
}

DeviceWorld::Growth DeviceWorld::run_round(const std::string& offer_failure) {
  Growth growth;
  for (Said& said : exchange("appending segments", 0, offer_failure)) growth.reasons.push_back(std::move(said.text));
  // Whoever has spoken has sent its segments before: they are mapped here, or it is known why not.
  std::string own_failure;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    own_failure = std::exchange(import_failure_, {});
  }
  bool mapped = true;
  const std::vector<Said> failures = exchange("mapping segments", 0, own_failure);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const std::string& failure = failures[static_cast<std::size_t>(peer)].text;
    std::string& reason = growth.reasons[static_cast<std::size_t>(peer)];
    if (failure.empty()) continue;
    mapped = false;
    if (reason.empty()) reason = failure;
  }
  if (!mapped) retire_round_segments();
  round_segments_.clear();
  growth.everywhere = std::all_of(growth.reasons.begin(), growth.reasons.end(),
                                  [](const std::string& reason) { return reason.empty(); });
  return growth;
}

void DeviceWorld::retire_round_segments() {
  for (const int id : round_segments_) {
    if (!heap_->retire(id)) continue;  // blocks of it are in use here, or it is the workspace
    set_table(rank_, id, nullptr);
    send_all(kRetired, id, 0, {});
  }
}

DeviceWorld::Growth DeviceWorld::grow(std::size_t bytes, std::size_t preferred) {
  drop_retired();
  std::string reason;
  try {
    if (bytes > 0 && !(preferred > bytes && heap_->grow(preferred, &reason)) && heap_->grow(bytes, &reason))
      reason.clear();
  } catch (const Error& error) {
    reason = error.what();
  }
  return run_round(reason);
}

// Every rank says where it wants to go once none of its kernels runs any more; all go to the largest. A rank that gives
// up (time-out) may ask again: what it has said stands, and what it has done is not done twice.
void DeviceWorld::reset() {
  layout::NotifyState& state = domain_.words.state(workspace_->base());
  if (cleared_generation_ <= generation_) {  // else no kernel has run since the state is new
    word_mirror_[kMirrorOne] = 1;
    copy_to_device(&state.failed, &word_mirror_[kMirrorOne], sizeof(state.failed));  // kernels leave
    if (nodes_) copy_to_device(&nodes_->state().failed, &word_mirror_[kMirrorOne], sizeof(state.failed));
    wait_copied();
    if (nodes_) nodes_->quiet(comm_stream());
    wait_idle("reset: this rank's kernels");
  }
  if (reset_to_.generation <= generation_) {
    word_mirror_[kMirrorNodesEpoch] = 0;
    copy_from_device(&word_mirror_[kMirrorEpoch], &state.epoch, sizeof(state.epoch));
    if (nodes_) copy_from_device(&word_mirror_[kMirrorNodesEpoch], &nodes_->state().epoch, sizeof(state.epoch));
    wait_copied();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const std::uint64_t epoch = std::max(layout::epoch_of(word_mirror_[kMirrorEpoch]), word_mirror_[kMirrorNodesEpoch]);
    reset_to_ = {generation_ + 1, epoch, round_};
  }
  agree_on_reset();
  Peer::Reset target = reset_to_;
  if (cleared_generation_ != target.generation) {
    {
      const std::lock_guard<std::recursive_mutex> lock(mutex_);
      for (const Peer& peer : peers_) {
        target.epoch = std::max(target.epoch, peer.reset_to.epoch);
        target.round = std::max(target.round, peer.reset_to.round);
      }
      round_ = target.round;
    }
    // Further than any rank can have started calls.
    kernels::reset_state(domain_, target.epoch + 2 * layout::kAnnounceDepth, comm_stream());
    kernels::clear_error(domain_, host_words(), comm_stream());
    if (nodes_) nodes_->restart(target.generation + 1, target.epoch + 2 * layout::kAnnounceDepth, comm_stream());
    wait_idle("reset: the new state");
    {
      const std::lock_guard<std::recursive_mutex> lock(mutex_);
      if (lost_peers_ != 0) send_lost_peers();  // what was told meanwhile has been cleared with the rest
      wait_copied();
    }
    cleared_generation_ = target.generation;
  }
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (Peer& peer : peers_) peer.said_in_call.clear();
  }
  send_all(kResetReached, -1, target.generation, {});
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_ && peers_[peer].reset_reached < target.generation) return peer;
    }
    return -1;
  };
  wait("reset", first_missing,
       [&](int) { return "expected that it reaches generation " + std::to_string(target.generation); });
  generation_ = target.generation;
}

void DeviceWorld::agree_on_reset() {
  std::uint64_t said = 0;
  const auto first_missing = [&] {
    take_messages();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (const Peer& peer : peers_) reset_to_.generation = std::max(reset_to_.generation, peer.reset_to.generation);
    if (said != reset_to_.generation) {
      said = reset_to_.generation;
      send_all(kResetTo, reset_to_.round, said, std::to_string(reset_to_.epoch));
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_ && peers_[peer].reset_to.generation < reset_to_.generation) return peer;
    }
    return -1;
  };
  wait("reset", first_missing, [](int) { return std::string("expected that it calls reset() too"); });
}

}  // namespace deep_moe::cuda
