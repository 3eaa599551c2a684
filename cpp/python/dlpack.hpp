// The part of DLPack (https://dmlc.github.io/dlpack) that takes tensors from a framework and hands them to it, without
// linking it. The layout is fixed by the specification.
//
// Any version: a capsule named "dltensor" holds a DLManagedTensor; the consumer renames it to "used_dltensor" and calls
// `deleter` when the memory is no longer needed, from any thread. Since 1.3, where the framework has it: a table of
// functions that do both ways without a Python call, in a capsule that is an attribute of the tensor class.
#pragma once

#include <cstdint>

namespace deep_moe::python::dlpack {

inline constexpr const char* kCapsuleName = "dltensor";
inline constexpr const char* kExchangeCapsuleName = "dlpack_exchange_api";
inline constexpr std::uint32_t kMajorVersion = 1;  // of what is below

enum DeviceType : std::int32_t { kDeviceCpu = 1, kDeviceCuda = 2 };

enum TypeCode : std::uint8_t {
  kCodeInt = 0,
  kCodeUInt = 1,
  kCodeFloat = 2,
  kCodeBFloat = 4,
  kCodeBool = 6,
  kCodeFloat8E4M3 = 10,
  kCodeFloat8E5M2 = 12,
  kCodeFloat8E8M0 = 14,
  kCodeFloat4E2M1 = 17,
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

struct Version {
  std::uint32_t major, minor;
};

struct DLManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  std::uint64_t flags;
  DLTensor tensor;
};

// All need the GIL, order no streams, and return 0, or -1 with a Python error set.
struct ExchangeApi {
  Version version;
  ExchangeApi* older;  // null, or what there was before
  void (*allocate)();  // not called here
  int (*export_tensor)(void* py_object, DLManagedTensorVersioned** out);
  // Takes over the tensor.
  int (*import_tensor)(DLManagedTensorVersioned* tensor, void** py_object);
  // May be null. Shape and strides live as long as the object is left alone.
  int (*look_at_tensor)(void* py_object, DLTensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64 && sizeof(DLManagedTensorVersioned) == 80 &&
                  sizeof(ExchangeApi) == 56,
              "the layout is the specification's");

}  // namespace deep_moe::python::dlpack
