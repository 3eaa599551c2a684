// Arithmetic that CUDA has no name for.
#pragma once

namespace deep_moe::ptx {

// One over a number, with an error in the last bit; nothing is subnormal.
__device__ __forceinline__ float rcp_approx(float value) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

}  // namespace deep_moe::ptx
