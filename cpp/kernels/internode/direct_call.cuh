// How a low-latency call between nodes begins and ends, and the messages of it: P1 to P5 of docs/internode.md.
// README.md beside this file has the words and the order among them.
#pragma once

#include <cstdint>

#include "kernels/internode/network.cuh"
#include "kernels/internode/tuning.hpp"
#include "kernels/low_latency/call.cuh"
#include "layout/direct_words.hpp"

namespace deep_moe::kernels::internode {

inline constexpr int kDirectWarps = DirectTuning::kWarps, kDirectThreads = 32 * kDirectWarps;
static_assert(kDirectThreads >= layout::kMaxKernelRanks);

// What a block knows, in shared memory.
struct DirectShared {
  CallState call;
  std::uint64_t last;  // the call before this one in the slot; 0: none
  bool owed;           // this rank has not answered it
  bool is_last;        // of the blocks that come together
};

// Blocks that fill one message together; where there are fewer blocks than ranks each fills several, one after another.
struct DirectTeams {
  int size = 1, count = 1;

  DirectTeams() = default;
  DirectTeams(int num_ranks, int num_blocks)
      : size(num_blocks / num_ranks > 1 ? num_blocks / num_ranks : 1),
        count(num_blocks < num_ranks ? num_blocks : num_ranks) {}
  int num_blocks() const { return size * count; }
  __device__ int mine() const { return static_cast<int>(blockIdx.x) / size; }
  __device__ int member() const { return static_cast<int>(blockIdx.x) % size; }
};

template <class Network>
struct DirectRun {
  const LowLatencyRun& run;
  const DirectDomain& domain;
  const Network& network;
  DirectShared& shared;

  __device__ int rank() const { return run.rank(); }
  __device__ int slot() const { return shared.call.slot; }
  __device__ std::uint64_t epoch() const { return shared.call.epoch; }
  __device__ const layout::DirectLayout& places() const { return domain.layout; }
  __device__ bool is_mate(int peer) const { return domain.ranks.is_mate(peer); }

  // Where the message to `dst` is written: its own memory, or what will be put there.
  __device__ char* outgoing(int dst) const {
    return is_mate(dst) ? run.slot_of(dst) + places().mates_part(domain.ranks.local_of[rank()])
                        : network.memory() + places().out(slot(), domain.ranks.place(rank(), dst));
  }
  __device__ const char* incoming(int src) const {
    return is_mate(src) ? run.my_slot() + places().mates_part(domain.ranks.local_of[src])
                        : network.memory() + places().in(slot(), domain.ranks.place(rank(), src));
  }
  __device__ bool has_arrived(int src, std::uint64_t of_epoch) const {
    return is_mate(src) ? ptx::ld_acquire_sys(mates_word(run.my_slot(), src)) == of_epoch
                        : network.is(places().arrived(slot(), src), of_epoch);
  }
  __device__ bool has_consumed(int dst, std::uint64_t of_epoch) const {
    return is_mate(dst) ? ptx::ld_acquire_sys(run.consumed(rank(), slot(), dst)) == of_epoch
                        : network.is(places().consumed(slot(), dst), of_epoch);
  }
  // P5. One thread, behind a fence.
  __device__ void answer(int src, std::uint64_t of_epoch) const {
    if (is_mate(src))
      ptx::st_release_sys(run.consumed(src, slot(), rank()), of_epoch);
    else
      network.signal(src, places().consumed(slot(), rank()), of_epoch);
  }
  // P3. The whole block. Nothing goes to a rank that has been masked meanwhile.
  __device__ void send(int dst, std::size_t bytes) const {
    if (run.may_be_masked() && __syncthreads_or(threadIdx.x == 0 && is_masked(&run.words().masked, dst))) return;
    if (!is_mate(dst))
      network.put_signal_by_block(dst, places().in(slot(), domain.ranks.place(dst, rank())),
                                  places().out(slot(), domain.ranks.place(rank(), dst)), bytes,
                                  places().arrived(slot(), rank()), epoch());
    else if (threadIdx.x == 0)
      ptx::st_release_sys(mates_word(run.slot_of(dst), rank()), epoch());
  }
  __device__ std::uint64_t* own_word(std::size_t at) const {
    return reinterpret_cast<std::uint64_t*>(network.memory() + at);
  }

  template <typename Test>
  __device__ bool wait(layout::WaitPhase phase, int peer, std::uint64_t expected, Test test) const {
    std::uint64_t seen;
    return wait_in_line(
        run.scope(), phase, peer, expected, [&] { return std::uint64_t{test()}; },
        [](std::uint64_t there) { return there != 0; }, &seen);
  }

 private:
  __device__ std::uint64_t* mates_word(char* of_slot, int src) const {
    return reinterpret_cast<std::uint64_t*>(of_slot + places().mates_word(domain.ranks.local_of[src]));
  }
};

// A launch that sends takes the next epoch, which the last block to come here ends; one that receives has it from that
// one. All threads. False: leave.
__device__ __forceinline__ bool begin_call(const LowLatencyRun& run, DirectShared& shared) {
  if (threadIdx.x == 0) {
    constexpr std::uint64_t kOne = std::uint64_t{1} << layout::kArrivalShift;
    const std::uint64_t word = ptx::ld_relaxed_gpu(run.hot.epoch);
    layout::LowLatencyState& words = run.words();
    CallState& state = shared.call;
    state.failure.claimed = 0;
    state.epoch = run.sends() ? layout::epoch_of(word) + 1 : word;
    state.slot = static_cast<int>(state.epoch % layout::kLowLatencySlots);
    state.slot_offset = state.slot * run.call.staging.slot_bytes;
    state.live = run.call.live_ranks & ~ptx::ld_relaxed_gpu(&words.masked);
    state.failed = ptx::ld_relaxed_gpu(&run.hot.notify->failed) != 0;
    shared.last = ptx::ld_relaxed_gpu(&words.sent_epoch[state.slot]);
    shared.owed = ptx::ld_relaxed_gpu(&words.done_epoch[state.slot]) != shared.last;
    if (run.sends() && !state.failed) {
      if (blockIdx.x == 0 && run.call.epoch != nullptr) ptx::st_relaxed_gpu(run.call.epoch, state.epoch);
      const std::uint64_t before = ptx::atom_add_relaxed_gpu(&run.hot.notify->epoch, kOne);
      if ((before >> layout::kArrivalShift) == gridDim.x - 1) {
        ptx::st_relaxed_gpu(&words.sent_epoch[state.slot], state.epoch);
        ptx::atom_add_relaxed_gpu(&run.hot.notify->epoch, 1 - kOne * gridDim.x);
      }
    }
  }
  __syncthreads();
  return !shared.call.failed;
}

// P1. All threads, before a launch that sends waits for any answer. Where this rank has not answered the slot's last
// call, which it or a peer refused, the first member of each team takes the messages of all ranks that it serves,
// unread, and answers: were each answered in its turn only, ranks could wait for each other in a circle. False in all
// threads: leave.
template <class Network>
__device__ __forceinline__ bool answer_owed(const DirectRun<Network>& direct, const DirectTeams& teams) {
  const std::uint64_t last = direct.shared.last;
  if (last == 0 || !direct.shared.owed || teams.member() != 0) return true;
  bool ok = true;
  const int i = static_cast<int>(threadIdx.x);
  if (i < direct.run.num_ranks() && i % teams.count == teams.mine()) {
    const int peer = direct.domain.ranks.in_turn(direct.rank(), i);
    if (direct.run.is_live(peer)) {
      bool there = false;  // else it may be masked meanwhile
      ok = direct.wait(layout::WaitPhase::kRouting, peer, last, [&] { return there = direct.has_arrived(peer, last); });
      if (there) direct.answer(peer, last);
    }
  }
  return __syncthreads_and(ok);
}

// P1. All threads, before anything is written for a rank: it has read what the slot held. False: leave.
template <class Network>
__device__ __forceinline__ bool await_slot(const DirectRun<Network>& direct, int dst) {
  bool ok = true;
  const std::uint64_t last = direct.shared.last;
  if (threadIdx.x == 0 && last != 0)
    ok = direct.wait(layout::WaitPhase::kSlotSpace, dst, last, [&] { return direct.has_consumed(dst, last); });
  return __syncthreads_and(ok);
}

// Whether all `count` blocks have come here: true in the last one alone, behind what the others have written and read.
// All threads.
template <class Network>
__device__ __forceinline__ bool is_last_of(const DirectRun<Network>& direct, std::size_t counter, int count) {
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint64_t* const word = direct.own_word(counter);
    ptx::fence_acq_rel_sys();
    direct.shared.is_last = ptx::atom_add_relaxed_gpu(word, 1) == static_cast<std::uint64_t>(count - 1);
    if (direct.shared.is_last) ptx::st_relaxed_gpu(word, 0);
    ptx::fence_acq_rel_sys();
  }
  __syncthreads();
  return direct.shared.is_last;
}

__device__ __forceinline__ void fill_header(const LowLatencyRun& run, char* message, std::int64_t num_tokens,
                                            std::uint32_t num_rows) {
  layout::DirectHeader& header = *reinterpret_cast<layout::DirectHeader*>(message);
  header.hash = run.call.hash;
  header.signature = run.call.signature;
  header.num_tokens = static_cast<std::uint32_t>(num_tokens);
  header.num_rows = num_rows;
  header.status = static_cast<std::uint32_t>(layout::CallStatus::kOk);
  header.num_reason_bytes = 0;
}

// Calls body(dst) for each rank that this block has a part in the message to, from the next node's on, as long as it
// returns true.
template <typename Body>
__device__ __forceinline__ void for_each_destination(const DirectDomain& domain, const LowLatencyRun& run,
                                                     const DirectTeams& teams, Body body) {
#pragma unroll 1
  for (int i = teams.mine(); i < run.num_ranks(); i += teams.count) {
    const int dst = domain.ranks.in_turn(run.rank(), i);
    if (run.is_live(dst) && !body(dst)) return;
  }
}

// P4. One thread: the message of `src`. A peer that refuses or makes another call is reported by the first block, and
// all blocks leave. False: leave.
template <class Network>
__device__ __forceinline__ bool await_message(const DirectRun<Network>& direct, int src, std::uint32_t* num_tokens,
                                              std::uint32_t* num_rows) {
  const LowLatencyRun& run = direct.run;
  *num_tokens = *num_rows = 0;
  if (!run.is_live(src)) return true;
  const bool timed = blockIdx.x == 0 && run.call.wait_stats != nullptr;
  const std::uint64_t start = timed ? ptx::globaltimer_ns() : 0;
  const std::uint64_t epoch = direct.epoch();
  bool there = false;
  if (!direct.wait(layout::WaitPhase::kRouting, src, epoch, [&] { return there = direct.has_arrived(src, epoch); }))
    return false;
  if (timed) run.call.wait_stats[src] += static_cast<std::int64_t>(ptx::globaltimer_ns() - start);
  if (!there) return true;  // masked meanwhile
  const char* message = direct.incoming(src);
  const layout::DirectHeader& header = *reinterpret_cast<const layout::DirectHeader*>(message);
  const bool refused = header.status != static_cast<std::uint32_t>(layout::CallStatus::kOk);
  if (!refused && header.hash == run.call.hash) {
    *num_tokens = min(header.num_tokens, static_cast<std::uint32_t>(run.call.max_tokens));
    *num_rows = header.num_rows;
    return true;
  }
  if (blockIdx.x != 0) return false;
  report_error(run.scope(), refused ? layout::KernelErrorKind::kPeerRefused : layout::KernelErrorKind::kCallMismatch,
               layout::WaitPhase::kAnnounce, src, run.call.hash, header.hash, [&](layout::ErrorRecord& error) {
                 error.peer_signature = header.signature;
                 error.peer_status = header.status;
                 error.num_reason_bytes =
                     refused ? min(header.num_reason_bytes, static_cast<std::uint32_t>(layout::kReasonBytes)) : 0;
#pragma unroll 1
                 for (std::uint32_t i = 0; i < error.num_reason_bytes; ++i)
                   error.reason[i] = message[sizeof(layout::DirectHeader) + i];
               });
  ptx::st_relaxed_gpu(&run.words().trouble[direct.slot()], epoch);
  return false;
}

// P5. All threads, at the end of a launch that receives; `ok`: of this thread. The last block answers every peer,
// unless some block has left early: then answer_owed of the slot's next call does.
template <class Network>
__device__ __forceinline__ void end_receive(const DirectRun<Network>& direct, bool ok) {
  const LowLatencyRun& run = direct.run;
  leave(run, ok);
  if (!is_last_of(direct, direct.places().finished(), static_cast<int>(gridDim.x))) return;
  layout::LowLatencyState& words = run.words();
  if (ptx::ld_relaxed_gpu(&run.hot.notify->failed) != 0 ||
      ptx::ld_relaxed_gpu(&words.trouble[direct.slot()]) == direct.epoch())
    return;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < run.num_ranks() && run.is_live(peer)) {
    ptx::fence_acq_rel_sys();
    direct.answer(peer, direct.epoch());
  }
  if (peer == 0) ptx::st_relaxed_gpu(&words.done_epoch[direct.slot()], direct.epoch());
}

}  // namespace deep_moe::kernels::internode
