// The network plug-in, libdeep_moe_nvshmem.so, loaded when first needed. Everything else works without it.
#pragma once

#include <string>

#include "nvshmem/plugin.hpp"

namespace deep_moe {

struct NetworkStatus {
  std::string path;           // where the plug-in is looked for
  std::string problem;        // why it cannot be used, and what to install; empty: it can
  std::string built_against;  // NVSHMEM's version, where it has been loaded
  std::string library;        // of the NVSHMEM that it found
};
// Tries once a process. DEEP_MOE_NVSHMEM_PLUGIN names another file than the one beside this code.
const NetworkStatus& network_status();
// Throws UnavailableError with the problem.
const nvshmem::Plugin& network_plugin();

}  // namespace deep_moe
