// Slots, staging and arrival words of the low-latency calls. The words and their order are in low_latency_call.hpp.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "cpu/low_latency_call.hpp"
#include "cpu/route.hpp"
#include "runtime/text.hpp"

namespace deep_moe::cpu {
namespace {

using layout::CallStatus;
using layout::Region;

std::uint64_t& slot_word(Domain& domain, Region region, int slot, int holder, int writer) {
  return domain.of(holder).slot_word(region, slot, writer);
}

// A segment of this rank for the staging; -1 and the reason if it cannot be had.
int make_segment(Domain& domain, LowLatencyState& state, std::int64_t bytes, std::string* reason) {
  if (state.spare_segment >= 0 && state.spare_bytes >= bytes) return state.spare_segment;
  const std::size_t have = static_cast<std::size_t>(domain.heap().stats().heap_bytes);
  const std::size_t limit = domain.heap().max_bytes(), wanted = static_cast<std::size_t>(bytes);
  if (wanted > limit || have > limit - wanted) {
    *reason = "DEEP_MOE_MAX_HEAP_BYTES allows " + std::to_string(limit) + " bytes in all, of which the heap has " +
              std::to_string(have);
    return -1;
  }
  try {
    state.spare_segment = domain.heap().append_foreign(HostSegment::create(wanted));
    state.spare_bytes = bytes;
  } catch (const Error& error) {
    *reason = error.what();
    return -1;
  }
  return state.spare_segment;
}

void post_regrow(Domain& domain, std::uint64_t epoch, int peer, int segment, std::int64_t bytes,
                 const std::string& reason) {
  layout::Regrow& words = domain.of(peer).regrow(epoch, domain.rank());
  words.status = static_cast<std::uint32_t>(segment < 0 ? CallStatus::kFailed : CallStatus::kOk);
  words.place = {segment, 0, 0, bytes};
  words.num_reason_bytes = copy_text(reason, words.reason, sizeof(words.reason));
  store_release(words.epoch, epoch);
  domain.ring(peer);
}

// Collective: a staging of `bytes` on every rank that is not masked. Returns what went wrong, on all ranks if on one.
std::string grow_staging(Domain& domain, LowLatencyState& state, std::uint64_t epoch, std::int64_t bytes) {
  std::string reason;
  const int segment = make_segment(domain, state, bytes, &reason);
  for (int peer = 0; peer < domain.num_ranks(); ++peer) {
    if (!domain.masked(peer)) post_regrow(domain, epoch, peer, segment, bytes, reason);
  }
  domain.wait_or_mask(
      "low latency/grow", epoch,
      [&] {
        for (int peer = 0; peer < domain.num_ranks(); ++peer)
          if (!domain.masked(peer) && load_acquire(domain.mine().regrow(epoch, peer).epoch) != epoch) return peer;
        return -1;
      },
      [](int) { return std::string("expected the place of its new staging"); });
  std::vector<int> segments(static_cast<std::size_t>(domain.num_ranks()), -1);
  for (int peer = 0; peer < domain.num_ranks(); ++peer) {
    if (domain.masked(peer)) continue;
    domain.check_announcement(peer, epoch);  // one that makes another call grows to another size
    const layout::Regrow& words = domain.mine().regrow(epoch, peer);
    if (words.status != static_cast<std::uint32_t>(CallStatus::kOk))
      return "rank " + std::to_string(peer) + ": " + std::string(words.reason, words.num_reason_bytes);
    segments[static_cast<std::size_t>(peer)] = words.place.segment;
  }
  state.staging_bytes = bytes;
  state.segments = std::move(segments);
  return {};
}

// Every rank has read what the slot held at call `last_epoch`.
void wait_until_consumed(Domain& domain, const SlotUse& use, std::uint64_t last_epoch) {
  const auto consumed = [&](int peer) {
    return load_acquire(slot_word(domain, Region::kConsumed, use.slot, domain.rank(), peer));
  };
  domain.wait_or_mask((use.call + "/send").c_str(), use.epoch,
                      [&] {
                        for (int peer = 0; peer < domain.num_ranks(); ++peer)
                          if (peer != domain.rank() && !domain.masked(peer) && consumed(peer) < last_epoch) return peer;
                        return -1;
                      },
                      [&](int peer) {
                        return "expected it to have read the slot of call " + std::to_string(last_epoch) +
                               " (its hook), saw call " + std::to_string(consumed(peer));
                      });
}

void post_consumed(Domain& domain, int slot, std::uint64_t epoch) {
  for (int peer = 0; peer < domain.num_ranks(); ++peer) {
    if (domain.masked(peer)) continue;
    store_release(slot_word(domain, Region::kConsumed, slot, peer, domain.rank()), epoch);
    domain.ring(peer);
  }
}

int count_call(LowLatencyState& state, std::uint64_t epoch) {
  const int slot = static_cast<int>(state.sequence++ % layout::kLowLatencySlots);
  state.counted_epoch = epoch;
  state.slots[slot].last_epoch = epoch;
  return slot;
}

// Whether `peer` has made a later call: then whatever it sent for this one is here.
bool has_moved_on(Domain& domain, int peer, std::uint64_t epoch) {
  return load_acquire(domain.mine().announce(epoch + 1, peer).epoch) > epoch;
}

// Throws if a peer whose arrival is missing has refused the call or made another one, or has given it up because it saw
// that of a third rank while it was sending. (Where ranks may be masked, one that has gone on may have masked this
// one.)
void check_peers(Domain& domain, const SlotUse& use, Region region) {
  for (int peer = 0; peer < domain.num_ranks(); ++peer) {
    if (peer == domain.rank() || domain.masked(peer)) continue;
    const bool gone = has_moved_on(domain, peer, use.epoch);
    if (layout::arrival_is_of(load_acquire(slot_word(domain, region, use.slot, domain.rank(), peer)), use.epoch))
      continue;
    domain.check_announcement(peer, use.epoch);
    if (gone && !domain.options().enable_shrink)
      throw PeerRefusedError("rank " + std::to_string(peer) + " gave up its " + use.call + " (call " +
                             std::to_string(use.epoch) + ") and has gone on to later calls");
  }
}

// The receive half, and the end of the call's hold on its slot.
void run_receive(LowLatencyContext& context, InFlight& call) {
  context.state.slots[call.use.slot].call = nullptr;
  const auto receive = std::exchange(call.receive, nullptr);  // with all that it keeps alive
  with_slot(context, call.use, [&] { receive(context); });
  release_slot(context, call.use);
}

// Ends the call that still has the slot, kLowLatencySlots calls later. Receiving it waits for no rank that waits for
// this one: all it needs was sent in earlier calls, or will be by a rank that is still there. Where the hook has been
// dropped, the caller's tensors may be gone as well, so nothing is received.
void settle_slot(LowLatencyContext& context, int slot) {
  const std::shared_ptr<InFlight> call = context.state.slots[slot].call;
  if (!call) return;
  if (context.state.slots[slot].hook.expired()) {
    context.state.slots[slot].call = nullptr;
    release_slot(context, call->use);
    return;
  }
  try {
    run_receive(context, *call);
  } catch (const PeerRefusedError&) {
    call->error = std::current_exception();
  } catch (const CallMismatchError&) {
    call->error = std::current_exception();
  }
}

}  // namespace

int LowLatencyState::num_in_flight() const {
  return static_cast<int>(std::count_if(std::begin(slots), std::end(slots),
                                        [](const Slot& slot) { return slot.call && !slot.hook.expired(); }));
}

std::size_t LowLatencyState::slot_bytes() const {
  return static_cast<std::size_t>(staging_bytes) / layout::kLowLatencySlots / layout::kAlign * layout::kAlign;
}

std::size_t LowLatencyState::part_bytes(int num_ranks) const {
  return slot_bytes() / static_cast<std::size_t>(num_ranks) / layout::kAlign * layout::kAlign;
}

void LowLatencyState::restart() {
  sequence = 0;
  counted_epoch = 0;
  for (Slot& slot : slots) slot = {};
  staging_bytes = 0;
  segments.clear();
}

void initialise(LowLatencyContext context) {
  Domain& domain = context.base.domain;
  layout::Announce words{};
  words.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kLowLatencyDispatch);
  words.place.capacity = domain.options().num_rdma_bytes;
  const std::uint64_t epoch = domain.announce(words);
  domain.gather_announcements("constructor/low latency", epoch);
  std::int64_t bytes = 0;
  for (int peer = 0; peer < domain.num_ranks(); ++peer)
    bytes = std::max(bytes, domain.mine().announce(epoch, peer).place.capacity);
  if (bytes > 0) grow_staging(domain, context.state, epoch, bytes);
}

void skip_call(Domain& domain, LowLatencyState& state) noexcept {
  const std::uint64_t epoch = domain.epoch();
  if (state.counted_epoch == epoch) return;
  const int slot = count_call(state, epoch);
  // With a call in flight there, the slot is given back when that has been received.
  if (!state.slots[slot].call) post_consumed(domain, slot, epoch);
}

SlotUse take_slot(LowLatencyContext& context, const layout::Announce& announce, std::size_t slot_bytes) {
  Domain& domain = context.base.domain;
  LowLatencyState& state = context.state;
  layout::Announce words = announce;
  SlotUse use;
  use.slot = static_cast<int>(state.sequence % layout::kLowLatencySlots);
  use.call = call_name(words.signature.kind);
  if (domain.options().enable_shrink) words.signature.flags |= kFlagShrink;
  words.signature.flags |= static_cast<std::int64_t>(use.slot) << kFlagSlotShift;
  use.hash = layout::signature_hash(words.signature);
  settle_slot(context, use.slot);
  const std::uint64_t last_epoch = state.slots[use.slot].last_epoch;
  use.epoch = domain.announce(words);
  count_call(state, use.epoch);
  with_slot(context, use, [&] {
    if (slot_bytes > state.slot_bytes()) {
      const std::int64_t bytes = static_cast<std::int64_t>(slot_bytes) * layout::kLowLatencySlots;
      const std::string problem = grow_staging(domain, state, use.epoch, bytes);
      if (!problem.empty())
        throw BufferTooSmallError(use.call + ": " + std::to_string(bytes) + " bytes of low-latency staging needed (" +
                                  std::to_string(state.staging_bytes) + " are there); " + problem);
    }
    wait_until_consumed(domain, use, last_epoch);
    use.part_bytes = state.part_bytes(domain.num_ranks());
    const std::size_t offset = state.slot_bytes() * static_cast<std::size_t>(use.slot);
    for (int peer = 0; peer < domain.num_ranks(); ++peer) {
      const int segment = state.segments[static_cast<std::size_t>(peer)];
      const bool reachable = !domain.masked(peer) && segment >= 0;
      use.bases.push_back(reachable ? domain.address(peer, segment, offset) : nullptr);
    }
  });
  return use;
}

void release_slot(LowLatencyContext& context, const SlotUse& use) noexcept {
  post_consumed(context.base.domain, use.slot, context.state.slots[use.slot].last_epoch);
}

void post_arrival(LowLatencyContext& context, const SlotUse& use, Region region, int peer, std::int64_t num_rows) {
  Domain& domain = context.base.domain;
  store_release(slot_word(domain, region, use.slot, peer, domain.rank()),
                layout::pack_arrival(use.epoch, use.hash, static_cast<std::uint64_t>(num_rows)));
  domain.ring(peer);
}

std::int64_t await_arrival(LowLatencyContext& context, const SlotUse& use, Region region, int peer, const char* phase,
                           std::int64_t* wait_stats) {
  Domain& domain = context.base.domain;
  if (domain.masked(peer)) return -1;
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t& shared = slot_word(domain, region, use.slot, domain.rank(), peer);
  domain.wait_or_mask(
      phase, use.epoch,
      [&] {
        if (domain.masked(peer) || layout::arrival_is_of(load_acquire(shared), use.epoch)) return -1;
        check_peers(domain, use, region);
        return peer;
      },
      [&](int) {
        return "expected its rows, saw the word " + std::to_string(load_acquire(shared)) + " in slot " +
               std::to_string(use.slot);
      });
  if (wait_stats != nullptr) {
    const auto waited = std::chrono::steady_clock::now() - start;
    wait_stats[peer] += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  }
  if (domain.masked(peer)) return -1;
  const std::uint64_t word = load_acquire(shared);
  if (!layout::arrival_has_hash(word, use.hash)) {
    if (domain.epoch() == use.epoch) domain.check_announcement(peer, use.epoch);
    throw CallMismatchError("the ranks did not make the same call (call " + std::to_string(use.epoch) + "): rank " +
                            std::to_string(domain.rank()) + " called " + use.call + ", rank " + std::to_string(peer) +
                            " made one that differs");
  }
  return layout::arrival_rows(word);
}

std::function<void()> now_or_hook(LowLatencyContext& context, const SlotUse& use, bool as_hook,
                                  std::function<void(LowLatencyContext&)> receive) {
  auto call = std::make_shared<InFlight>();
  call->use = use;
  call->receive = std::move(receive);
  if (!as_hook) {
    run_receive(context, *call);
    return nullptr;
  }
  struct Hook {
    LowLatencyContext context;
    std::shared_ptr<InFlight> call;
  };
  auto hook = std::make_shared<Hook>(Hook{context, call});
  context.state.slots[use.slot].call = call;
  context.state.slots[use.slot].hook = hook;
  return [hook] {
    const auto lock = hook->context.lock_call();
    InFlight& mine = *hook->call;
    if (std::exchange(mine.hook_called, true))
      throw Error("the hook of " + mine.use.call + " (call " + std::to_string(mine.use.epoch) +
                  ") has been called before; it may be called once");
    if (mine.error) std::rethrow_exception(mine.error);
    if (mine.receive) hook->context.guarded([&] { run_receive(hook->context, mine); });
  };
}

RowPlan::RowPlan(const TensorView& topk_idx, const layout::ExpertBlocks& blocks) {
  const std::int64_t num_tokens = topk_idx.shape[0], topk = topk_idx.shape[1];
  counts.resize(static_cast<std::size_t>(blocks.num_ranks));
  begins.reserve(static_cast<std::size_t>(num_tokens) + 1);
  entries.reserve(static_cast<std::size_t>(num_tokens * std::min<std::int64_t>(topk, blocks.num_ranks)));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    begins.push_back(static_cast<std::int64_t>(entries.size()));
    std::int32_t ranks[layout::kMaxTopk];
    int num_ranks = 0;
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int64_t expert = topk_id(topk_idx, token, k);
      if (expert >= 0) ranks[num_ranks++] = blocks.rank_of(static_cast<int>(expert));
    }
    std::sort(ranks, ranks + num_ranks);
    num_ranks = static_cast<int>(std::unique(ranks, ranks + num_ranks) - ranks);
    for (int i = 0; i < num_ranks; ++i)
      entries.push_back({ranks[i], static_cast<std::int32_t>(counts[static_cast<std::size_t>(ranks[i])]++)});
  }
  begins.push_back(static_cast<std::int64_t>(entries.size()));
}

Tensor make_output(LowLatencyContext& context, DType dtype, std::initializer_list<std::int64_t> shape) {
  const TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  if (view.numel() > 0) {
    Heap& heap = context.base.domain.heap();
    if (const Block block = heap.allocate(view.num_bytes()))
      return {TensorView::contiguous(block.ptr, dtype, shape), heap.own(block)};
  }
  return context.state.outputs->make(dtype, shape);
}

}  // namespace deep_moe::cpu
