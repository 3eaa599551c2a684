#include "interrupts.hpp"

#include <atomic>
#include <string>

#include "bindings.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

std::atomic<bool> exiting{false};

}  // namespace

Interrupted::Interrupted(nb::python_error raised)
    : Error(std::string("a wait was interrupted by ") + nb::type_name(raised.type()).c_str() +
            "; the Buffer has failed until reset() or destroy()"),
      raised_(std::make_shared<std::optional<nb::python_error>>(std::move(raised))) {}

void Interrupted::raise_once() const {
  if (!raised_->has_value()) return;
  nb::python_error raised = std::move(**raised_);
  raised_->reset();
  throw raised;
}

bool interpreter_is_ending() { return exiting.load(std::memory_order_relaxed); }

void check_signals() {
  if (interpreter_is_ending()) return;
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw Interrupted(nb::python_error());
}

void register_interrupts(nb::module_&) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { exiting.store(true); }));
}

}  // namespace deep_moe::python
