// How a combine's rows travel as logarithms. README.md beside this file has the words and the order among them.
#pragma once

#include "kernels/low_latency/combine.cuh"
#include "kernels/low_latency/logfmt.cuh"

namespace deep_moe::kernels {

// A lane has eight numbers one after another, and a unit of theirs; a warp has two blocks.
template <typename T, bool kPlain_>
struct Logfmt {
  static constexpr int kVectors = kLogfmtNumbers * static_cast<int>(sizeof(T)) / 16, kUnits = 1;
  static constexpr int kParts = 1;
  static constexpr bool kPlain = kPlain_;
};

template <typename T, bool kPlain>
struct LaneTile<Logfmt<T, kPlain>> {
  using Width = Logfmt<T, kPlain>;
  static constexpr int kVectorStride = 16;

  int group;  // of eight numbers in the row
  bool has_any;

  __device__ __forceinline__ LaneTile(int num_vectors, int part)
      : group(part * 32 + lane_id()), has_any(group < num_vectors / Width::kVectors) {}
  __device__ __forceinline__ bool has_vector(int) const { return has_any; }
  __device__ __forceinline__ bool has_unit(int) const { return has_any && group % kLogfmtLanes < kLogfmtUnits; }
  __device__ __forceinline__ std::uint32_t vector_offset(int j) const {
    return static_cast<std::uint32_t>(group * Width::kVectors + j) * 16;
  }
  __device__ __forceinline__ std::uint32_t unit_offset() const {
    return static_cast<std::uint32_t>(group / kLogfmtLanes * kLogfmtUnits + group % kLogfmtLanes) * layout::kUnitBytes;
  }
  __device__ __forceinline__ void store_units(char* row, const LaneUnits<Width>& units) const {
    if (has_unit(0)) ptx::st_relaxed_sys_16(row + unit_offset(), units.u[0]);
  }
  __device__ __forceinline__ void load_units(const char* row, LaneUnits<Width>* units) const {
    if (has_unit(0)) units->u[0] = ptx::ld_relaxed_sys_16(row + unit_offset());
  }
  __device__ __forceinline__ void store_vectors(char* row, const LaneVectors<Width>& vectors) const {
#pragma unroll
    for (int j = 0; j < Width::kVectors; ++j)
      if (has_any) ptx::st_weak_16(row + vector_offset(j), vectors.v[j]);
  }
};

template <typename T, bool kPlain>
struct Wire<T, Logfmt<T, kPlain>> {
  using Width = Logfmt<T, kPlain>;
  static constexpr bool kHasScales = true;

  using Coded = LogfmtCodes;
  __device__ __forceinline__ static Coded coded(const LaneVectors<Width>& vectors) {
    constexpr int kPerVector = kLogfmtNumbers / Width::kVectors;
    float numbers[kLogfmtNumbers];
#pragma unroll
    for (int i = 0; i < kLogfmtNumbers; ++i) numbers[i] = number<T>(vectors.v[i / kPerVector], i % kPerVector);
    return LogfmtMath::encode(numbers);
  }
  __device__ __forceinline__ static LaneUnits<Width> sent(const Coded& coded, std::uint32_t tag) {
    return {{LogfmtUnit::pack(coded, tag)}};
  }
  __device__ __forceinline__ static LaneNumbers received(const LaneUnits<Width>& units) {
    return kept(LogfmtUnit::unpack(units.u[0]));
  }
  __device__ __forceinline__ static LaneNumbers kept(const Coded& coded) {
    LaneNumbers numbers;
    LogfmtMath::decode(coded, numbers.n);
    return numbers;
  }
};

}  // namespace deep_moe::kernels
