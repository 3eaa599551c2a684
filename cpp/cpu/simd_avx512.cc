// SimdOps with AVX-512 (F, BW, VL, DQ). Only reached where the machine has them (simd_dispatch.cc).
#include <immintrin.h>

#include "cpu/logfmt_kernels.hpp"
#include "cpu/simd_kernels.hpp"

namespace deep_moe::cpu {
namespace {

struct Avx512 {
  static constexpr int kBytes = 64;
  // The forms with a mask, all of it set, cost nothing; the plain ones make gcc warn of an uninitialised value.
  static constexpr __mmask16 kAll = 0xffff;

  static Floats<kBytes> load_fp16(const char* ptr) {
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ptr)));
  }

  static void store_fp16(char* ptr, Floats<kBytes> value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ptr), _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT));
  }

  static void store_bytes(char* ptr, const Words<kBytes>* vectors) {
    for (int i = 0; i < 4; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(ptr + 16 * i), _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)vectors[i]));
  }

  static void store_shorts(char* ptr, const Words<kBytes>* vectors) {
    for (int i = 0; i < 2; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(ptr + 32 * i),
                          _mm512_maskz_cvtepi32_epi16(kAll, (__m512i)vectors[i]));
  }
};

}  // namespace

const SimdOps kAvx512Ops = simd_ops_of<Avx512>("avx512");

}  // namespace deep_moe::cpu
