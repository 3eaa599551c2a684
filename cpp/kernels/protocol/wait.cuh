// The one way for a kernel to wait, and to report what went wrong.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/timer.cuh"

namespace deep_moe::kernels {

// In shared memory: the first wait of a block that has failed, to be reported when the block leaves.
struct WaitFailure {
  std::uint32_t claimed;  // 0 at the start of the launch; then one more than the thread whose wait it was
  layout::KernelErrorKind kind;
  layout::WaitPhase phase;
  int peer;
  std::uint64_t expected, seen;
};

// Who waits: the same for every wait of a launch.
struct WaitScope {
  const DeviceDomain& domain;
  std::uint64_t epoch;
  const std::uint64_t* trouble = nullptr;  // low latency: holds the epoch once a peer is known to make another call
  WaitFailure* failure = nullptr;          // for wait_in_line
  std::uint64_t* masked = nullptr;         // low latency: ranks that are not waited for; who does not come is added

  __device__ bool in_trouble() const { return trouble != nullptr && ptx::ld_relaxed_gpu(trouble) == epoch; }
  __device__ char* mine() const { return domain.workspaces[domain.rank]; }
  __device__ layout::NotifyState& state() const { return domain.words.state(mine()); }
};

// Fills the record of such errors unless it holds an earlier one; `fill` adds to what is set here. One thread of many
// gets in.
template <typename Fill>
__device__ void report_error(const WaitScope& scope, layout::KernelErrorKind kind, layout::WaitPhase phase, int peer,
                             std::uint64_t expected, std::uint64_t seen, Fill fill) {
  const bool failure = layout::fails_buffer(kind);
  if (ptx::atom_exch_relaxed_gpu(&scope.state().error_claimed[failure ? 1 : 0], 1u) != 0) return;
  layout::ErrorRecord& record = scope.domain.host_words.error(scope.domain.host, failure);
  record.phase = static_cast<std::uint32_t>(phase);
  record.rank = scope.domain.rank;
  record.peer = peer;
  record.epoch = scope.epoch;
  record.expected = expected;
  record.seen = seen;
  record.num_reason_bytes = 0;
  fill(record);
  ptx::st_release_sys(&record.kind, static_cast<std::uint32_t>(kind));
}

// Where ranks may be masked, this one from now on, for this rank's kernels and its host. False: it may not.
static __device__ __noinline__ bool mask_rank(const DeviceDomain& domain, std::uint64_t* masked, int peer) {
  if (masked == nullptr || peer == domain.rank) return false;
  ptx::atom_or_relaxed_gpu(masked, std::uint64_t{1} << peer);
  ptx::st_release_sys(&domain.host_words.masked(domain.host)[peer], 1u);
  return true;
}
__device__ __forceinline__ bool is_masked(const std::uint64_t* masked, int peer) {
  return masked != nullptr && (ptx::ld_relaxed_gpu(masked) >> peer & 1) != 0;
}

// What a wait does now and then: looks at the clock, at the other blocks, at what the host knows of the peer. Returns
// when the wait began, to be passed again; kGiveUp once the deadline has passed or another block of this rank has given
// up; kPeerLost. These are not inlined: what is seldom run stays out of the way of what waits.
inline constexpr std::uint64_t kGiveUp = 0, kPeerLost = 1;
static __device__ __noinline__ std::uint64_t look_up_from_wait(const DeviceDomain& domain, std::uint64_t epoch,
                                                               const std::uint64_t* trouble, layout::WaitPhase phase,
                                                               int peer, std::uint64_t expected, std::uint64_t seen,
                                                               std::uint64_t start) {
  const WaitScope scope{domain, epoch, trouble};
  if (ptx::ld_relaxed_gpu(&scope.state().failed) != 0 || scope.in_trouble()) return kGiveUp;
  if ((ptx::ld_relaxed_gpu(&scope.state().lost_peers) >> peer & 1) != 0) return kPeerLost;
  const std::uint64_t now = ptx::globaltimer_ns();
  if (start == 0) start = now;
  if (now - start <= domain.timeout_ns) return start;
  ptx::st_relaxed_gpu(&scope.state().failed, 1u);
  report_error(scope, layout::KernelErrorKind::kTimeout, phase, peer, expected, seen, [](layout::ErrorRecord&) {});
  return kGiveUp;
}

static __device__ __noinline__ void report_lost_peer(const DeviceDomain& domain, std::uint64_t epoch,
                                                     layout::WaitPhase phase, int peer, std::uint64_t expected,
                                                     std::uint64_t seen) {
  const WaitScope scope{domain, epoch};
  ptx::st_relaxed_gpu(&scope.state().failed, 1u);
  report_error(scope, layout::KernelErrorKind::kPeerLost, phase, peer, expected, seen, [](layout::ErrorRecord&) {});
}

// Loads until `ready` says yes to what was loaded, and returns true with it in `*value`. Returns false when the
// deadline has passed, the peer is gone or another block of this rank has given up: the caller's block must leave, and
// every kernel after it does.
template <typename Load, typename Ready>
__device__ __forceinline__ bool wait_until(const WaitScope& scope, layout::WaitPhase phase, int peer,
                                           std::uint64_t expected, Load load, Ready ready, std::uint64_t* value) {
  constexpr int kRoundsPerLook = 64;
  std::uint64_t start = 0;
  for (int round = 1;; ++round) {
    *value = load();
    if (ready(*value)) return true;
    if (start == kPeerLost) {  // what the peer wrote last was there before the host knew that it is gone
      report_lost_peer(scope.domain, scope.epoch, phase, peer, expected, *value);
      return false;
    }
    if (round < kRoundsPerLook) continue;
    round = 0;
    start = look_up_from_wait(scope.domain, scope.epoch, scope.trouble, phase, peer, expected, *value, start);
    if (start == kGiveUp) return false;
  }
}

// The same for waits amid many registers in use, and true as well once the peer is masked, so that what was loaded has
// to be looked at where that may be: it looks around in line, and leaves the report for report_failure, for
// what is in use across a call of a function goes through memory.
template <typename Load, typename Ready>
__device__ __forceinline__ bool wait_in_line(const WaitScope& scope, layout::WaitPhase phase, int peer,
                                             std::uint64_t expected, Load load, Ready ready, std::uint64_t* value) {
  constexpr int kRoundsPerLook = 64;
  std::uint64_t start = 0;
  bool lost = false;
#pragma unroll 1
  for (int round = 1;; ++round) {
    *value = load();
    if (ready(*value)) return true;
    if (lost) break;  // what the peer wrote last was there before the host knew that it is gone
    if (round < kRoundsPerLook) continue;
    round = 0;
    if (ptx::ld_relaxed_gpu(&scope.state().failed) != 0 || scope.in_trouble()) return false;
    if (is_masked(scope.masked, peer)) return true;
    lost = (ptx::ld_relaxed_gpu(&scope.state().lost_peers) >> peer & 1) != 0;
    const std::uint64_t now = ptx::globaltimer_ns();
    if (start == 0) start = now;
    if (now - start > scope.domain.timeout_ns) break;
  }
  if (mask_rank(scope.domain, scope.masked, peer)) return true;
  ptx::st_relaxed_gpu(&scope.state().failed, 1u);
  if (atomicCAS(&scope.failure->claimed, 0u, threadIdx.x + 1) == 0) {
    scope.failure->kind = lost ? layout::KernelErrorKind::kPeerLost : layout::KernelErrorKind::kTimeout;
    scope.failure->phase = phase;
    scope.failure->peer = peer;
    scope.failure->expected = expected;
    scope.failure->seen = *value;
  }
  return false;
}

// Every thread that has waited in line and leaves for a wait that has failed.
static __device__ __noinline__ void report_failure(const DeviceDomain& domain, std::uint64_t epoch,
                                                   WaitFailure& failure) {
  if (atomicOr(&failure.claimed, 0u) != threadIdx.x + 1) return;  // the rest is what this thread has written
  report_error(WaitScope{domain, epoch}, failure.kind, failure.phase, failure.peer, failure.expected, failure.seen,
               [](layout::ErrorRecord&) {});
}

// The common case: a word that is its own flag.
template <typename Load>
__device__ __forceinline__ bool wait_for_tag(const WaitScope& scope, layout::WaitPhase phase, int peer, Load load,
                                             std::uint64_t* value) {
  return wait_until(
      scope, phase, peer, layout::tag_count(scope.epoch, 0), load,
      [&](std::uint64_t word) { return layout::has_tag(word, scope.epoch); }, value);
}

}  // namespace deep_moe::kernels
