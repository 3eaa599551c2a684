// The parts of the module _C; module.cc puts them together.
#pragma once

#include <nanobind/nanobind.h>

namespace deep_moe::python {

class BufferObject;

void register_errors(nanobind::module_& m);
void register_interrupts(nanobind::module_& m);
void register_tensors(nanobind::module_& m);
void register_config(nanobind::module_& m);
void register_sizes(nanobind::module_& m);
void register_build_info(nanobind::module_& m);
void register_bench(nanobind::module_& m);

nanobind::class_<BufferObject> register_buffer(nanobind::module_& m);
void register_high_throughput(nanobind::class_<BufferObject>& cls);
void register_low_latency(nanobind::module_& m, nanobind::class_<BufferObject>& cls);

}  // namespace deep_moe::python
