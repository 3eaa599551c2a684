// torch's current streams, as the library asks for them: at the start of a call, and where a tensor dies.
#pragma once

#include <nanobind/nanobind.h>

#include <deep_moe/tensor.hpp>

namespace deep_moe::python {

// While it lives, current_stream(device) on this thread is what torch's current stream was when it was made; so a call
// need not ask Python again once it has let go of the GIL. Made with the GIL held; nothing for the CPU.
class CallStream {
 public:
  explicit CallStream(int device);
  ~CallStream();
  CallStream(const CallStream&) = delete;
  CallStream& operator=(const CallStream&) = delete;

 private:
  int outer_device_;
  void* outer_stream_;
};

// The calling thread's current stream of the device, a cudaStream_t. Never waits for the GIL, so it may be called on
// any thread and under any lock: in a call it is the CallStream's; else torch is asked if this thread happens to hold
// the GIL; else it is what torch last said to this thread, in its last call (torch lets go of the GIL before a tensor
// dies); else, and once the interpreter is ending, it is the default stream.
void* current_stream(int device) noexcept;

// Hands over what tells torch's current stream: a function from the device's ordinal to an int, or None. Borrowed for
// ever.
void set_stream_query(nanobind::handle query);

}  // namespace deep_moe::python
