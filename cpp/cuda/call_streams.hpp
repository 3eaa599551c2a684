// The stream that a call runs on, and how it is ordered with the caller's.
//
// A call that the caller's stream waits for runs on that stream itself, which saves two hops between streams; one that
// is asynchronous, follows an event or is captured runs on the comm stream. Between calls the comm stream stands behind
// all that the calls before have put on any stream: what looks at the comm stream looks at all of them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include <deep_moe/buffer.hpp>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

// Throws Error "<call> failed: <name> (<text>)".
void check_runtime(cudaError_t status, const char* call);

// What the joins of one call after the other share.
class CallOrder {
 public:
  CallOrder();  // on the current device
  ~CallOrder();
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;

  // The comm stream gets work outside of a call: no stream is known to stand behind it.
  void note_comm_work() { follower_ = 0; }

 private:
  friend class CallStreams;
  // A wait looks at an event when it is queued, so the next call may record it anew.
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::uint64_t follower_ = 0;  // id of a stream that stands behind the comm stream's work; 0: none is known
};

class CallStreams {
 public:
  CallStreams(CallOrder& order, Stream comm, Stream caller, const StreamOptions& options);
  ~CallStreams();  // without finish(), the call has failed: the comm stream is put behind what it has launched
  CallStreams(CallStreams&& other) noexcept;
  CallStreams& operator=(CallStreams&&) = delete;

  void finish();
  // Puts the comm stream behind what the call has launched so far.
  void join_comm();
  Stream work() const { return work_; }      // where the call runs
  Stream caller() const { return caller_; }  // may use what the call hands out

 private:
  CallOrder& order_;
  cudaStream_t comm_, caller_, work_;
  bool async_, open_ = true;
};

}  // namespace deep_moe::cuda
