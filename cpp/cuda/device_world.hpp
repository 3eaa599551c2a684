// The ranks of one Buffer on GPUs: their workspaces and segments in device memory, mapped by every one of them that is
// near, and what kernels need to know about that. Ranks are threads or processes; each has a device, which several may
// share. All ranks are near to each other, but over a network that is not mapped memory: then those of a node are. A
// rank that is far may be on another machine: its memory does not exist here, and its host is spoken to alone.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <deep_moe/bootstrap.hpp>

#include "cuda/attendant.hpp"
#include "cuda/cuda_nodes.hpp"
#include "cuda/cuda_nodes_nvshmem.hpp"
#include "cuda/device.hpp"
#include "cuda/device_heap.hpp"
#include "cuda/device_segment.hpp"
#include "cuda/mapped_words.hpp"
#include "kernels/api.hpp"
#include "runtime/control_channel.hpp"
#include "runtime/rank_talk.hpp"

namespace deep_moe::cuda {

struct DeviceWorldOptions {
  int device = -1;                                                       // -1: the current one
  std::size_t heap_bytes = 0;                                            // starting capacity
  std::size_t max_heap_bytes = std::numeric_limits<std::size_t>::max();  // besides DEEP_MOE_MAX_HEAP_BYTES
  MemoryKind memory = MemoryKind::kAuto;   // kAuto: what DEEP_MOE_DEVICE_MEMORY names (auto, fd, fabric, ipc)
  std::size_t network_bytes = 0;           // between nodes: for the rings; the largest of any rank counts
  std::size_t low_latency_bytes = 0;       // the same for low-latency calls that take the network
  double timeout_seconds = 100.0;          // of every wait, kernels' and the host's
  std::function<void()> interrupt_check;   // about every 50 ms of a wait; may throw
  std::function<Stream()> current_stream;  // the calling thread's current stream of the device, for deleters
};

// Calls on one rank's world come from one thread at a time, but for those that say otherwise. A thread of its own maps
// what peers append and notices their end, whatever the callers do.
class DeviceWorld {
 public:
  // Collective. If any rank cannot make its part, every rank throws with that rank's reason.
  DeviceWorld(const Bootstrap& bootstrap, const DeviceWorldOptions& options);
  ~DeviceWorld();  // local; waits for no kernel
  DeviceWorld(const DeviceWorld&) = delete;
  DeviceWorld& operator=(const DeviceWorld&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int device() const { return device_; }
  // Ranks, this one included, whose kernels run on the device at the same time: threads of this process.
  int num_ranks_on_device() const;
  // Blocks of which one fills an SM that a call may launch: those of all ranks on the device run at the same time, with
  // SMs left for others.
  int most_blocks() const;
  MemoryKind memory_kind() const { return workspace_->kind(); }  // of what this rank shares
  Stream comm_stream() const;                                    // private, high priority
  // Workspaces of far ranks are null.
  const kernels::DeviceDomain& domain() const { return domain_; }
  bool near(int peer) const { return peers_[static_cast<std::size_t>(peer)].near; }
  bool all_near() const;
  const Nodes* nodes() const { return nodes_.get(); }  // null on one node
  char* host_words() const { return words_->host(); }  // domain().host as the host sees it
  DeviceHeap& heap() { return *device_heap_; }

  // Device memory: [R, layout::kMaxSegments] addresses of every near rank's segments as mapped here, null where there
  // is none. An entry is there before its owner learns (by shared()) that it may publish places in the segment.
  char* const* segment_table() const;
  // The same for the host. Takes what peers have sent meanwhile; throws PeerLostError or TimeoutError.
  char* address(int peer, int segment, std::size_t offset);

  struct Growth {
    bool everywhere = true;            // every rank that asked has its memory, and those near it can reach it
    std::vector<std::string> reasons;  // by rank; empty where nothing failed
  };
  // Collective: a rank that needs more passes the bytes, and more that it would like, the others 0. All ranks return
  // the same.
  Growth grow(std::size_t bytes, std::size_t preferred = 0);
  // Local: as heap().allocate, with a new segment where that gives nothing; an empty Block and the reason if that
  // fails. Publish places in it only once shared() says so.
  Block allocate_or_grow(std::size_t bytes, Stream first_user, std::string* reason);
  // True if every near peer has mapped this rank's segment, which their attendants do soon.
  bool shared(int segment);
  // Waits for that; throws BufferTooSmallError if some peer cannot. Bits of `without`: peers that do not matter.
  void wait_until_shared(int segment, const char* phase, std::uint64_t without = 0);
  // Throws what the attendant has met with.
  void check_attendant();

  // What the hosts of all ranks say to each other, near and far (runtime/rank_talk.hpp).
  using Said = RankTalk::Said;
  std::vector<Said> exchange(const char* phase, std::uint64_t value, const std::string& text) {
    return talk_->exchange(phase, value, text);
  }
  std::vector<Said> exchange_in_call(const char* phase, int id, std::uint64_t value, const std::string& text,
                                     const std::function<void(int peer)>& look, std::uint64_t* masked,
                                     bool mask_silent) {
    return talk_->exchange_in_call(phase, id, value, text, look, masked, mask_silent);
  }
  // What a peer has announced for the call that comes after those that this rank's kernels have done; false if nothing.
  // None of them may be running.
  bool announced(int peer, layout::Announce* record);

  // Collective, after a failure: ends this rank's kernels, agrees on a new epoch, and makes the state of all ranks as
  // new. Streams other than comm_stream() must not hold calls of this Buffer any more.
  void reset();

  // poll_until with this world's rules; also throws PeerLostError when the blamed peer has left.
  void wait(const char* phase, const std::function<int()>& first_missing,
            const std::function<std::string(int peer)>& describe) {
    talk_->wait(phase, first_missing, describe);
  }
  // Until ready(): what a kernel of this rank on `stream` tells its host. The deadline counts from started(): a
  // kernel may stand behind other work for as long as that takes. Kernels have deadlines of their own, which come
  // first and say more. Also throws what the device has failed with.
  void wait_for_kernel(const char* phase, Stream stream, const std::function<bool()>& started,
                       const std::function<bool()>& ready);
  // Until the comm stream has nothing left to do.
  void wait_idle(const char* phase);
  // True once the peer has left or its process has ended.
  bool peer_gone(int peer, std::string* how) { return talk_->peer_gone(peer, how); }
  // Local: tells the peers and closes the channel; the heap gives no more blocks. Memory lives on while it has users.
  // `all_on_comm_stream`: no calls of this rank run anywhere else (in graphs). `failure`: what has failed the Buffer,
  // or empty.
  void depart(bool all_on_comm_stream, const std::string& failure) noexcept;

 private:
  // Waits a little until all that this rank has put has arrived, once its kernels have ended. Word of its departure
  // would else come first, and peers take for lost what is on its way.
  bool has_delivered() const noexcept;

  struct Peer {
    std::uint64_t uid = 0;
    bool local = false;  // shares this process
    bool near = true;
    bool lost = false;                               // kernels have been told
    int device = -1;                                 // as seen here; -1: not visible, or far
    std::vector<std::shared_ptr<Segment>> segments;  // by id, null until mapped
    std::map<int, std::string> mapped;               // my segments, and why it could not; empty: it has
  };

  void connect(const Bootstrap& bootstrap);
  void share_nodes_memory();
  void connect_nodes(const Bootstrap& bootstrap, const NetworkPlace& place);
  void log_places() const;
  void announce_segment(int id, const std::shared_ptr<Segment>& segment);
  void start_talk();
  void attend() noexcept;
  void tell_kernels_of_loss(int peer, bool dead);
  void send_lost_peers();
  void copy_to_device(void* device, const void* mirror, std::size_t bytes);
  void copy_from_device(void* mirror, const void* device, std::size_t bytes);
  void wait_copied();
  void take_message(int peer, ControlChannel::SegmentMessage& message);
  std::shared_ptr<Segment> import_segment(int peer, const ControlChannel::SegmentMessage& message);
  void set_table(int peer, int segment, char* base);
  Growth run_round(const std::string& offer_failure);
  void retire_round_segments();
  std::string name_of(int peer) const;
  void release() noexcept;

  const int rank_, num_ranks_;
  DeviceWorldOptions options_;
  const std::uint64_t uid_, forks_;
  int device_ = -1;
  std::shared_ptr<OwnStream> comm_stream_, copy_stream_;
  std::shared_ptr<DeviceSegment> workspace_;
  std::shared_ptr<MappedWords> words_;  // the host words, then a mirror of the segment table
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<DeviceHeap> device_heap_;
  std::unique_ptr<ControlChannel> channel_;
  std::unique_ptr<RankTalk> talk_;
  kernels::DeviceDomain domain_;
  std::unique_ptr<Nodes> nodes_;
  std::shared_ptr<DeviceSegment> nodes_memory_;
  std::shared_ptr<void> network_lease_;

  std::recursive_mutex mutex_;  // of what messages change
  std::vector<Peer> peers_;
  std::vector<int> round_segments_;       // mine, appended since the last round
  std::string import_failure_;            // since the last round
  std::uint64_t cleared_generation_ = 0;  // resets of which this rank has done its part
  int num_segments_ = 0;                  // numbers taken, the workspace's included
  std::size_t nodes_words_at_ = 0;        // host words of the node, in words_
  char** table_ = nullptr;                // device
  char** table_mirror_ = nullptr;
  std::uint64_t* word_mirror_ = nullptr;  // pinned: lost peers, 1, the epoch read from the device
  layout::Announce* announce_mirror_ = nullptr;
  std::uint64_t lost_peers_ = 0, dead_peers_ = 0;
  std::exception_ptr attendant_failure_;
  std::unique_ptr<Attendant> attendant_;  // last: it uses all of the above
};

// The same as the constructor; in builds without CUDA it throws UnavailableError.
std::shared_ptr<DeviceWorld> make_device_world(const Bootstrap& bootstrap, const DeviceWorldOptions& options);

}  // namespace deep_moe::cuda
