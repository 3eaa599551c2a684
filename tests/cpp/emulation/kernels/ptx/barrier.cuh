// Counterpart of cpp/kernels/ptx/barrier.cuh.
#pragma once

#include <cuda_runtime.h>

namespace deep_moe::ptx {

inline void barrier_sync(int id, int num_threads) { ::emulation::Block::here().named_barrier(id, num_threads, true); }
inline void barrier_arrive(int id, int num_threads) {
  ::emulation::Block::here().named_barrier(id, num_threads, false);
}

}  // namespace deep_moe::ptx
