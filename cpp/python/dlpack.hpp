// The part of DLPack (https://dmlc.github.io/dlpack) that hands tensors to a framework without linking it.
//
// The layout is fixed by the specification: a capsule named "dltensor" holds a DLManagedTensor; the consumer renames it
// to "used_dltensor" and calls `deleter` when the memory is no longer needed, from any thread.
#pragma once

#include <cstdint>

namespace deep_moe::python::dlpack {

inline constexpr const char* kCapsuleName = "dltensor";

enum DeviceType : std::int32_t { kDeviceCpu = 1, kDeviceCuda = 2 };

enum TypeCode : std::uint8_t {
  kCodeInt = 0,
  kCodeUInt = 1,
  kCodeFloat = 2,
  kCodeBFloat = 4,
  kCodeBool = 6,
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "the layout is the specification's");

}  // namespace deep_moe::python::dlpack
