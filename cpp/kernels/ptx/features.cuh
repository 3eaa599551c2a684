// Which code uses what came with sm_90: the bulk copy engine and early launches. Chosen for each architecture of a
// build by itself, so that one library has the quick code for new chips beside code that old ones can run.
#pragma once

// What the build left out (cmake/CudaArchitectures.cmake): 0 nothing, 1 all, else up to four values of __CUDA_ARCH__,
// as four digits each of one number: 9001000 is 900 and 1000.
#ifndef DEEP_MOE_DISABLE_SM90_FEATURES
#define DEEP_MOE_DISABLE_SM90_FEATURES 0
#endif

namespace deep_moe::ptx {

// `arch` as in __CUDA_ARCH__: 900 for sm_90.
constexpr bool has_sm90_features(int arch) {
  constexpr long long kDisabled = DEEP_MOE_DISABLE_SM90_FEATURES;
  if (kDisabled == 1) return false;
  for (long long rest = kDisabled; rest > 0; rest /= 10000) {
    if (rest % 10000 == arch) return false;
  }
  return arch >= 900;
}

// Of the code being compiled. What depends on it stands behind `if constexpr`.
#ifdef __CUDA_ARCH__
inline constexpr bool kHasSm90Features = has_sm90_features(__CUDA_ARCH__);
#else
inline constexpr bool kHasSm90Features = false;
#endif

}  // namespace deep_moe::ptx
