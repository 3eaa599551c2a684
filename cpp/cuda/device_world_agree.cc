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
    for (int peer = 0; peer < num_ranks_; ++peer)
      if (peer != rank_ && near(peer)) talk_->send(peer, kRetired, id, 0, {});
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
  if (cleared_generation_ <= talk_->generation()) {  // else no kernel has run since the state is new
    word_mirror_[kMirrorOne] = 1;
    copy_to_device(&state.failed, &word_mirror_[kMirrorOne], sizeof(state.failed));  // kernels leave
    if (nodes_) copy_to_device(&nodes_->state().failed, &word_mirror_[kMirrorOne], sizeof(state.failed));
    wait_copied();
    if (nodes_) nodes_->quiet(comm_stream());
    wait_idle("reset: this rank's kernels");
  }
  if (!talk_->wants_reset()) {
    word_mirror_[kMirrorNodesEpoch] = 0;
    copy_from_device(&word_mirror_[kMirrorEpoch], &state.epoch, sizeof(state.epoch));
    if (nodes_) copy_from_device(&word_mirror_[kMirrorNodesEpoch], &nodes_->state().epoch, sizeof(state.epoch));
    wait_copied();
    talk_->want_reset(std::max(layout::epoch_of(word_mirror_[kMirrorEpoch]), word_mirror_[kMirrorNodesEpoch]));
  }
  const RankTalk::Reset target = talk_->agree_on_reset();
  if (cleared_generation_ != target.generation) {
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
  talk_->reset_reached(target.generation);
}

}  // namespace deep_moe::cuda
