#include "streams.hpp"

#include <dlfcn.h>

#include "interrupts.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

PyObject* stream_query = nullptr;

struct OfThisThread {
  int device = kCpuDevice;  // of the call that runs on this thread
  void* stream = nullptr;
};

thread_local OfThisThread in_call;
thread_local OfThisThread last_answer;  // torch's

// Not in the Limited API, though every interpreter has it.
bool holds_gil() noexcept {
  using Check = int (*)();
  static const auto check = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() == 1;
}

// Needs the GIL. A null stream where torch cannot tell; leaves no Python error behind.
void* ask_torch(int device) noexcept {
  if (stream_query == nullptr) return nullptr;
  PyObject* number = PyLong_FromLong(device);
  if (number == nullptr) return PyErr_Clear(), nullptr;
  PyObject* args[] = {number};
  PyObject* answer = PyObject_Vectorcall(stream_query, args, 1, nullptr);
  Py_DECREF(number);
  void* stream = answer != nullptr ? PyLong_AsVoidPtr(answer) : nullptr;
  Py_XDECREF(answer);
  if (stream == nullptr) PyErr_Clear();
  last_answer = {device, stream};
  return stream;
}

}  // namespace

CallStream::CallStream(int device) : outer_device_(in_call.device), outer_stream_(in_call.stream) {
  if (device != kCpuDevice) in_call = {device, ask_torch(device)};
}

CallStream::~CallStream() { in_call = {outer_device_, outer_stream_}; }

void* current_stream(int device) noexcept {
  if (in_call.device == device) return in_call.stream;
  if (interpreter_is_ending()) return nullptr;
  if (!holds_gil()) return last_answer.device == device ? last_answer.stream : nullptr;
  // A tensor may die while an exception is on its way.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  void* stream = ask_torch(device);
  PyErr_Restore(type, value, trace);
  return stream;
}

void set_stream_query(nb::handle query) { stream_query = query.is_none() ? nullptr : query.inc_ref().ptr(); }

}  // namespace deep_moe::python
