// The network plug-in, libdeep_moe_nvshmem.so: the kernels between nodes over NVSHMEM, and what of its host library
// they need. One exported C function gives a table, so that nothing else of deep_moe depends on NVSHMEM
// (runtime/network.hpp loads it).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/internode/api.hpp"

namespace deep_moe::nvshmem {

inline constexpr int kPluginVersion = 3;  // of this header
inline constexpr std::size_t kUniqueIdBytes = 128;

// Functions return null, or what went wrong in text that stays valid until the thread's next call. All but `version`
// and `unique_id` belong to a process that has called `start`, which it does at most once. A process element is a rank
// of the group.
struct Plugin {
  int version = 0;                                           // kPluginVersion of the file
  const char* built_against = nullptr;                       // NVSHMEM, as "3.4.5"
  const char* (*library_version)(int numbers[3]) = nullptr;  // of the library that is loaded
  const char* (*unique_id)(char id[kUniqueIdBytes]) = nullptr;
  const char* (*start)(int rank, int num_ranks, const char id[kUniqueIdBytes]) = nullptr;  // collective, current device
  // Collective: symmetric memory, zeroed, with its own address. Never freed: freeing is collective, the end of a Buffer
  // is not.
  const char* (*allocate)(std::size_t bytes, char** block) = nullptr;
  const char* (*quiet)(kernels::Stream stream) = nullptr;  // G5, in stream order
  const char* (*prepare)() = nullptr;                      // as kernels::prepare(), on the current device
  const char* (*notify)(const kernels::internode::RailDomain& domain, char* block,
                        const kernels::internode::NotifyArgs& args, kernels::Stream stream) = nullptr;
  const char* (*dispatch)(const kernels::internode::RailDomain& domain, char* block,
                          const kernels::internode::DispatchArgs& args, kernels::Stream stream) = nullptr;
  const char* (*combine)(const kernels::internode::RailDomain& domain, char* block,
                         const kernels::internode::CombineArgs& args, kernels::Stream stream) = nullptr;
  const char* (*low_latency_dispatch)(const kernels::internode::DirectDomain& domain, char* block,
                                      const kernels::LowLatencyDispatchArgs& args, kernels::Stream stream) = nullptr;
  const char* (*low_latency_combine)(const kernels::internode::DirectDomain& domain, char* block,
                                     const kernels::LowLatencyCombineArgs& args, kernels::Stream stream) = nullptr;
  const char* (*low_latency_refuse)(const kernels::internode::DirectDomain& domain, char* block,
                                    const kernels::internode::DirectRefusal& args, kernels::Stream stream) = nullptr;
};

// What the file exports: deep_moe_nvshmem_plugin().
using GetPlugin = const Plugin* (*)();

}  // namespace deep_moe::nvshmem
