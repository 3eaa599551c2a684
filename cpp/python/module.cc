// The extension module deep_moe._C: a thin client of the C++ library. It links neither torch nor numpy.
#include "bindings.hpp"
#include "buffer_object.hpp"

namespace python = deep_moe::python;

NB_MODULE(_C, m) {
  m.doc() = "The compiled part of deep_moe. Use the package's public classes instead.";
  // A Buffer that lives until the interpreter ends is a usual thing and no mistake.
  nanobind::set_leak_warnings(false);
  python::register_errors(m);
  python::register_interrupts(m);
  python::register_tensors(m);
  python::register_config(m);
  python::register_sizes(m);
  python::register_build_info(m);
  auto buffer = python::register_buffer(m);
  python::register_high_throughput(buffer);
  python::register_low_latency(m, buffer);
  python::register_bench(m);
}
