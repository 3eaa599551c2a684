// The heap of one rank on a GPU: blocks of device segments that are reused only behind the streams that used them.
//
// A block that is handed out has users: the stream it was handed out on, the rank's comm stream, streams added by
// record_stream, and the current stream of the thread that drops it. A dropped block is free once its users' work so
// far is done, which events tell, or once the stream of a call stands behind that work: that stream may use whatever is
// free, and other streams are made to wait for the point where it was freed. Nothing waits for the device, and no lock
// is held during a wait.
//
// A block handed out while its stream is captured belongs to that capture: dropped, it is reused only inside the same
// capture, behind its users, and is free once the graph and all its executables are gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device.hpp"
#include "runtime/heap.hpp"

struct CUevent_st;  // CUDA's

namespace deep_moe::cuda {

class EventPool;
class OwnStream;

class DeviceHeap : public std::enable_shared_from_this<DeviceHeap> {
 public:
  // `current_stream` (may be empty) tells the calling thread's current stream of the device, for deleters. While
  // `has_failed` (may be empty) is true, what is dropped is quarantined: a peer that sleeps may still write there.
  DeviceHeap(std::shared_ptr<Heap> heap, std::shared_ptr<OwnStream> comm_stream, std::function<Stream()> current_stream,
             std::function<bool()> has_failed = {});
  ~DeviceHeap();
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;

  // How many blocks have been dropped.
  std::uint64_t num_drops();
  // `work`, the comm stream or `stream` itself, stands behind all that these two had to do when `num_drops` blocks had
  // been dropped: those of them that no other stream has used are free, to what comes on `work`. Until the comm stream
  // has joined `work`, nothing is put on it.
  void free_behind(Stream stream, Stream work, std::uint64_t num_drops);
  // As Heap's, after blocks whose users are done have been taken back. `first_user` is the stream whose work will use
  // the block first: captured, it may get a block that was dropped in the same capture. While the comm stream is
  // captured shrink does nothing. No growth here: a segment has to reach the peers first (DeviceWorld).
  Block allocate(std::size_t bytes, Stream first_user);
  Block allocate_largest(std::size_t max_bytes, Stream first_user);
  // Waits up to `seconds` for blocks that were dropped but are still in use; true if there are none any more. Useful
  // before giving up for want of memory.
  bool settle(double seconds);
  void shrink(Block& block, std::size_t bytes);
  std::vector<Block> split(const Block& block, const std::vector<std::size_t>& offsets);
  // A block that was neither owned nor used.
  void free(const Block& block);

  // Owner for a tensor in `block` that is handed out on `stream`. The last copy's end drops the block; in a forked
  // child that does nothing. With `alone` the comm stream is a user only if it gets work while the block is owned;
  // dropped with `stream` as its only user, a block of the same size is handed out there again without a look at it.
  std::shared_ptr<void> own(const Block& block, Stream stream, bool alone = false);
  // The comm stream gets work that may use any block.
  void note_comm_work();
  // Adds a user to the owned block that [ptr, ptr + bytes) lies in; false if there is none.
  bool record_stream(const void* ptr, Stream stream);

  // A call is being captured on `stream`: what keep_for_graphs() is given lives as long as the graph.
  void retain_in_capture(Stream stream);
  // At the Buffer's end: what launches of graphs that still live use beside blocks.
  void keep_for_graphs(const std::vector<std::shared_ptr<void>>& things);

  // See Heap.
  void quarantine(const Block& block) { heap_->quarantine(block); }
  void release_quarantine() { heap_->release_quarantine(); }
  bool locate(const void* ptr, std::size_t bytes, int* segment, std::size_t* offset) const {
    return heap_->locate(ptr, bytes, segment, offset);
  }
  // Live blocks are those that cannot be reused yet; quarantined_bytes is the part of them that no tensor holds.
  MemoryStats stats();

  // From here on there are no more blocks. What has been handed out lives on.
  void close();

 private:
  struct Lease;  // what one capture holds
  struct Use {   // an owned block
    Block block;
    std::vector<Stream> streams;
    std::shared_ptr<Lease> lease;  // null outside captures
    std::uint64_t drop = 0;        // its number among those dropped
    std::uint64_t comm_work = 0;   // handed out alone: num_comm_work_ at that time
    bool alone = false;
  };
  struct Dropped {  // blocks that wait for the same events; none once they have been freed by the order of streams
    std::vector<Block> blocks;
    int num_events;
  };
  struct Large {  // one of waiting_, by its users
    std::vector<Stream> streams;
    std::weak_ptr<Dropped> dropped;
    std::uint64_t drop;
  };
  struct Waiting {  // one of them
    CUevent_st* event;
    std::shared_ptr<Dropped> dropped;
  };
  static void graph_is_gone(void* lease);
  static void take_back_leases() noexcept;

  std::shared_ptr<Lease> lease_for(Stream stream);
  Block reuse_in_capture(std::size_t bytes, Stream first_user);
  Block reuse_alone(std::size_t bytes, Stream first_user);
  void drop(char* ptr) noexcept;
  void drop_use(Use use);
  std::shared_ptr<Dropped> wait_for_users(const std::vector<Stream>& streams, std::vector<Block> blocks);
  void drop_small();
  void free(Dropped& dropped);
  void follow_freed(Stream first_user, std::unique_lock<std::mutex>& lock);
  // `with_alone`: blocks of one user each are kept only as long as it has something to do.
  void reclaim(bool with_alone = true) noexcept;
  void free_alone(Stream first_user);
  void free_by_order(Dropped& now, Stream stream);
  void return_lease(const std::shared_ptr<Lease>& lease);

  const std::shared_ptr<Heap> heap_;
  const std::shared_ptr<OwnStream> comm_stream_;
  const std::function<Stream()> current_stream_;
  const std::function<bool()> has_failed_;
  const std::shared_ptr<EventPool> events_;
  const std::uint64_t forks_;

  std::mutex mutex_;
  bool closed_ = false;
  std::map<char*, Use> uses_;                                // owned blocks by address
  std::unordered_map<Stream, std::deque<Waiting>> waiting_;  // by stream, in the order of recording
  std::vector<Use> small_;                                   // dropped, small: events are recorded for many at a time
  std::vector<Large> large_;
  std::deque<Use> alone_;  // dropped, of one user each
  std::uint64_t num_comm_work_ = 0;
  std::uint64_t num_drops_ = 0;
  CUevent_st* freed_ = nullptr;                           // where free_behind() has last freed something
  std::vector<Stream> behind_freed_;                      // other streams that wait for it
  std::vector<Use> deferred_;                             // dropped while a user was captured: no events yet
  std::map<std::uint64_t, std::weak_ptr<Lease>> leases_;  // by capture
  int num_unseen_ = 0;                                    // dropped since the last reclaim()
  std::size_t dropped_bytes_ = 0;                         // in waiting_, small_, deferred_ and leases
};

}  // namespace deep_moe::cuda
