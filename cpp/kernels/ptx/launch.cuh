// Programmatic dependent launch: a kernel that starts before the one in front of it in its stream has ended. On chips
// older than sm_90 there is no such launch, and both do nothing.
#pragma once

#include "kernels/ptx/features.cuh"

namespace deep_moe::ptx {

// The kernel behind this one may start once every block has said so or has left.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  if constexpr (kHasSm90Features) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when the kernel in front has ended, with all it has written visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  if constexpr (kHasSm90Features) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace deep_moe::ptx
