// Ranks go round the GPUs that CUDA_VISIBLE_DEVICES leaves: rank r is on GPU r % num_gpus().
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>

namespace deep_moe::test {

inline void cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Asks again and again: whoever waits for a stream under compute-sanitizer keeps the launches of other threads waiting,
// which its kernel may be waiting for.
inline void wait_for(cudaStream_t stream) {
  cudaError_t status;
  while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady) std::this_thread::yield();
  cuda(status);
}

inline int num_gpus() {
  static const int count = [] {
    int found = 0;
    return cudaGetDeviceCount(&found) == cudaSuccess ? std::max(found, 1) : 1;
  }();
  return count;
}
inline int gpu_of(int rank) { return rank % num_gpus(); }
inline int num_gpus_of(int num_ranks) { return std::min(num_ranks, num_gpus()); }
inline int ranks_a_gpu(int num_ranks) { return (num_ranks - 1) / num_gpus() + 1; }  // at most

inline int num_sms() {  // of the first
  int count = 0;
  cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// The rank's GPU is the current one of this thread as long as this lives.
class OnGpuOf {
 public:
  explicit OnGpuOf(int rank) {
    cuda(cudaGetDevice(&before_));
    cuda(cudaSetDevice(gpu_of(rank)));
  }
  ~OnGpuOf() { cudaSetDevice(before_); }
  OnGpuOf(const OnGpuOf&) = delete;
  OnGpuOf& operator=(const OnGpuOf&) = delete;

 private:
  int before_ = 0;
};

inline void sync_gpus() {
  for (int gpu = 0; gpu < num_gpus(); ++gpu) {
    const OnGpuOf on(gpu);
    cuda(cudaDeviceSynchronize());
  }
}

#ifdef __CUDACC__
// As much local memory as code may need that a tool has changed: a launch that needs more than any before waits until
// no kernel runs, also one that waits for this launch.
template <int kBytes>
__global__ void local_memory_of_tools(int at) {
  volatile char bytes[kBytes];
  bytes[at] = 0;
  (void)bytes[kBytes - 1 - at];
}
inline void reserve_local_memory_of_tools() {
  static const bool reserved = [] {
    for (int gpu = 0; gpu < num_gpus(); ++gpu) {
      const OnGpuOf on(gpu);
      local_memory_of_tools<8192><<<1, 1>>>(0);
      cuda(cudaGetLastError());
    }
    sync_gpus();
    return true;
  }();
  (void)reserved;
}
#else
inline void reserve_local_memory_of_tools() {}
#endif

// What cudaMalloc gives on one GPU can be used on all others from here on.
inline void connect_gpus() {
  static const bool connected = [] {
    for (int gpu = 0; gpu < num_gpus(); ++gpu) {
      const OnGpuOf on(gpu);
      for (int peer = 0; peer < num_gpus(); ++peer) {
        if (peer == gpu) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
        if (status == cudaErrorPeerAccessAlreadyEnabled) {
          (void)cudaGetLastError();
        } else if (status != cudaSuccess) {
          throw std::runtime_error("GPU " + std::to_string(gpu) + " and GPU " + std::to_string(peer) + ": " +
                                   cudaGetErrorString(status) + "; leave one of them with CUDA_VISIBLE_DEVICES");
        }
      }
    }
    return true;
  }();
  (void)connected;
}

}  // namespace deep_moe::test
