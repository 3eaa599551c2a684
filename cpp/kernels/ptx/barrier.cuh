// A barrier among some warps of a block.
#pragma once

namespace deep_moe::ptx {

// `num_threads` threads, whole warps, meet at barrier `id`, 1 to 15; 0 is that of __syncthreads().
__device__ __forceinline__ void bar_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace deep_moe::ptx
