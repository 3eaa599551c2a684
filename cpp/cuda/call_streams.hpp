// The comm stream goes on behind the caller's stream (or the event that was passed); at the end the caller's stream
// waits for the comm stream, unless the call is asynchronous.
#pragma once

#include <cuda_runtime_api.h>

#include <deep_moe/buffer.hpp>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

// Throws Error "<call> failed: <name> (<text>)".
void check_runtime(cudaError_t status, const char* call);

// Events for the joins of one call after the other: a wait looks at an event when it is queued, so the next call may
// record it anew.
class CallEvents {
 public:
  CallEvents();  // on the current device
  ~CallEvents();
  CallEvents(const CallEvents&) = delete;
  CallEvents& operator=(const CallEvents&) = delete;

 private:
  friend class CallStreams;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class CallStreams {
 public:
  CallStreams(const CallEvents& events, Stream comm, Stream caller, const StreamOptions& options);
  void finish();
  Stream comm() const { return comm_; }
  Stream caller() const { return caller_; }  // may use what the call hands out

 private:
  const CallEvents& events_;
  cudaStream_t comm_, caller_;
  bool async_;
};

}  // namespace deep_moe::cuda
