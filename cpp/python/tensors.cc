#include "tensors.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "dlpack.hpp"
#include "streams.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

constexpr int kNumDTypes = static_cast<int>(DType::kFloat4E2M1x2) + 1;

// torch's objects, looked up once by the package, and interned names. They live as long as the process.
struct Torch {
  PyTypeObject* tensor_type = nullptr;
  PyObject* from_dlpack = nullptr;
  const dlpack::ExchangeApi* exchange = nullptr;  // null where this torch has none
  std::array<PyObject*, kNumDTypes> dtypes = {};  // null where this torch lacks the type
  PyObject* name_data_ptr = nullptr;
  PyObject* name_dtype = nullptr;
  PyObject* name_get_device = nullptr;
  PyObject* name_is_cpu = nullptr;
  PyObject* name_is_cuda = nullptr;
  PyObject* name_is_neg = nullptr;
  PyObject* name_shape = nullptr;
  PyObject* name_stride = nullptr;
  PyObject* name_view = nullptr;
};

Torch torch;

nb::object call_method(PyObject* self, PyObject* name) {
  PyObject* args[] = {self};
  return nb::steal(PyObject_VectorcallMethod(name, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// The text of the Python error that is set, which it clears.
std::string take_python_error() {
  const nb::python_error error;
  return nb::str(error.value()).c_str();
}

[[noreturn]] void refuse_unreadable(const char* name) {
  throw ArgumentTypeError(std::string(name) + ": its memory cannot be read (" + take_python_error() +
                          "); pass an ordinary dense torch.Tensor");
}

void read_extents(const nb::object& tuple, std::int64_t* out, int num_dims, const char* name) {
  for (int dim = 0; dim < num_dims; ++dim) {
    PyObject* item = NB_TUPLE_GET_ITEM(tuple.ptr(), dim);
    out[dim] = PyLong_AsLongLong(item);
    if (out[dim] == -1 && PyErr_Occurred() != nullptr) refuse_unreadable(name);
  }
}

bool is_on(PyObject* self, int device, const char* name) {
  const auto kind = nb::steal(PyObject_GetAttr(self, device == kCpuDevice ? torch.name_is_cpu : torch.name_is_cuda));
  if (!kind.is_valid()) refuse_unreadable(name);
  if (kind.ptr() != Py_True) return false;
  if (device == kCpuDevice) return true;
  const auto ordinal = call_method(self, torch.name_get_device);
  if (!ordinal.is_valid()) refuse_unreadable(name);
  return PyLong_AsLong(ordinal.ptr()) == device;
}

[[noreturn]] void refuse_device(nb::handle tensor, const char* name, int device) {
  const nb::object found = tensor.attr("device");
  const std::string wanted = device == kCpuDevice ? "the CPU" : "cuda:" + std::to_string(device);
  const std::string advice = device == kCpuDevice ? "pass a CPU tensor" : "pass a tensor on " + wanted;
  throw ArgumentError(std::string(name) + " is on " + nb::str(found).c_str() + ", but must be on " + wanted + ": " +
                      advice);
}

DType find_dtype(PyObject* dtype) {
  for (int index = 1; index < kNumDTypes; ++index) {
    if (torch.dtypes[static_cast<std::size_t>(index)] == dtype) return static_cast<DType>(index);
  }
  return DType::kNone;
}

bool may_be_negated(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

// ---- out ----

struct Exported {
  dlpack::DLManagedTensor managed = {};  // this one or the next
  dlpack::DLManagedTensorVersioned versioned = {};
  std::int64_t shape[kMaxTensorDims];
  std::int64_t stride[kMaxTensorDims];
  std::shared_ptr<void> owner;
};

// Runs wherever the last reference dies: with or without the GIL, at exit, in a forked child.
template <class Managed>
void delete_exported(Managed* managed) {
  delete static_cast<Exported*>(managed->manager_ctx);
}

// Only for a capsule that nobody took over.
void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, dlpack::kCapsuleName) == 0) return;
  auto* managed = static_cast<dlpack::DLManagedTensor*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  managed->deleter(managed);
}

// `as_bytes`: torch versions differ in which 8-bit floats they take, so those travel as uint8.
dlpack::DataType dlpack_type(DType dtype, bool* as_bytes) {
  *as_bytes = false;
  switch (dtype) {
    case DType::kBool: return {dlpack::kCodeBool, 8, 1};
    case DType::kUInt8: return {dlpack::kCodeUInt, 8, 1};
    case DType::kInt8: return {dlpack::kCodeInt, 8, 1};
    case DType::kInt16: return {dlpack::kCodeInt, 16, 1};
    case DType::kInt32: return {dlpack::kCodeInt, 32, 1};
    case DType::kInt64: return {dlpack::kCodeInt, 64, 1};
    case DType::kFloat16: return {dlpack::kCodeFloat, 16, 1};
    case DType::kBFloat16: return {dlpack::kCodeBFloat, 16, 1};
    case DType::kFloat32: return {dlpack::kCodeFloat, 32, 1};
    case DType::kFloat64: return {dlpack::kCodeFloat, 64, 1};
    default: *as_bytes = true; return {dlpack::kCodeUInt, 8, 1};
  }
}

DType dtype_of(const dlpack::DataType& type) {
  const auto is = [&](dlpack::TypeCode code, int bits, int lanes = 1) {
    return type.code == code && type.bits == bits && type.lanes == lanes;
  };
  for (const DType dtype : {DType::kBFloat16, DType::kInt64, DType::kInt32, DType::kFloat32, DType::kBool,
                            DType::kUInt8, DType::kInt8, DType::kInt16, DType::kFloat16, DType::kFloat64}) {
    bool as_bytes;
    const dlpack::DataType one = dlpack_type(dtype, &as_bytes);
    if (is(static_cast<dlpack::TypeCode>(one.code), one.bits)) return dtype;
  }
  if (is(dlpack::kCodeFloat8E4M3, 8)) return DType::kFloat8E4M3;
  if (is(dlpack::kCodeFloat8E5M2, 8)) return DType::kFloat8E5M2;
  if (is(dlpack::kCodeFloat8E8M0, 8)) return DType::kFloat8E8M0;
  if (is(dlpack::kCodeFloat4E2M1, 4, 2)) return DType::kFloat4E2M1x2;
  return DType::kNone;
}

void refuse_negated(PyObject* self, DType dtype, const char* name) {
  if (!may_be_negated(dtype)) return;
  const auto is_neg = call_method(self, torch.name_is_neg);
  if (!is_neg.is_valid()) refuse_unreadable(name);
  if (is_neg.ptr() != Py_False)
    throw ArgumentError(std::string(name) + " is a lazily negated view: pass `.resolve_neg()` of it");
}

// DLPack's table for tensors of this device; null where there is none. It has not been tried on a GPU yet.
const dlpack::ExchangeApi* exchange_for(int device) { return device == kCpuDevice ? torch.exchange : nullptr; }

// What an ordinary tensor says in one call. False for all others, which view_of() then asks one thing after another.
bool look_at(PyObject* self, const char* name, int device, TensorView* view) {
  const dlpack::ExchangeApi* const exchange = exchange_for(device);
  if (exchange == nullptr || Py_TYPE(self) != torch.tensor_type) return false;
  dlpack::DLTensor tensor{};
  if (exchange->look_at_tensor(self, &tensor) != 0) return PyErr_Clear(), false;
  const bool on_device = device == kCpuDevice ? tensor.device.type == dlpack::kDeviceCpu
                                              : tensor.device.type == dlpack::kDeviceCuda && tensor.device.id == device;
  const DType dtype = dtype_of(tensor.dtype);
  if (!on_device || dtype == DType::kNone || tensor.ndim > kMaxTensorDims) return false;
  refuse_negated(self, dtype, name);
  view->device = device;
  view->dtype = dtype;
  view->num_dims = tensor.ndim;
  for (int dim = 0; dim < tensor.ndim; ++dim) {
    view->shape[dim] = tensor.shape[dim];
    view->stride[dim] = tensor.strides[dim];
  }
  view->data = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  return view->data != nullptr || view->numel() == 0;
}

// Takes over what `exported` has to hand out.
nb::object import_exported(std::unique_ptr<Exported> exported, int device) {
  if (const dlpack::ExchangeApi* const exchange = exchange_for(device)) {
    exported->versioned.version = {dlpack::kMajorVersion, 0};
    exported->versioned.manager_ctx = exported.get();
    exported->versioned.deleter = delete_exported<dlpack::DLManagedTensorVersioned>;
    exported->versioned.tensor = exported->managed.tensor;
    void* object = nullptr;
    if (exchange->import_tensor(&exported.release()->versioned, &object) != 0) nb::raise_python_error();
    return nb::steal(static_cast<PyObject*>(object));
  }
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = delete_exported<dlpack::DLManagedTensor>;
  const auto capsule = nb::steal(PyCapsule_New(&exported->managed, dlpack::kCapsuleName, delete_capsule));
  if (!capsule.is_valid()) nb::raise_python_error();
  exported.release();  // the capsule's now
  PyObject* args[] = {capsule.ptr()};
  auto result = nb::steal(PyObject_Vectorcall(torch.from_dlpack, args, 1, nullptr));
  if (!result.is_valid()) nb::raise_python_error();
  return result;
}

// The table in the capsule, if it is one that is understood here.
const dlpack::ExchangeApi* exchange_in(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, dlpack::kExchangeCapsuleName) == 0) return nullptr;
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, dlpack::kExchangeCapsuleName));
  while (api != nullptr && api->version.major > dlpack::kMajorVersion) api = api->older;
  const bool fits = api != nullptr && api->version.major == dlpack::kMajorVersion && api->look_at_tensor != nullptr;
  return fits ? api : nullptr;
}

}  // namespace

std::string describe(nb::handle value) {
  if (value.is_none()) return "None";
  std::string text = nb::type_name(value.type()).c_str();
  const bool is_sequence = PyTuple_Check(value.ptr()) != 0 || PyList_Check(value.ptr()) != 0;
  if (is_sequence) text += " of " + std::to_string(nb::len(value));
  return text;
}

TensorView view_of(nb::handle tensor, const char* name, int device) {
  TensorView view;
  if (tensor.is_none()) return view;
  PyObject* self = tensor.ptr();
  if (Py_TYPE(self) != torch.tensor_type && PyType_IsSubtype(Py_TYPE(self), torch.tensor_type) == 0) {
    throw ArgumentTypeError(std::string(name) + " must be a torch.Tensor, got " + describe(tensor));
  }
  if (look_at(self, name, device, &view)) return view;
  view = {};
  if (!is_on(self, device, name)) refuse_device(tensor, name, device);
  view.device = device;
  const auto dtype = nb::steal(PyObject_GetAttr(self, torch.name_dtype));
  const auto shape = nb::steal(PyObject_GetAttr(self, torch.name_shape));
  const auto stride = call_method(self, torch.name_stride);
  if (!dtype.is_valid() || !shape.is_valid() || !stride.is_valid()) refuse_unreadable(name);
  view.dtype = find_dtype(dtype.ptr());
  if (!view.defined()) {
    throw ArgumentTypeError(std::string(name) + " has dtype " + nb::str(dtype).c_str() +
                            ", which deep_moe does not move; view it as one of the real types of the same size");
  }
  const Py_ssize_t num_dims = NB_TUPLE_GET_SIZE(shape.ptr());
  if (num_dims > kMaxTensorDims || NB_TUPLE_GET_SIZE(stride.ptr()) != num_dims) {
    throw ArgumentError(std::string(name) + " has " + std::to_string(num_dims) + " dimensions; at most " +
                        std::to_string(kMaxTensorDims) + " are taken");
  }
  view.num_dims = static_cast<int>(num_dims);
  read_extents(shape, view.shape, view.num_dims, name);
  read_extents(stride, view.stride, view.num_dims, name);
  refuse_negated(self, view.dtype, name);
  const auto address = call_method(self, torch.name_data_ptr);
  if (!address.is_valid()) refuse_unreadable(name);
  view.data = PyLong_AsVoidPtr(address.ptr());
  if (view.data == nullptr) {
    if (PyErr_Occurred() != nullptr) refuse_unreadable(name);
    if (view.numel() != 0) {
      throw ArgumentTypeError(std::string(name) + " has no memory of its own (" + describe(tensor) +
                              "): pass an ordinary torch.Tensor");
    }
  }
  return view;
}

nb::object to_torch(Tensor tensor) {
  if (!tensor.defined()) return nb::none();
  bool as_bytes = false;
  auto exported = std::make_unique<Exported>();
  dlpack::DLTensor& out = exported->managed.tensor;
  out.data = tensor.view.data;
  const bool on_cpu = tensor.view.device == kCpuDevice;
  out.device = {on_cpu ? dlpack::kDeviceCpu : dlpack::kDeviceCuda, on_cpu ? 0 : tensor.view.device};
  out.ndim = tensor.view.num_dims;
  out.dtype = dlpack_type(tensor.view.dtype, &as_bytes);
  for (int dim = 0; dim < out.ndim; ++dim) {
    exported->shape[dim] = tensor.view.shape[dim];
    exported->stride[dim] = tensor.view.stride[dim];
  }
  out.shape = exported->shape;
  out.strides = exported->stride;
  exported->owner = std::move(tensor.owner);
  nb::object result = import_exported(std::move(exported), tensor.view.device);
  if (!as_bytes) return result;
  PyObject* dtype = torch.dtypes[static_cast<std::size_t>(tensor.view.dtype)];
  if (dtype == nullptr) return result;
  PyObject* view_args[] = {result.ptr(), dtype};
  auto viewed =
      nb::steal(PyObject_VectorcallMethod(torch.name_view, view_args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  if (!viewed.is_valid()) nb::raise_python_error();
  return viewed;
}

DType dtype_of(nb::handle dtype, const char* name) {
  const DType found = find_dtype(dtype.ptr());
  if (found == DType::kNone) {
    throw ArgumentTypeError(std::string(name) + " must be a torch.dtype of real numbers, got " +
                            nb::repr(dtype).c_str());
  }
  return found;
}

std::int64_t to_int(nb::handle value, const char* name) {
  PyObject* object = value.ptr();
  if (PyFloat_Check(object) != 0) {
    const double number = PyFloat_AsDouble(object);
    if (number != std::floor(number) || std::abs(number) >= 9.0e18) {
      throw ArgumentTypeError(std::string(name) + " must be a whole number, got " + nb::repr(value).c_str());
    }
    return static_cast<std::int64_t>(number);
  }
  nb::object index;
  if (PyLong_Check(object) == 0) {
    index = nb::steal(PyNumber_Index(object));
    if (!index.is_valid()) {
      PyErr_Clear();
      throw ArgumentTypeError(std::string(name) + " must be a whole number, got " + describe(value));
    }
    object = index.ptr();
  }
  const long long number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ArgumentError(std::string(name) + " is out of range: " + nb::repr(value).c_str());
  }
  return number;
}

void* to_pointer(nb::handle value, const char* name) {
  if (PyLong_Check(value.ptr()) == 0) {
    throw ArgumentTypeError(std::string(name) + " must be an address as an int, got " + describe(value));
  }
  void* const address = PyLong_AsVoidPtr(value.ptr());
  if (address == nullptr && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw ArgumentError(std::string(name) + " is out of range: " + nb::repr(value).c_str());
  }
  return address;
}

bool to_bool(nb::handle value, const char* name) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) {
    PyErr_Clear();
    throw ArgumentTypeError(std::string(name) + " must be a bool, got " + describe(value));
  }
  return truth != 0;
}

void register_tensors(nb::module_& m) {
  const auto intern = [](const char* text) {
    PyObject* name = PyUnicode_InternFromString(text);
    if (name == nullptr) nb::raise_python_error();
    return name;
  };
  torch.name_data_ptr = intern("data_ptr");
  torch.name_dtype = intern("dtype");
  torch.name_get_device = intern("get_device");
  torch.name_is_cpu = intern("is_cpu");
  torch.name_is_cuda = intern("is_cuda");
  torch.name_is_neg = intern("is_neg");
  torch.name_shape = intern("shape");
  torch.name_stride = intern("stride");
  torch.name_view = intern("view");
  torch.tensor_type = Py_TYPE(Py_None);  // nothing is a tensor until torch is registered
  m.def(
      "register_torch",
      [](nb::handle tensor_type, nb::handle from_dlpack, nb::handle current_stream, const nb::dict& dtypes,
         nb::handle exchange) {
        if (PyType_Check(tensor_type.ptr()) == 0 || PyCallable_Check(from_dlpack.ptr()) == 0) {
          throw nb::type_error("register_torch: a class, a function and a dict of dtypes");
        }
        torch.tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type.inc_ref().ptr());
        torch.from_dlpack = from_dlpack.inc_ref().ptr();
        torch.exchange = exchange_in(exchange.ptr());
        set_stream_query(current_stream);
        for (int index = 1; index < kNumDTypes; ++index) {
          const char* name = dtype_name(static_cast<DType>(index));
          if (!dtypes.contains(name)) continue;
          torch.dtypes[static_cast<std::size_t>(index)] = nb::object(dtypes[name]).release().ptr();
        }
      },
      nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(),
      nb::sig("def register_torch(tensor_type: type[torch.Tensor], from_dlpack: object, "
              "current_stream: collections.abc.Callable[[int], int] | None, dtypes: dict[str, torch.dtype], "
              "exchange: object | None, /) -> None"),
      "Hands over torch's objects: the tensor class, what turns a DLPack capsule into a tensor, what tells a CUDA\n"
      "device's current stream, dtypes by name, and the capsule of DLPack's table of functions, or None.");
  m.def(
      "dtype_names",
      [] {
        nb::list names;
        for (int index = 1; index < kNumDTypes; ++index) names.append(dtype_name(static_cast<DType>(index)));
        return names;
      },
      nb::sig("def dtype_names() -> list[str]"), "The names of all element types that can be moved.");
}

}  // namespace deep_moe::python
