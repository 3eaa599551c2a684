// Programmatic dependent launch: a kernel that starts before the one in front of it in its stream has ended. On chips
// older than sm_90 there is no such launch, and both do nothing.
#pragma once

namespace deep_moe::ptx {

// The kernel behind this one may start once every block has said so or has left.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernel in front has ended, with all it has written visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace deep_moe::ptx
