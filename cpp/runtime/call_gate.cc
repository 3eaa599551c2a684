#include "runtime/call_gate.hpp"

#include <deep_moe/error.hpp>

namespace deep_moe {

CallGate::Pass::Pass(CallGate& gate) : gate_(gate) {
  if (gate.in_call_here())
    throw Error(
        "a call on this Buffer is under way on this very thread (this one comes from a signal handler or a callback)");
  gate.mutex_.lock();
  if (gate.destroy_wanted_) {
    gate.release();
    gate.mutex_.unlock();
    gate.check_usable();
  }
  gate.caller_ = std::this_thread::get_id();
}

CallGate::Pass::~Pass() {
  if (gate_.destroy_wanted_) gate_.release();
  gate_.caller_ = std::thread::id();
  gate_.mutex_.unlock();
}

void CallGate::destroy() {
  destroy_wanted_ = true;
  if (in_call_here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  release();
}

void CallGate::release() noexcept {
  if (!destroyed_.exchange(true)) release_();
}

void CallGate::check_usable() const {
  if (destroyed_) throw DestroyedError("this Buffer has been destroyed");
}

void CallGate::check_interrupt() const {
  if (destroy_wanted_) throw DestroyedError("this Buffer was destroyed during a call");
}

}  // namespace deep_moe
