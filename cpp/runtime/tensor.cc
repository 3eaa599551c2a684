#include <deep_moe/tensor.hpp>

#include <cstdlib>
#include <new>

namespace deep_moe {
namespace {

struct DTypeInfo {
  std::size_t bytes;
  const char* name;
};

DTypeInfo info(DType dtype) {
  switch (dtype) {
    case DType::kNone: return {0, "none"};
    case DType::kBool: return {1, "bool"};
    case DType::kUInt8: return {1, "uint8"};
    case DType::kInt8: return {1, "int8"};
    case DType::kInt16: return {2, "int16"};
    case DType::kInt32: return {4, "int32"};
    case DType::kInt64: return {8, "int64"};
    case DType::kFloat16: return {2, "float16"};
    case DType::kBFloat16: return {2, "bfloat16"};
    case DType::kFloat32: return {4, "float32"};
    case DType::kFloat64: return {8, "float64"};
    case DType::kFloat8E4M3: return {1, "float8_e4m3fn"};
    case DType::kFloat8E5M2: return {1, "float8_e5m2"};
    case DType::kFloat8E8M0: return {1, "float8_e8m0fnu"};
    case DType::kFloat4E2M1x2: return {1, "float4_e2m1fn_x2"};
  }
  return {0, "unknown"};
}

}  // namespace

std::size_t dtype_bytes(DType dtype) { return info(dtype).bytes; }
const char* dtype_name(DType dtype) { return info(dtype).name; }

std::int64_t TensorView::numel() const {
  if (!defined()) return 0;
  std::int64_t count = 1;
  for (int i = 0; i < num_dims; ++i) count *= shape[i];
  return count;
}

bool TensorView::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = num_dims - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != expected) return numel() == 0;
    expected *= shape[i];
  }
  return true;
}

std::string TensorView::describe() const {
  if (!defined()) return "none";
  std::string text = std::string(dtype_name(dtype)) + " [";
  for (int i = 0; i < num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  for (const std::int64_t dim : shape) view.shape[view.num_dims++] = dim;
  std::int64_t stride = 1;
  for (int i = view.num_dims - 1; i >= 0; --i) {
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

Tensor make_host_tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor tensor;
  tensor.view = TensorView::contiguous(nullptr, dtype, shape);
  const std::size_t bytes = (tensor.view.num_bytes() / 64 + 1) * 64;  // never zero
  void* data = std::aligned_alloc(64, bytes);
  if (data == nullptr) throw std::bad_alloc();
  tensor.view.data = data;
  tensor.owner = std::shared_ptr<void>(data, std::free);
  return tensor;
}

}  // namespace deep_moe
