// Row arithmetic of the CPU backend, chosen once at run time: generic, AVX2 or AVX-512. All levels give the same bits;
// every NaN they store is the positive quiet NaN of its format.
#pragma once

#include <cstddef>
#include <cstdint>

#include <deep_moe/tensor.hpp>

#include "layout/blocks.hpp"

namespace deep_moe::cpu {

struct SimdOps {
  const char* name;
  // out = round(0 + bias0 + bias1 + rows[0] + rows[1] + ...), in fp32, in that order; biases may be null. `hidden`
  // elements of `dtype` (bf16, fp16, fp32). `out` may be one of the rows.
  void (*sum_rows)(DType dtype, const void* const* rows, int num_rows, const void* bias0, const void* bias1, void* out,
                   std::int64_t hidden);
  // out = round(0 + weights[0] * rows[0] + ...): multiply, then add, in fp32, in order.
  void (*weighted_sum_rows)(DType dtype, const void* const* rows, const float* weights, int num_rows, void* out,
                            std::int64_t hidden);
  // fp8 e4m3 with one scale for each 128 elements; `round_scale`: scales are powers of two.
  void (*cast_fp8)(DType dtype, const void* row, std::int64_t hidden, bool round_scale, std::uint8_t* out,
                   float* scales);
  // See logfmt.hpp.
  void (*logfmt_encode)(DType dtype, const void* row, std::int64_t hidden, std::uint8_t* out);
  void (*logfmt_decode)(const std::uint8_t* in, std::int64_t hidden, float* out);
};

// The highest level that this machine has. DEEP_MOE_SIMD=generic|avx2|avx512 forces a lower one; another value throws
// ArgumentError.
const SimdOps& simd_ops();
// The level that `wanted` (null: no wish) leads to.
const SimdOps& choose_simd_ops(const char* wanted);

extern const SimdOps kGenericOps;
#if defined(DEEP_MOE_X86_SIMD)
extern const SimdOps kAvx2Ops;
extern const SimdOps kAvx512Ops;
bool has_avx2();    // with F16C
bool has_avx512();  // F, BW, VL and DQ
#endif

}  // namespace deep_moe::cpu
