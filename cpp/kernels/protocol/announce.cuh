// How a call begins and ends on every rank: announcements, outcomes, epochs.
#pragma once

#include <cstdint>

#include "kernels/protocol/wait.cuh"

namespace deep_moe::kernels {

// What this rank does in this epoch, for one peer; then its epoch has to be stored with a release. `reason` only with a
// refusal.
__device__ __forceinline__ layout::Announce& fill_announcement(
    const WaitScope& scope, int peer, const layout::CallSignature& signature, std::uint64_t hash,
    std::int64_t num_tokens, const layout::Place& place, const layout::Place& weight_place,
    layout::CallStatus status = layout::CallStatus::kOk, const char* reason = nullptr,
    std::uint32_t num_reason_bytes = 0) {
  const DeviceDomain& domain = scope.domain;
  layout::Announce& record = domain.words.announce(domain.workspaces[peer], scope.epoch, domain.rank);
  record.status = static_cast<std::uint32_t>(status);
  record.num_reason_bytes = num_reason_bytes;
  record.hash = hash;
  record.signature = signature;
  record.num_tokens = num_tokens;
  record.place = place;
  record.weight_place = weight_place;
#pragma unroll 1
  for (std::uint32_t i = 0; i < num_reason_bytes; ++i) record.reason[i] = reason[i];
  return record;
}

template <typename... Args>
__device__ __forceinline__ void announce(const WaitScope& scope, int peer, const Args&... args) {
  ptx::st_release_sys(&fill_announcement(scope, peer, args...).epoch, scope.epoch);
}

// What a peer has announced for this epoch, once that is known to be there.
__device__ __forceinline__ const layout::Announce& announcement(const WaitScope& scope, int peer) {
  return scope.domain.words.announce(scope.mine(), scope.epoch, peer);
}

// Waits until a peer has said what it does in this epoch. kNone: the same call.
__device__ __forceinline__ layout::NotifyOutcome wait_for_announcement(const WaitScope& scope, int peer,
                                                                       std::uint64_t hash) {
  const layout::Announce& record = announcement(scope, peer);
  std::uint64_t seen;
  const bool there = wait_until(
      scope, layout::WaitPhase::kAnnounce, peer, scope.epoch, [&] { return ptx::ld_acquire_sys(&record.epoch); },
      [&](std::uint64_t epoch) { return epoch == scope.epoch; }, &seen);
  if (!there) return layout::NotifyOutcome::kFailed;
  const bool refused = record.status != static_cast<std::uint32_t>(layout::CallStatus::kOk);
  if (!refused && record.hash == hash) return layout::NotifyOutcome::kNone;
  report_error(scope, refused ? layout::KernelErrorKind::kPeerRefused : layout::KernelErrorKind::kCallMismatch,
               layout::WaitPhase::kAnnounce, peer, hash, record.hash, [&](layout::ErrorRecord& error) {
                 error.peer_signature = record.signature;
                 error.peer_status = record.status;
                 error.num_reason_bytes =
                     min(record.num_reason_bytes, static_cast<std::uint32_t>(layout::kReasonBytes));
#pragma unroll 1
                 for (std::uint32_t i = 0; i < error.num_reason_bytes; ++i) error.reason[i] = record.reason[i];
               });
  return refused ? layout::NotifyOutcome::kRefused : layout::NotifyOutcome::kMismatch;
}

// A word for the host, if it waits for any.
__device__ __forceinline__ void tell_host(std::uint32_t sequence, std::uint64_t* word, std::uint32_t value) {
  if (sequence != 0) ptx::st_relaxed_sys(word, layout::tag_count(sequence, value));
}

// The call is over; the next launch takes the next epoch.
__device__ __forceinline__ void finish(const WaitScope& scope, std::uint32_t sequence, layout::NotifyOutcome outcome) {
  layout::NotifyState& state = scope.state();
  const std::uint32_t value = static_cast<std::uint32_t>(outcome);
  ptx::st_relaxed_gpu(&state.outcome, layout::tag_count(scope.epoch, value));
  if (outcome != layout::NotifyOutcome::kFailed) ptx::st_relaxed_gpu(&state.epoch, scope.epoch);
  tell_host(sequence, &scope.domain.host_words.outcome(scope.domain.host), value);
}

}  // namespace deep_moe::kernels
