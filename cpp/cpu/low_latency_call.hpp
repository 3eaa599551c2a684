// What low-latency dispatch and combine share: a call's slot, its arrival words, its hook.
//
// Words, all of them in the workspace of the rank that reads them; R ranks, S = kLowLatencySlots:
//
//   word                     writer    says                                          order
//   kArrival[S][R]           sender    its rows for call e are in my slot            release after the rows
//   kWeightArrival[S][R]     owner     its weights for combine e are in my slot      release after the weights
//   kConsumed[S][R]          receiver  it has read its slot's rows of call e         release after the last read
//   kRegrow[8][R]            peer      where its new staging is                      release after the place
//
// Order of one payload byte: the sender has seen kConsumed of the slot's previous call from every rank (acquire), so
// nobody reads or writes what it replaces; it stores the row; kArrival (release); the receiver sees it (acquire) and
// reads the row; kConsumed (release); whoever writes there next has seen that. No word is ever reset: each carries its
// epoch.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "cpu/low_latency.hpp"
#include "layout/experts.hpp"
#include "layout/rows.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cpu {

// A call's hold on one slot of everybody's staging.
struct SlotUse {
  int slot = 0;
  std::uint64_t epoch = 0;
  std::uint64_t hash = 0;
  std::string call;  // its name
  std::size_t part_bytes = 0;
  std::vector<char*> bases;  // by rank: its slot; null for a masked rank
  char* part(int holder, int writer) const { return bases[holder] + part_bytes * static_cast<std::size_t>(writer); }
};

// Announces the call, makes the staging large enough (all ranks alike) and waits until every rank has read what the
// slot held before. Where this throws, the slot has been given back.
SlotUse take_slot(LowLatencyContext& context, const layout::Announce& announce, std::size_t slot_bytes);
// Tells the peers that this rank has read (or given up) what they put into the slot.
void release_slot(LowLatencyContext& context, const SlotUse& use) noexcept;

// "num_rows rows (or weights) of mine are in your slot."
void post_arrival(LowLatencyContext& context, const SlotUse& use, layout::Region region, int peer,
                  std::int64_t num_rows);
// Waits for the above from `peer`. Returns the number of rows, -1 if the peer is masked. Adds the nanoseconds waited to
// `wait_stats`, if there are any. Throws what is wrong with the call on any rank.
std::int64_t await_arrival(LowLatencyContext& context, const SlotUse& use, layout::Region region, int peer,
                           const char* phase, std::int64_t* wait_stats);

// Runs `body`; if that throws, gives the slot back.
template <typename Body>
void with_slot(LowLatencyContext& context, const SlotUse& use, const Body& body) {
  try {
    body();
  } catch (...) {
    release_slot(context, use);
    throw;
  }
}

struct InFlight {
  SlotUse use;
  std::function<void(LowLatencyContext&)> receive;  // empty once it has run
  std::exception_ptr error;                         // of a receive half that ran before its hook was called
  bool hook_called = false;
};

// Runs `receive` now, or returns a hook that does, once. A hook that has not been called when its slot comes round
// finds its work done: the receive half runs at the start of the call that takes the slot. Until a hook is called or
// dropped, the caller's tensors that it fills (statistics, `out`) must stay.
std::function<void()> now_or_hook(LowLatencyContext& context, const SlotUse& use, bool as_hook,
                                  std::function<void(LowLatencyContext&)> receive);

// Where the rows of one rank go: for each token the ranks of its experts, ascending, and the token's row there (the
// count of earlier tokens that go there too).
struct RowPlan {
  struct Entry {
    std::int32_t rank, row;
  };
  std::vector<std::int64_t> begins;  // [T + 1] into entries
  std::vector<Entry> entries;
  std::vector<std::int64_t> counts;  // [R]
  RowPlan(const TensorView& topk_idx, const layout::ExpertBlocks& blocks);
};

// In the heap where it has room, else in memory of earlier outputs.
Tensor make_output(LowLatencyContext& context, DType dtype, std::initializer_list<std::int64_t> shape);

// Parts of at least so many rows are worth a thread.
inline std::int64_t row_grain(std::int64_t row_bytes) {
  constexpr std::int64_t kBytes = 128 << 10;
  return kBytes / (row_bytes + 1) + 1;
}

}  // namespace deep_moe::cpu
