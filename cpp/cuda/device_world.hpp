// The ranks of one Buffer on GPUs: their workspaces and segments in device memory, mapped by every one of them, and
// what kernels need to know about that. Ranks are threads or processes of one machine; each has a device, which several
// may share.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <deep_moe/bootstrap.hpp>

#include "cuda/device.hpp"
#include "cuda/device_heap.hpp"
#include "cuda/device_segment.hpp"
#include "cuda/mapped_words.hpp"
#include "kernels/api.hpp"
#include "runtime/control_channel.hpp"

namespace deep_moe::cuda {

struct DeviceWorldOptions {
  int device = -1;             // -1: the current one
  std::size_t heap_bytes = 0;  // starting capacity
  std::size_t max_heap_bytes = std::numeric_limits<std::size_t>::max();
  MemoryKind memory = MemoryKind::kAuto;
  double timeout_seconds = 100.0;          // of every wait, kernels' and the host's
  std::function<void()> interrupt_check;   // about every 50 ms of a wait; may throw
  std::function<Stream()> current_stream;  // the calling thread's current stream of the device, for deleters
};

// Calls on one rank's world come from one thread at a time, but for those that say otherwise.
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
  Stream comm_stream() const;  // private, high priority
  const kernels::DeviceDomain& domain() const { return domain_; }
  char* host_words() const { return words_->host(); }  // domain().host as the host sees it
  DeviceHeap& heap() { return *device_heap_; }

  // Device memory: [R, layout::kMaxSegments] addresses of every rank's segments as mapped here, null where there is
  // none. An entry is there before its owner learns (by shared()) that it may publish places in the segment.
  char* const* segment_table() const;
  // The same for the host. Takes what peers have sent meanwhile; throws PeerLostError or TimeoutError.
  char* address(int peer, int segment, std::size_t offset);

  struct Growth {
    bool everywhere = true;            // every rank that asked has its memory, and every rank can reach it
    std::vector<std::string> reasons;  // by rank; empty where nothing failed
  };
  // Collective: a rank that needs more passes the bytes, the others 0. All ranks return the same.
  Growth grow(std::size_t bytes);
  // Local: as heap().allocate, with a new segment where that gives nothing; an empty Block and the reason if that
  // fails. Peers map the segment when they next look (poll, grow, address): publish places in it only once shared()
  // says so.
  Block allocate_or_grow(std::size_t bytes, Stream first_user, std::string* reason);
  // True if every peer has mapped this rank's segment.
  bool shared(int segment);
  // Maps what peers have appended; costs one system call if there is nothing. Call it now and then (at each call).
  void poll();

  // poll_until with this world's rules; also throws PeerLostError when the blamed peer has left.
  void wait(const char* phase, const std::function<int()>& first_missing,
            const std::function<std::string(int peer)>& describe);
  // True once the peer has left or its process has ended.
  bool peer_gone(int peer, std::string* how);
  // Local: tells the peers and closes the channel; the heap gives no more blocks. Memory lives on while it has users.
  void depart() noexcept;

 private:
  struct Peer {
    std::uint64_t uid = 0;
    bool local = false;  // shares this process
    bool departed = false, closed = false;
    int device = -1;                                 // as seen here; -1: not visible
    std::vector<std::shared_ptr<Segment>> segments;  // by id, null until mapped
    std::uint64_t offered = 0, settled = 0;          // rounds of grow
    std::string offer_failure, settle_failure;       // of the last round
    std::vector<bool> has_mapped;                    // my segments, by id
  };

  void connect(const Bootstrap& bootstrap);
  void announce_segment(int id, const std::shared_ptr<Segment>& segment);
  void send_all(std::uint32_t kind, int id, std::uint64_t value, const std::string& text);
  void take_messages();
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
  kernels::DeviceDomain domain_;

  std::recursive_mutex mutex_;  // of what messages change
  std::vector<Peer> peers_;
  std::vector<int> round_segments_;  // mine, appended since the last round
  std::string import_failure_;       // since the last round
  std::uint64_t round_ = 0;
  int num_segments_ = 0;    // numbers taken, the workspace's included
  char** table_ = nullptr;  // device
  char** table_mirror_ = nullptr;
};

// The same as the constructor; in builds without CUDA it throws UnavailableError.
std::shared_ptr<DeviceWorld> make_device_world(const Bootstrap& bootstrap, const DeviceWorldOptions& options);

}  // namespace deep_moe::cuda
