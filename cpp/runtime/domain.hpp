// The ranks of one Buffer as seen by one of them: their workspaces and segments, call epochs, waits, failures.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <deep_moe/buffer.hpp>

#include "layout/rail.hpp"
#include "layout/workspace.hpp"
#include "runtime/control_channel.hpp"
#include "runtime/heap.hpp"
#include "runtime/topology.hpp"

namespace deep_moe {

// Words that ranks share: plain integers in the layout structs, always accessed through these.
template <typename T>
T load_acquire(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_acquire);
}
template <typename T>
void store_release(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

class Domain {
 public:
  // Collective. `prepare` makes what else this rank needs; its failure, too, is every rank's.
  Domain(const Bootstrap& bootstrap, const BufferOptions& options, const std::function<void()>& prepare = {});
  ~Domain();

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const BufferOptions& options() const { return options_; }
  const Topology& topology() const { return topology_; }
  // Between nodes: what lies in each rank's network memory, the same on all, and where a peer's is mapped here.
  const layout::RailLayout& rail_layout() const { return rail_layout_; }
  char* network_memory(int peer) { return address(peer, kNetworkSegment, 0); }
  Heap& heap() { return *heap_; }
  const Heap& heap() const { return *heap_; }

  layout::Workspace& mine() { return workspaces_[rank_]; }
  layout::Workspace& of(int peer) { return workspaces_[peer]; }
  // Wakes `peer`: call it after writing words into its workspace.
  void ring(int peer);
  // A peer's memory; maps its segment if it is new here (waits for the descriptor). The owner has published the place.
  char* address(int peer, int segment, std::size_t offset);

  // The epoch of the call that announce() will start. Once it returns, the words that belong to the announcement
  // (counts) may be written into the peers' workspaces: no peer still reads what they replace.
  std::uint64_t begin_call();
  // Starts a call: takes the next epoch and tells every peer what this rank does (`announce` is filled by the caller
  // but for epoch, hash, status).
  std::uint64_t announce(const layout::Announce& announce);
  // The same for a refused call; does not throw.
  void announce_refusal(const layout::CallSignature& signature, const std::string& reason) noexcept;
  // Waits for every (unmasked) peer's announcement of `epoch` and checks that all make the same call: throws
  // CallMismatchError or PeerRefusedError.
  void gather_announcements(const char* phase, std::uint64_t epoch);
  // The check alone, for a peer that may have announced: throws if it refused `epoch` or makes another call in it.
  void check_announcement(int peer, std::uint64_t epoch);

  // Blocks until first_missing() returns -1; otherwise it returns the peer to blame. Spins briefly, then sleeps; wakes
  // when a peer rings. Throws TimeoutError after the deadline, PeerLostError when the blamed peer is gone, what a
  // failed peer has reported, CallMismatchError/PeerRefusedError if the blamed peer's announcement of `epoch` says so.
  // `describe(peer)` gives "expected ..., saw ..." for the error's text.
  void wait(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
            const std::function<std::string(int peer)>& describe);

  // Low latency: masked ranks are not waited for. With enable_shrink a wait through `wait_or_mask` masks the rank that
  // is to blame instead of throwing (time-out, lost), and goes on.
  bool masked(int peer) const { return masked_[peer]; }
  void set_masked(int peer, bool value) { masked_[peer] = value; }
  void wait_or_mask(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
                    const std::function<std::string(int peer)>& describe);

  // Marks this rank failed with the error in flight, tells the peers, and remembers it for check().
  void fail(std::exception_ptr error) noexcept;
  void check_failed() const;  // throws what failed it
  bool failed() const;
  bool any_masked() const;
  // Collective: a new generation of all unmasked ranks; frees what is quarantined. Also how ranks are unmasked.
  void reset(bool unmask);
  // One line on stderr, the first time in this Buffer's life.
  void log_once(const std::string& text);
  void depart() noexcept;  // local: tells the peers, closes the channels

  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t generation() const { return generation_; }

 private:
  static constexpr int kWorkspaceSegment = 0, kNetworkSegment = 1;

  struct Peer {
    bool local = false;  // shares this process
    std::uint64_t uid = 0;
    std::vector<std::shared_ptr<Segment>> segments;  // by id, null until mapped
  };

  void connect(const Bootstrap& bootstrap, const std::function<void()>& prepare);
  std::shared_ptr<Segment> fetch_segment(int peer, int id);
  bool peer_gone(int peer, std::string* how);
  void throw_if_aborted(int waiting_for);
  void flow_control(std::uint64_t epoch);
  void announce_segment(int id, const std::shared_ptr<Segment>& segment);
  void wait_impl(const char* phase, std::uint64_t epoch, const std::function<int()>& first_missing,
                 const std::function<std::string(int)>& describe, bool with_aborts);

  const int rank_, num_ranks_;
  const BufferOptions options_;
  std::uint64_t uid_ = 0;
  Topology topology_;
  layout::RailLayout rail_layout_;
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<Segment> workspace_segment_;
  std::vector<layout::Workspace> workspaces_;
  std::vector<Peer> peers_;
  std::unique_ptr<ControlChannel> channel_;
  std::vector<bool> masked_;
  std::vector<std::uint64_t> last_seen_;  // newest epoch announced by each peer
  std::uint64_t epoch_ = 0;
  std::uint64_t generation_ = 1;
  mutable std::mutex failure_mutex_;
  std::exception_ptr failure_;
  int spin_rounds_ = 0;
  bool own_verdict_ = false;  // the last wait's error is this rank's finding, not a peer's report
  bool logged_ = false;
};

}  // namespace deep_moe
