#include "cuda/call_streams.hpp"

#include <string>

namespace deep_moe::cuda {
namespace {

void order(cudaEvent_t event, cudaStream_t first, cudaStream_t then) {
  if (first == then) return;
  check_runtime(cudaEventRecord(event, first), "cudaEventRecord");
  check_runtime(cudaStreamWaitEvent(then, event, 0), "cudaStreamWaitEvent");
}

}  // namespace

void check_runtime(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // ours, not the next caller's
  throw Error(std::string(call) + " failed: " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

CallEvents::CallEvents() {
  check_runtime(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check_runtime(cudaEventCreateWithFlags(&end_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

CallEvents::~CallEvents() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

CallStreams::CallStreams(const CallEvents& events, Stream comm, Stream caller, const StreamOptions& options)
    : events_(events),
      comm_(static_cast<cudaStream_t>(comm)),
      caller_(static_cast<cudaStream_t>(caller)),
      async_(options.async_finish) {
  if (options.previous_event == nullptr) {
    order(events_.begin_, caller_, comm_);
  } else {
    check_runtime(cudaStreamWaitEvent(comm_, static_cast<cudaEvent_t>(options.previous_event), 0),
                  "cudaStreamWaitEvent");
  }
}

void CallStreams::finish() {
  if (!async_) order(events_.end_, comm_, caller_);
}

}  // namespace deep_moe::cuda
