#include "cuda/call_streams.hpp"

#include <string>

namespace deep_moe::cuda {
namespace {

void order(cudaStream_t first, cudaStream_t then) {
  cudaEvent_t event;
  check_runtime(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const cudaError_t recorded = cudaEventRecord(event, first);
  const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(then, event, 0) : recorded;
  cudaEventDestroy(event);  // goes once it has completed
  check_runtime(waits, "ordering two streams");
}

}  // namespace

void check_runtime(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(std::string(call) + " failed: " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

CallStreams::CallStreams(Stream comm, Stream caller, const StreamOptions& options)
    : comm_(static_cast<cudaStream_t>(comm)), caller_(static_cast<cudaStream_t>(caller)), async_(options.async_finish) {
  if (options.previous_event == nullptr) {
    order(caller_, comm_);
  } else {
    check_runtime(cudaStreamWaitEvent(comm_, static_cast<cudaEvent_t>(options.previous_event), 0),
                  "cudaStreamWaitEvent");
  }
}

void CallStreams::finish() {
  if (!async_) order(comm_, caller_);
}

}  // namespace deep_moe::cuda
