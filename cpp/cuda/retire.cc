#include "cuda/retire.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

struct Retired {
  std::vector<std::shared_ptr<void>> things;
  std::shared_ptr<EventPool> pool;
  std::vector<CUevent> events;

  // Events that are done go back to the pool. An event that cannot be asked about counts as not done: what it guards is
  // kept for good rather than taken from under a kernel.
  bool done() {
    const OnDevice on_device = OnDevice::quiet(pool->device());
    if (!on_device) return events.empty();
    const OutsideCapture outside_capture;
    std::erase_if(events, [&](CUevent event) {
      if (driver_if_loaded()->cuEventQuery(event) != CUDA_SUCCESS) return false;
      pool->give(event);
      return true;
    });
    return events.empty();
  }
};

struct Waiting {
  std::mutex mutex;
  std::vector<Retired> list;
};

Waiting& waiting() {
  static auto* waiting = new Waiting;  // never destroyed: what is in it at exit stays to the end of the process
  return *waiting;
}

}  // namespace

namespace {

// Streams are never destroyed: whoever was told of one (a framework's allocator, in record_stream) may record an event
// on it as long as the process lives.
struct IdleStreams {
  std::mutex mutex;
  std::map<std::pair<int, bool>, std::vector<CUstream>> list;
};

IdleStreams& idle_streams() {
  static auto* idle = new IdleStreams;
  return *idle;
}

}  // namespace

OwnStream::OwnStream(int device, bool high_priority)
    : device_(device), high_priority_(high_priority), forks_(fork_count()) {
  {
    IdleStreams& idle = idle_streams();
    const std::lock_guard<std::mutex> lock(idle.mutex);
    auto& streams = idle.list[{device, high_priority}];
    if (!streams.empty()) {
      stream_ = streams.back();
      streams.pop_back();
      return;
    }
  }
  const OnDevice on_device(device);
  const OutsideCapture outside_capture;
  int lowest = 0, highest = 0;
  check(driver().cuCtxGetStreamPriorityRange(&lowest, &highest), "cuCtxGetStreamPriorityRange");
  check(driver().cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, high_priority ? highest : lowest),
        "cuStreamCreateWithPriority", " on " + device_name(device));
}

OwnStream::~OwnStream() {
  if (forks_ != fork_count()) return;
  IdleStreams& idle = idle_streams();
  const std::lock_guard<std::mutex> lock(idle.mutex);
  idle.list[{device_, high_priority_}].push_back(stream_);
}

struct EventPool::State {
  int device;
  std::uint64_t forks;
  std::mutex mutex;
  std::vector<CUevent> idle;
};

EventPool::EventPool(int device) : state_(new State{device, fork_count(), {}, {}}) {}

int EventPool::device() const { return state_->device; }

CUevent EventPool::take() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->idle.empty()) {
      const CUevent event = state_->idle.back();
      state_->idle.pop_back();
      return event;
    }
    state_->idle.reserve(state_->idle.capacity() + 1);  // give() does not throw
  }
  const OnDevice on_device(state_->device);
  const OutsideCapture outside_capture;
  CUevent event;
  check(driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return event;
}

void EventPool::give(CUevent event) noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->idle.push_back(event);
}

EventPool::~EventPool() {
  if (state_->forks != fork_count()) return;
  const OnDevice on_device = OnDevice::quiet(state_->device);
  if (!on_device) return;
  for (const CUevent event : state_->idle) driver().cuEventDestroy(event);
}

void drop_behind(std::vector<std::shared_ptr<void>> things, std::shared_ptr<EventPool> pool,
                 std::vector<CUevent> events) noexcept {
  Retired retired{std::move(things), std::move(pool), std::move(events)};
  if (retired.done()) return;
  Waiting& all = waiting();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.list.push_back(std::move(retired));
}

void drop_retired() noexcept {
  std::vector<Retired> dropped;  // after the lock: what dies here may retire something itself
  Waiting& all = waiting();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (std::size_t i = 0; i < all.list.size();) {
    if (!all.list[i].done()) {
      ++i;
      continue;
    }
    dropped.push_back(std::move(all.list[i]));
    all.list.erase(all.list.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace deep_moe::cuda
