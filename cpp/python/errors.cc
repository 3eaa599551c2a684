// C++ errors become the Python exceptions of the same meaning. The classes themselves are written in Python
// (deep_moe/errors.py) and handed over once.
#include <cstring>

#include <deep_moe/error.hpp>

#include "bindings.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

// Borrowed for ever: the classes live as long as the process.
struct ErrorClasses {
  PyObject* error = nullptr;
  PyObject* timeout = nullptr;
  PyObject* peer_lost = nullptr;
  PyObject* peer_refused = nullptr;
  PyObject* call_mismatch = nullptr;
  PyObject* buffer_too_small = nullptr;
  PyObject* destroyed = nullptr;
  PyObject* forked_process = nullptr;
  PyObject* unavailable = nullptr;
};

ErrorClasses classes;

// A peer's reason may have been cut inside a character, so the text is decoded leniently.
void raise(PyObject* type, const std::exception& error) {
  const char* text = error.what();
  PyObject* message = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
  if (message == nullptr) return;
  PyErr_SetObject(type != nullptr ? type : PyExc_RuntimeError, message);
  Py_DECREF(message);
}

// Derived classes come before their bases.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ArgumentTypeError& error) {
    raise(PyExc_TypeError, error);
  } catch (const ArgumentError& error) {
    raise(PyExc_ValueError, error);
  } catch (const TimeoutError& error) {
    raise(classes.timeout, error);
  } catch (const PeerLostError& error) {
    raise(classes.peer_lost, error);
  } catch (const PeerRefusedError& error) {
    raise(classes.peer_refused, error);
  } catch (const CallMismatchError& error) {
    raise(classes.call_mismatch, error);
  } catch (const BufferTooSmallError& error) {
    raise(classes.buffer_too_small, error);
  } catch (const DestroyedError& error) {
    raise(classes.destroyed, error);
  } catch (const ForkedProcessError& error) {
    raise(classes.forked_process, error);
  } catch (const UnavailableError& error) {
    raise(classes.unavailable, error);
  } catch (const Error& error) {
    raise(classes.error, error);
  }
}

PyObject* keep(const nb::dict& named, const char* name) {
  nb::object found = named[name];
  if (!PyExceptionClass_Check(found.ptr())) throw nb::type_error("register_errors: exception classes only");
  return found.release().ptr();
}

}  // namespace

void register_errors(nb::module_& m) {
  nb::register_exception_translator(translate);
  m.def(
      "register_errors",
      [](const nb::dict& named) {
        classes = ErrorClasses{
            keep(named, "Error"),
            keep(named, "DeepMoeTimeoutError"),
            keep(named, "PeerLostError"),
            keep(named, "PeerRefusedError"),
            keep(named, "CallMismatchError"),
            keep(named, "BufferTooSmallError"),
            keep(named, "DestroyedError"),
            keep(named, "ForkedProcessError"),
            keep(named, "UnavailableError"),
        };
      },
      nb::sig("def register_errors(classes: dict[str, type[Exception]], /) -> None"),
      "Hands over the exception classes, by name.");
}

}  // namespace deep_moe::python
