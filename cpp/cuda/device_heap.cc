#include "cuda/device_heap.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/retire.hpp"
#include "layout/words.hpp"
#include "layout/workspace.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {

struct DeviceHeap::Lease {
  std::shared_ptr<DeviceHeap> heap;  // kept while the graph lives: its launches use the memory
  std::uint64_t capture = 0;
  bool gone = false;
  struct Idle {
    Block block;
    std::vector<CUevent> users;  // recorded inside the capture
  };
  std::vector<Idle> idle;  // dropped, reusable inside the capture
  std::vector<std::shared_ptr<void>> kept;
};

namespace {

// Small blocks are handed out without a look at what has been dropped, until that many have been.
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;
constexpr int kUnseenBlocks = 16;
// Blocks of one user that wait for one of their size.
constexpr std::size_t kAloneBlocks = 16;

// Leases whose graph is gone, from CUDA's threads, which may not call CUDA.
struct GoneLeases {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> list;
};

GoneLeases& gone_leases() {
  static auto* leases = new GoneLeases;
  return *leases;
}

void add_stream(std::vector<Stream>& streams, Stream stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

}  // namespace

DeviceHeap::DeviceHeap(std::shared_ptr<Heap> heap, std::shared_ptr<OwnStream> comm_stream,
                       std::function<Stream()> current_stream, std::function<bool()> has_failed)
    : heap_(std::move(heap)),
      comm_stream_(std::move(comm_stream)),
      current_stream_(std::move(current_stream)),
      has_failed_(std::move(has_failed)),
      events_(std::make_shared<EventPool>(comm_stream_->device())),
      forks_(fork_count()) {
  drop_retired();
}

DeviceHeap::~DeviceHeap() {
  if (forks_ != fork_count()) return;
  // Unmapping does not wait for kernels: the segments stay until the last users are done.
  std::vector<CUevent> events;
  const OnDevice on_device = OnDevice::quiet(comm_stream_->device());
  if (on_device) {
    bool all_recorded = true;
    deferred_.insert(deferred_.end(), small_.begin(), small_.end());
    deferred_.insert(deferred_.end(), alone_.begin(), alone_.end());
    deferred_.push_back({.block = {}, .streams = {comm_stream_->get()}, .lease = nullptr});
    for (const Use& use : std::exchange(deferred_, {}))
      all_recorded = wait_for_users(use.streams, {use.block}) != nullptr && all_recorded;
    if (!all_recorded) new std::shared_ptr<Heap>(heap_);  // nothing tells when its users are done: kept for good
    for (auto& [stream, queue] : waiting_) {
      for (const Waiting& entry : queue) events.push_back(entry.event);
    }
  }
  drop_behind({heap_, comm_stream_}, events_, std::move(events));
}

void DeviceHeap::free(Dropped& dropped) {
  const bool quarantine = has_failed_ && has_failed_();
  for (const Block& block : std::exchange(dropped.blocks, {})) {
    dropped_bytes_ -= block.bytes;
    if (quarantine) {
      heap_->quarantine(block);
    } else {
      heap_->free(block);
    }
  }
}

std::uint64_t DeviceHeap::num_drops() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_drops_;
}

void DeviceHeap::free_behind(Stream stream, Stream work, std::uint64_t num_drops) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (small_.empty() && large_.empty()) return;
  if (capture_of(comm_stream_->get()).active) return;  // nobody knows what a launch of the graph will be behind
  const auto ordered = [&](const std::vector<Stream>& streams) {
    return std::all_of(streams.begin(), streams.end(),
                       [&](Stream user) { return user == stream || user == comm_stream_->get(); });
  };
  Dropped now{{}, 0};
  std::erase_if(small_, [&](const Use& use) {
    const bool is_free = use.drop <= num_drops && ordered(use.streams);
    if (is_free) now.blocks.push_back(use.block);
    return is_free;
  });
  std::erase_if(large_, [&](const auto& entry) {
    const std::shared_ptr<Dropped> dropped = entry.dropped.lock();
    if (dropped && !(entry.drop <= num_drops && ordered(entry.streams))) return false;
    if (dropped) now.blocks.insert(now.blocks.end(), dropped->blocks.begin(), dropped->blocks.end());
    if (dropped) dropped->blocks.clear();
    return true;
  });
  if (now.blocks.empty()) return;
  free_by_order(now, work);
  add_stream(behind_freed_, comm_stream_->get());  // by the time it is used
}

void DeviceHeap::free_by_order(Dropped& now, Stream stream) {
  const OutsideCapture outside_capture;
  if (freed_ == nullptr) {
    freed_ = events_->take();
  } else if (std::find(behind_freed_.begin(), behind_freed_.end(), stream) == behind_freed_.end()) {
    check(driver().cuStreamWaitEvent(static_cast<CUstream>(stream), freed_, 0), "cuStreamWaitEvent");
  }
  check(driver().cuEventRecord(freed_, static_cast<CUstream>(stream)), "cuEventRecord");
  behind_freed_ = {stream};
  free(now);
}

// What is free may have been freed by the order of streams: streams that are not known to stand behind that have to
// join it.
void DeviceHeap::follow_freed(Stream first_user, std::unique_lock<std::mutex>& lock) {
  if (freed_ == nullptr) return;
  if (capture_of(first_user).active) {
    // A launch of the graph can be behind nothing of today: it has to be done.
    const OutsideCapture outside_capture;
    while (driver().cuEventQuery(freed_) == CUDA_ERROR_NOT_READY) {
      lock.unlock();  // deleters run under locks of others
      std::this_thread::yield();
      lock.lock();
    }
    return;
  }
  if (std::find(behind_freed_.begin(), behind_freed_.end(), first_user) != behind_freed_.end()) return;
  const OutsideCapture outside_capture;
  check(driver().cuStreamWaitEvent(static_cast<CUstream>(first_user), freed_, 0), "cuStreamWaitEvent");
  behind_freed_.push_back(first_user);
}

Block DeviceHeap::allocate(std::size_t bytes, Stream first_user) {
  take_back_leases();
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return {};
  if (Block block = reuse_in_capture(bytes, first_user)) return block;
  if (Block block = reuse_alone(bytes, first_user)) return block;
  follow_freed(first_user, lock);
  if (num_unseen_ < kUnseenBlocks && bytes < kSmallBytes) {
    if (Block block = heap_->allocate(bytes)) return block;
  }
  reclaim(false);
  if (Block block = heap_->allocate(bytes)) return block;
  free_alone(first_user);
  return heap_->allocate(bytes);
}

Block DeviceHeap::allocate_largest(std::size_t max_bytes, Stream first_user) {
  take_back_leases();
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return {};
  if (Block block = reuse_in_capture(max_bytes, first_user)) return block;
  follow_freed(first_user, lock);
  if (num_unseen_ >= kUnseenBlocks) reclaim(false);
  free_alone(first_user);
  return heap_->allocate_largest(max_bytes);
}

bool DeviceHeap::settle(double seconds) {
  drop_retired();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    take_back_leases();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      reclaim();
      const bool in_use =
          std::any_of(waiting_.begin(), waiting_.end(), [](const auto& q) { return !q.second.empty(); });
      // reclaim() has looked at the small ones
      if (!in_use && deferred_.empty() && alone_.empty()) return true;
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// The block of an earlier user in the same capture, its users made predecessors of what comes on `first_user`.
Block DeviceHeap::reuse_in_capture(std::size_t bytes, Stream first_user) {
  const Capture capture = capture_of(first_user);
  if (!capture.active) return {};
  const auto known = leases_.find(capture.id);
  const std::shared_ptr<Lease> lease = known == leases_.end() ? nullptr : known->second.lock();
  if (!lease) return {};
  auto best = lease->idle.end();
  for (auto entry = lease->idle.begin(); entry != lease->idle.end(); ++entry) {
    if (entry->block.bytes >= bytes && (best == lease->idle.end() || entry->block.bytes < best->block.bytes))
      best = entry;
  }
  if (best == lease->idle.end()) return {};
  for (const CUevent event : best->users) {
    check(driver().cuStreamWaitEvent(static_cast<CUstream>(first_user), event, 0), "cuStreamWaitEvent");
  }
  for (const CUevent event : best->users) events_->give(event);
  const Block block = best->block;
  lease->idle.erase(best);
  dropped_bytes_ -= block.bytes;
  // Until own() it belongs to nobody but the lease; own() finds the lease again by the capture.
  return block;
}

// Its last use is in front of whatever comes on the stream.
Block DeviceHeap::reuse_alone(std::size_t bytes, Stream first_user) {
  const std::size_t wanted = layout::align_up(std::max<std::size_t>(bytes, 1), layout::kAlign);
  const auto found = std::find_if(alone_.rbegin(), alone_.rend(), [&](const Use& use) {
    return use.block.bytes == wanted && use.streams.front() == first_user;
  });
  if (found == alone_.rend() || capture_of(first_user).active || (has_failed_ && has_failed_())) return {};
  const Block block = found->block;
  alone_.erase(std::next(found).base());
  dropped_bytes_ -= block.bytes;
  return block;
}

// Those of other users wait for events from here on.
void DeviceHeap::free_alone(Stream first_user) {
  if (alone_.empty()) return;
  const OnDevice on_device = OnDevice::quiet(comm_stream_->device());
  if (!on_device) return;
  const bool by_order = !capture_of(first_user).active && !(has_failed_ && has_failed_());
  Dropped now{{}, 0};
  for (Use& use : std::exchange(alone_, {})) {
    if (by_order && use.streams.front() == first_user)
      now.blocks.push_back(use.block);
    else
      drop_use(std::move(use));
  }
  if (!now.blocks.empty()) free_by_order(now, first_user);
}

void DeviceHeap::note_comm_work() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_comm_work_;
}

void DeviceHeap::shrink(Block& block, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // What the graph may write must not go to others; leases hold whole blocks.
  if (capture_of(comm_stream_->get()).active) return;
  heap_->shrink(block, bytes);
}

std::vector<Block> DeviceHeap::split(const Block& block, const std::vector<std::size_t>& offsets) {
  return heap_->split(block, offsets);
}

void DeviceHeap::free(const Block& block) { heap_->free(block); }

std::shared_ptr<DeviceHeap::Lease> DeviceHeap::lease_for(Stream stream) {
  const Capture capture = capture_of(stream);
  if (!capture.active) return nullptr;
  std::weak_ptr<Lease>& known = leases_[capture.id];
  if (auto lease = known.lock()) return lease;
  auto lease = std::make_shared<Lease>();
  lease->heap = shared_from_this();
  lease->capture = capture.id;
  auto holder = std::make_unique<std::shared_ptr<Lease>>(lease);
  CUuserObject object;
  check(driver().cuUserObjectCreate(&object, holder.get(), &DeviceHeap::graph_is_gone, 1,
                                    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        "cuUserObjectCreate");
  holder.release();  // graph_is_gone has it
  const CUresult retained = driver().cuGraphRetainUserObject(capture.graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (retained != CUDA_SUCCESS) driver().cuUserObjectRelease(object, 1);
  check(retained, "cuGraphRetainUserObject");
  known = lease;
  return lease;
}

void DeviceHeap::retain_in_capture(Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lease_for(stream);
}

void DeviceHeap::keep_for_graphs(const std::vector<std::shared_ptr<void>>& things) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [capture, known] : leases_) {
    if (const auto lease = known.lock()) lease->kept = things;
  }
}

void DeviceHeap::graph_is_gone(void* lease) {
  const std::unique_ptr<std::shared_ptr<Lease>> holder(static_cast<std::shared_ptr<Lease>*>(lease));
  GoneLeases& gone = gone_leases();
  const std::lock_guard<std::mutex> lock(gone.mutex);
  gone.list.push_back(std::move(*holder));
}

void DeviceHeap::take_back_leases() noexcept {
  std::vector<std::shared_ptr<void>> list;
  {
    GoneLeases& gone = gone_leases();
    const std::lock_guard<std::mutex> lock(gone.mutex);
    if (gone.list.empty()) return;
    list.swap(gone.list);
  }
  for (const std::shared_ptr<void>& entry : list) {
    const auto lease = std::static_pointer_cast<Lease>(entry);
    const std::shared_ptr<DeviceHeap> heap = std::move(lease->heap);  // may be its last user
    heap->return_lease(lease);
  }
}

// Launches of the graph ran on streams that nobody told us; CUDA has let go of it after the last one.
void DeviceHeap::return_lease(const std::shared_ptr<Lease>& lease) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lease->gone = true;
  leases_.erase(lease->capture);
  for (const Lease::Idle& entry : std::exchange(lease->idle, {})) {
    for (const CUevent event : entry.users) events_->give(event);
    deferred_.push_back({.block = entry.block, .streams = {comm_stream_->get()}, .lease = nullptr, .drop = num_drops_});
  }
}

std::shared_ptr<void> DeviceHeap::own(const Block& block, Stream stream, bool alone) {
  if (!block) return std::make_shared<char>();
  Use use{.block = block, .streams = {stream}, .lease = nullptr, .alone = alone};
  if (!alone) add_stream(use.streams, comm_stream_->get());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    use.comm_work = num_comm_work_;
    use.lease = lease_for(stream);
    if (!use.lease && !alone) use.lease = lease_for(comm_stream_->get());
    uses_.insert_or_assign(block.ptr, std::move(use));
  }
  return std::shared_ptr<void>(block.ptr, [self = shared_from_this(), ptr = block.ptr](void*) {
    if (self->forks_ == fork_count()) self->drop(ptr);  // a child's copy of the lock may be held by nobody
  });
}

bool DeviceHeap::record_stream(const void* ptr, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  char* address = static_cast<char*>(const_cast<void*>(ptr));
  auto use = uses_.upper_bound(address);
  if (use == uses_.begin()) return false;
  --use;
  if (address >= use->first + use->second.block.bytes) return false;
  add_stream(use->second.streams, stream);
  return true;
}

void DeviceHeap::drop(char* ptr) noexcept {
  try {
    const Stream here = current_stream_ ? current_stream_() : comm_stream_->get();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto owned = uses_.find(ptr);
    if (owned == uses_.end()) return;
    Use use = std::move(owned->second);
    uses_.erase(owned);
    if (use.alone && use.comm_work != num_comm_work_) add_stream(use.streams, comm_stream_->get());
    add_stream(use.streams, here);
    use.drop = ++num_drops_;
    dropped_bytes_ += use.block.bytes;
    if (use.alone && !use.lease && use.streams.size() == 1) {
      alone_.push_back(std::move(use));
      if (alone_.size() <= kAloneBlocks) return;
      use = std::move(alone_.front());
      alone_.pop_front();
    }
    if (!use.lease && use.block.bytes < kSmallBytes) {
      ++num_unseen_;
      small_.push_back(std::move(use));
      return;
    }
    num_unseen_ = kUnseenBlocks;
    const OnDevice on_device = OnDevice::quiet(comm_stream_->device());
    if (on_device) drop_use(std::move(use));  // else the driver is gone: the process is ending
  } catch (...) {                             // no memory, or a device that has failed: the block stays out of use
  }
}

void DeviceHeap::drop_use(Use use) {
  const OutsideCapture outside_capture;
  if (use.lease && !use.lease->gone) {
    Lease::Idle idle{use.block, {}};
    bool capturing = false;
    for (const Stream stream : use.streams) {
      const Capture capture = capture_of(stream);
      if (!capture.active || capture.id != use.lease->capture) continue;
      capturing = true;
      const CUevent event = events_->take();
      idle.users.push_back(event);
      check(driver().cuEventRecord(event, static_cast<CUstream>(stream)), "cuEventRecord");
    }
    // With the capture over, nothing can come behind its users any more: the graph keeps the block to its end.
    if (!capturing) idle.users.clear();
    use.lease->idle.push_back(std::move(idle));
    return;
  }
  use.lease.reset();
  if (auto dropped = wait_for_users(use.streams, {use.block})) {
    large_.push_back({std::move(use.streams), std::move(dropped), use.drop});
  } else {
    deferred_.push_back(std::move(use));
  }
}

// Blocks of the same users share their events.
void DeviceHeap::drop_small() {
  std::vector<Use> uses = std::exchange(small_, {});
  for (Use& use : uses) std::sort(use.streams.begin(), use.streams.end());
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.streams < b.streams; });
  for (std::size_t first = 0, next = 0; first < uses.size(); first = next) {
    std::vector<Block> blocks;
    while (next < uses.size() && uses[next].streams == uses[first].streams) blocks.push_back(uses[next++].block);
    if (wait_for_users(uses[first].streams, std::move(blocks))) continue;
    for (std::size_t i = first; i < next; ++i) deferred_.push_back(std::move(uses[i]));
  }
}

// Records an event on every user. Null, and nothing done, if that cannot be done now.
std::shared_ptr<DeviceHeap::Dropped> DeviceHeap::wait_for_users(const std::vector<Stream>& streams,
                                                                std::vector<Block> blocks) {
  // Events recorded now on a captured stream would go into the capture; later ones are as good.
  const bool captured = std::any_of(streams.begin(), streams.end(), [](Stream stream) {
    const Capture capture = capture_of(stream);
    return capture.active || !capture.known;
  });
  if (captured) return nullptr;
  const OutsideCapture outside_capture;
  auto dropped = std::make_shared<Dropped>(Dropped{std::move(blocks), static_cast<int>(streams.size())});
  std::vector<CUevent> events;
  for (const Stream stream : streams) {
    events.push_back(events_->take());
    if (driver().cuEventRecord(events.back(), static_cast<CUstream>(stream)) == CUDA_SUCCESS) continue;
    for (const CUevent event : events) events_->give(event);
    return nullptr;
  }
  for (std::size_t i = 0; i < events.size(); ++i) waiting_[streams[i]].push_back({events[i], dropped});
  return dropped;
}

// Takes back what is done. Events of one stream complete in order, so a few looks find how many have.
void DeviceHeap::reclaim(bool with_alone) noexcept {
  num_unseen_ = 0;
  if (waiting_.empty() && deferred_.empty() && small_.empty() && alone_.empty()) return;
  const OnDevice on_device = OnDevice::quiet(comm_stream_->device());
  if (!on_device) return;
  const OutsideCapture outside_capture;
  try {
    drop_small();
    std::deque<Use> kept;
    for (Use& use : std::exchange(alone_, {})) {
      const bool waits =
          !with_alone || (!capture_of(use.streams.front()).active &&
                          driver().cuStreamQuery(static_cast<CUstream>(use.streams.front())) == CUDA_ERROR_NOT_READY);
      if (waits)
        kept.push_back(std::move(use));
      else
        drop_use(std::move(use));
    }
    alone_ = std::move(kept);
    for (Use& use : std::exchange(deferred_, {})) drop_use(std::move(use));
  } catch (...) {  // as in drop()
  }
  for (auto queue = waiting_.begin(); queue != waiting_.end();) {
    std::deque<Waiting>& entries = queue->second;
    const auto is_done = [](const Waiting& entry) { return driver().cuEventQuery(entry.event) == CUDA_SUCCESS; };
    const auto busy =
        is_done(entries.back()) ? entries.end() : std::partition_point(entries.begin(), entries.end() - 1, is_done);
    for (auto entry = entries.begin(); entry != busy; ++entry) {
      events_->give(entry->event);
      if (--entry->dropped->num_events == 0) free(*entry->dropped);
    }
    entries.erase(entries.begin(), busy);
    queue = entries.empty() ? waiting_.erase(queue) : std::next(queue);
  }
  std::erase_if(large_, [](const Large& entry) { return entry.dropped.expired(); });
}

MemoryStats DeviceHeap::stats() {
  drop_retired();
  take_back_leases();
  const std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  MemoryStats stats = heap_->stats();
  stats.quarantined_bytes += static_cast<std::int64_t>(dropped_bytes_);
  return stats;
}

void DeviceHeap::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

}  // namespace deep_moe::cuda
