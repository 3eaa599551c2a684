// SimdOps with AVX2 and F16C. Only reached where the machine has them (simd_dispatch.cc).
#include <immintrin.h>

#include "cpu/logfmt_kernels.hpp"
#include "cpu/simd_kernels.hpp"

namespace deep_moe::cpu {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;

  static Floats<kBytes> load_fp16(const char* ptr) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ptr)));
  }

  static void store_fp16(char* ptr, Floats<kBytes> value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ptr), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  // Packs work on 128-bit lanes; the last permutation puts the pieces in order.
  static void store_bytes(char* ptr, const Words<kBytes>* vectors) {
    const __m256i low = _mm256_packus_epi32((__m256i)vectors[0], (__m256i)vectors[1]);
    const __m256i high = _mm256_packus_epi32((__m256i)vectors[2], (__m256i)vectors[3]);
    const __m256i bytes = _mm256_packus_epi16(low, high);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ptr), _mm256_permutevar8x32_epi32(bytes, order));
  }

  static void store_shorts(char* ptr, const Words<kBytes>* vectors) {
    const __m256i shorts = _mm256_packus_epi32((__m256i)vectors[0], (__m256i)vectors[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ptr), _mm256_permute4x64_epi64(shorts, _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

}  // namespace

const SimdOps kAvx2Ops = simd_ops_of<Avx2>("avx2");

}  // namespace deep_moe::cpu
