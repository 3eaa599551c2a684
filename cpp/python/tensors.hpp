// Tensors across the border, by DLPack: where torch has its table of functions (since 2.10 or so) by these, else torch
// tensors come in by attribute calls and go out in capsules.
//
// Everything here needs the GIL, except the deleter of a tensor that went out.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include <deep_moe/tensor.hpp>

namespace deep_moe::python {

// A view of a tensor on `device` (a CUDA ordinal or kCpuDevice); undefined for None. Throws ArgumentTypeError or
// ArgumentError that name the argument.
TensorView view_of(nanobind::handle tensor, const char* name, int device);

// A torch tensor that shares and keeps alive the memory; None for an undefined one. Orders no streams.
nanobind::object to_torch(Tensor tensor);

// What a torch.dtype is here. Throws ArgumentTypeError.
DType dtype_of(nanobind::handle dtype, const char* name);

// Whole numbers: ints, anything with __index__, and floats without a fraction.
std::int64_t to_int(nanobind::handle value, const char* name);
bool to_bool(nanobind::handle value, const char* name);
// An address as an int: a stream or an event; 0 is null.
void* to_pointer(nanobind::handle value, const char* name);

// "float", "None", "list of 3": what came, for messages.
std::string describe(nanobind::handle value);

}  // namespace deep_moe::python
