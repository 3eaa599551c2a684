// One call at a time on a Buffer. The thread that is in a call may come here again from inside its wait (a signal
// handler): calls then throw, and destroy() makes the wait leave.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

namespace deep_moe {

class CallGate {
 public:
  // `release` gives up what the Buffer holds; called once, while no call is under way. Does not throw.
  explicit CallGate(std::function<void()> release) : release_(std::move(release)) {}
  CallGate(const CallGate&) = delete;
  CallGate& operator=(const CallGate&) = delete;

  // A call under way. Throws DestroyedError, or Error if this thread is in a call already.
  class Pass {
   public:
    explicit Pass(CallGate& gate);
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    CallGate& gate_;
  };

  // Waits for the call under way, unless that is this thread's own: its end does the rest. Idempotent.
  void destroy();
  bool destroyed() const { return destroyed_; }
  void check_usable() const;  // throws DestroyedError
  // For the waits of calls: throws DestroyedError once destroy() has been called.
  void check_interrupt() const;
  bool destroy_wanted() const { return destroy_wanted_; }

 private:
  bool in_call_here() const { return caller_.load() == std::this_thread::get_id(); }
  void release() noexcept;

  const std::function<void()> release_;
  std::mutex mutex_;
  std::atomic<std::thread::id> caller_{};    // who holds it
  std::atomic<bool> destroy_wanted_{false};  // makes a wait leave
  std::atomic<bool> destroyed_{false};
};

}  // namespace deep_moe
