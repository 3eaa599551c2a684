// A barrier among some warps of a block.
#pragma once

namespace deep_moe::ptx {

// `num_threads` threads, whole warps, meet at barrier `id`, 1 to 15; 0 is that of __syncthreads(). The threads of a
// warp need not come at the same time.
__device__ __forceinline__ void barrier_sync(int id, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// The same for warps that only say that they are there.
__device__ __forceinline__ void barrier_arrive(int id, int num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace deep_moe::ptx
