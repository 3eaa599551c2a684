// Tensors without a framework: a view (pointer, dtype, shape, strides) and an owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

namespace deep_moe {

// Element types. Dispatch moves any of them; combine sums bfloat16, float16 and float32.
enum class DType : std::uint8_t {
  kNone = 0,
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E8M0,
  kFloat4E2M1x2,
};

// Bytes of one element; 0 for kNone.
std::size_t dtype_bytes(DType dtype);
// The name users know, e.g. "bfloat16".
const char* dtype_name(DType dtype);

inline constexpr int kMaxTensorDims = 4;  // extents of a view
inline constexpr int kCpuDevice = -1;     // else the ordinal of a CUDA device

// A tensor that somebody else owns. Strides count elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kNone;
  int num_dims = 0;
  std::int64_t shape[kMaxTensorDims] = {};
  std::int64_t stride[kMaxTensorDims] = {};
  int device = kCpuDevice;

  // `defined` is false for "no tensor given"; an empty tensor ([0, H]) is defined.
  bool defined() const { return dtype != DType::kNone; }
  std::int64_t numel() const;
  std::size_t num_bytes() const { return static_cast<std::size_t>(numel()) * dtype_bytes(dtype); }
  bool is_contiguous() const;
  std::string describe() const;  // "bfloat16 [16, 512]"
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // A row-major view.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
};

// A view together with what keeps its memory alive (a heap block, or ordinary memory).
struct Tensor {
  TensorView view;
  std::shared_ptr<void> owner;

  bool defined() const { return view.defined(); }
  template <typename T>
  T* as() const {
    return view.as<T>();
  }
};

// Ordinary row-major host memory, 64-byte aligned, uninitialised.
Tensor make_host_tensor(DType dtype, std::initializer_list<std::int64_t> shape);

}  // namespace deep_moe
