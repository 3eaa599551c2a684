// What this build is. The facts come in as compile definitions.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include <deep_moe/buffer.hpp>
#include <deep_moe/version.hpp>

#include "bindings.hpp"
#include "runtime/network.hpp"
#include "runtime/tcp.hpp"

#ifndef DEEP_MOE_CUDA_COMPILED
#define DEEP_MOE_CUDA_COMPILED 0
#endif
#ifndef DEEP_MOE_CUDA_ARCHS
#define DEEP_MOE_CUDA_ARCHS ""
#endif
#ifndef DEEP_MOE_SM90_ARCHS
#define DEEP_MOE_SM90_ARCHS ""
#endif
#ifndef DEEP_MOE_CUDA_MAJOR
#define DEEP_MOE_CUDA_MAJOR 0
#endif

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

// "80;90a" -> ["80", "90a"]
nb::list architectures(const char* text) {
  nb::list archs;
  std::string current;
  for (const char* at = text;; ++at) {
    const bool ends = *at == '\0' || *at == ';' || *at == ',' || *at == ' ';
    if (!ends) {
      current += *at;
      continue;
    }
    if (!current.empty()) archs.append(current.c_str());
    current.clear();
    if (*at == '\0') return archs;
  }
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = deep_moe::version();
  info["variant"] = DEEP_MOE_CUDA_COMPILED ? "cu" + std::to_string(DEEP_MOE_CUDA_MAJOR) : std::string("cpu");
  info["cuda_compiled"] = static_cast<bool>(DEEP_MOE_CUDA_COMPILED);
  info["cuda_archs"] = architectures(DEEP_MOE_CUDA_ARCHS);
  info["sm90_archs"] = architectures(DEEP_MOE_SM90_ARCHS);
  info["cuda_transport"] = cuda_transport_compiled();
  info["simd"] = simd_level();
  info["compiler"] = compiler();
#if defined(Py_LIMITED_API)
  info["abi3"] = true;
#else
  info["abi3"] = false;
#endif
  return info;
}

nb::dict network() {
  const NetworkStatus& status = network_status();
  nb::dict named;
  named["path"] = status.path;
  named["problem"] = status.problem;
  named["built_against"] = status.built_against;
  named["library"] = status.library;
  return named;
}

}  // namespace

void register_build_info(nb::module_& m) {
  m.def("build_info", build_info, nb::sig("def build_info() -> dict[str, typing.Any]"),
        "version: str; variant: \"cpu\", \"cu12\" or \"cu13\"; cuda_compiled: bool; cuda_archs: list[str], such as\n"
        "\"90a\"; sm90_archs: list[str], those whose code uses what came with sm_90; cuda_transport: bool, whether\n"
        "rows can be moved between GPUs; simd: str, chosen at run time; compiler: str; abi3: bool.");
  m.def("network_status", network, nb::sig("def network_status() -> dict[str, str]"),
        "Loads the plug-in for exchanges between nodes, once: path, problem (empty where it serves), built_against,\n"
        "library (versions of NVSHMEM).");
  m.def("own_addresses", own_addresses, nb::sig("def own_addresses() -> list[str]"),
        "Where ranks of other machines reach this one's: of the interfaces that DEEP_MOE_SOCKET_IFNAME names, else of\n"
        "all that are up, those first that are likely to serve.");
}

}  // namespace deep_moe::python
