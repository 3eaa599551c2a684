#include "cuda/call_streams.hpp"

#include <string>
#include <utility>

#include "cuda/driver.hpp"

namespace deep_moe::cuda {
namespace {

void order(cudaEvent_t event, cudaStream_t first, cudaStream_t then) {
  if (first == then) return;
  check_runtime(cudaEventRecord(event, first), "cudaEventRecord");
  check_runtime(cudaStreamWaitEvent(then, event, 0), "cudaStreamWaitEvent");
}

// Not the handle, which a later stream may have again.
std::uint64_t id_of(cudaStream_t stream) {
  unsigned long long id = 0;
  check(driver().cuStreamGetId(static_cast<CUstream>(stream), &id), "cuStreamGetId");
  return id + 1;  // 0 is no stream
}

}  // namespace

void check_runtime(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // ours, not the next caller's
  throw Error(std::string(call) + " failed: " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

CallOrder::CallOrder() {
  check_runtime(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check_runtime(cudaEventCreateWithFlags(&end_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

CallOrder::~CallOrder() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

CallStreams::CallStreams(CallOrder& order_of_calls, Stream comm, Stream caller, const StreamOptions& options)
    : order_(order_of_calls),
      comm_(static_cast<cudaStream_t>(comm)),
      caller_(static_cast<cudaStream_t>(caller)),
      work_(comm_),
      async_(options.async_finish) {
  const bool captured = capture_of(comm).active || capture_of(caller).active;
  if (!async_ && options.previous_event == nullptr && !captured) {
    work_ = caller_;
    const std::uint64_t id = id_of(caller_);
    if (order_.follower_ != id) order(order_.begin_, comm_, caller_);
    order_.follower_ = id;
    return;
  }
  if (!captured) order_.note_comm_work();
  if (options.previous_event == nullptr) {
    order(order_.begin_, caller_, comm_);
  } else {
    check_runtime(cudaStreamWaitEvent(comm_, static_cast<cudaEvent_t>(options.previous_event), 0),
                  "cudaStreamWaitEvent");
  }
}

CallStreams::CallStreams(CallStreams&& other) noexcept
    : order_(other.order_),
      comm_(other.comm_),
      caller_(other.caller_),
      work_(other.work_),
      async_(other.async_),
      open_(std::exchange(other.open_, false)) {}

CallStreams::~CallStreams() {
  if (!open_) return;
  try {
    join_comm();
  } catch (const Error&) {  // the caller's stream, or the device, is gone
  }
}

void CallStreams::join_comm() { order(order_.end_, work_, comm_); }

void CallStreams::finish() {
  open_ = false;
  if (work_ != comm_) {
    join_comm();
  } else if (!async_) {
    order(order_.end_, comm_, caller_);
  }
}

}  // namespace deep_moe::cuda
