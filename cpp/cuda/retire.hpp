// What the GPU may still be using: dropped once it is done, without waiting for it.
#pragma once

#include <memory>
#include <vector>

#include "cuda/driver.hpp"

namespace deep_moe::cuda {

// A stream of ours, for one user at a time; given back, it waits for the next. Given back only once its work is done.
class OwnStream {
 public:
  OwnStream(int device, bool high_priority);  // non-blocking; throws Error
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  Stream get() const { return stream_; }
  int device() const { return device_; }

 private:
  const int device_;
  const bool high_priority_;
  const std::uint64_t forks_;
  CUstream stream_ = nullptr;
};

// Events of one device, used again and again; thread safe.
class EventPool {
 public:
  explicit EventPool(int device);
  ~EventPool();  // all events have been given back, or are not needed any more
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  int device() const;
  CUevent take();  // throws Error
  void give(CUevent event) noexcept;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Drops `things` (memory, streams) when `events` of the pool have completed: at once, or in a later drop_retired().
void drop_behind(std::vector<std::shared_ptr<void>> things, std::shared_ptr<EventPool> pool,
                 std::vector<CUevent> events) noexcept;
void drop_retired() noexcept;

}  // namespace deep_moe::cuda
