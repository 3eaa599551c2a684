// Waiting without the GIL, and Ctrl-C while waiting.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>

#include <deep_moe/error.hpp>

namespace deep_moe::python {

// Leaves a wait because a Python signal handler raised. The library may keep and rethrow this for as long as the Buffer
// stays failed, so it is an ordinary error; the handler's own exception rides along and is raised once.
class Interrupted : public Error {
 public:
  explicit Interrupted(nanobind::python_error raised);

  // Raises the handler's exception if that has not happened yet. Needs the GIL.
  void raise_once() const;

 private:
  std::shared_ptr<std::optional<nanobind::python_error>> raised_;
};

// Set as the interpreter begins to end: from then on nothing may enter Python from a wait or a deleter.
bool interpreter_is_ending();

// Runs pending signal handlers; throws Interrupted if one raised. May be called on any thread, without the GIL.
void check_signals();

// Runs f without the GIL: for everything that may wait.
template <typename F>
auto without_gil(F&& f) {
  try {
    nanobind::gil_scoped_release release;
    return std::forward<F>(f)();
  } catch (const Interrupted& error) {
    error.raise_once();
    throw;
  }
}

}  // namespace deep_moe::python
