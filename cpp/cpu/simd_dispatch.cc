// Which SimdOps this machine runs.
#include <cstdlib>
#include <string>

#if defined(DEEP_MOE_X86_SIMD)
#include <cpuid.h>
#endif

#include <deep_moe/buffer.hpp>

#include "cpu/simd.hpp"

namespace deep_moe::cpu {

#if defined(DEEP_MOE_X86_SIMD)
bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const SimdOps& choose_simd_ops(const char* wanted) {
  const std::string level = wanted == nullptr || *wanted == '\0' ? "avx512" : wanted;
  if (level != "generic" && level != "avx2" && level != "avx512")
    throw ArgumentError("DEEP_MOE_SIMD is '" + level + "'; allowed: generic, avx2, avx512");
#if defined(DEEP_MOE_X86_SIMD)
  if (level == "avx512" && has_avx512()) return kAvx512Ops;
  if (level != "generic" && has_avx2()) return kAvx2Ops;
#endif
  return kGenericOps;
}

const SimdOps& simd_ops() {
  static const SimdOps& ops = choose_simd_ops(std::getenv("DEEP_MOE_SIMD"));
  return ops;
}

}  // namespace deep_moe::cpu

namespace deep_moe {

const char* simd_level() { return cpu::simd_ops().name; }

}  // namespace deep_moe
