// NVSHMEM under the kernels between nodes: its public device calls, nothing of its inside.
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>
#include <exception>
#include <string>

#include "kernels/internode/combine_kernel.cuh"
#include "kernels/internode/direct_combine_kernel.cuh"
#include "kernels/internode/direct_dispatch_kernel.cuh"
#include "kernels/internode/dispatch_kernel.cuh"
#include "kernels/internode/notify_kernel.cuh"
#include "nvshmem/plugin.hpp"

namespace deep_moe::nvshmem {
namespace {

using kernels::Stream;
using kernels::internode::DirectDomain;
using kernels::internode::RailDomain;

// What kernels/internode/network.cuh asks for. Ranks of the group are process elements.
struct NvshmemNetwork {
  char* block;

  static constexpr bool kDirect = false;
  __device__ char* memory() const { return block; }
  __device__ void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word,
                             std::uint64_t value) const {
    __syncwarp();
    nvshmemx_putmem_signal_nbi_warp(block + to, block + from, bytes, reinterpret_cast<std::uint64_t*>(block + word),
                                    value, NVSHMEM_SIGNAL_SET, rank);
  }
  __device__ void put_signal_by_block(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t word,
                                      std::uint64_t value) const {
    __syncthreads();
    nvshmemx_putmem_signal_nbi_block(block + to, block + from, bytes, reinterpret_cast<std::uint64_t*>(block + word),
                                     value, NVSHMEM_SIGNAL_SET, rank);
  }
  __device__ void signal(int rank, std::size_t word, std::uint64_t value) const {
    nvshmemx_signal_op(reinterpret_cast<std::uint64_t*>(block + word), value, NVSHMEM_SIGNAL_SET, rank);
  }
  __device__ bool is(std::size_t word, std::uint64_t value) const {
    return nvshmem_uint64_test(reinterpret_cast<std::uint64_t*>(block + word), NVSHMEM_CMP_EQ, value) != 0;
  }
};

const char* failure(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}
const char* status_of(const char* what, int status) {
  return status == 0 ? nullptr : failure(std::string(what) + " failed with " + std::to_string(status));
}
template <typename Body>
const char* guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

const char* library_version(int numbers[3]) {
  nvshmemx_vendor_get_version_info(numbers, numbers + 1, numbers + 2);
  return nullptr;
}

static_assert(sizeof(nvshmemx_uniqueid_t) == kUniqueIdBytes);

const char* unique_id(char id[kUniqueIdBytes]) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (const char* error = status_of("nvshmemx_get_uniqueid", nvshmemx_get_uniqueid(&made))) return error;
  std::memcpy(id, &made, kUniqueIdBytes);
  return nullptr;
}

const char* start(int rank, int num_ranks, const char id[kUniqueIdBytes]) {
  nvshmemx_uniqueid_t same;
  std::memcpy(&same, id, kUniqueIdBytes);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const char* error = status_of("nvshmemx_set_attr_uniqueid_args",
                                    nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &same, &attributes)))
    return error;
  // The host library first, for it tells of errors, on which nvshmemx_init_attr ends the process; then that, for it
  // attaches the device code of this file.
  if (const char* error =
          status_of("nvshmemx_hostlib_init_attr", nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes)))
    return error;
  nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  if (nvshmem_my_pe() != rank || nvshmem_n_pes() != num_ranks)
    return failure("NVSHMEM says that this is element " + std::to_string(nvshmem_my_pe()) + " of " +
                   std::to_string(nvshmem_n_pes()) + ", and it is rank " + std::to_string(rank) + " of " +
                   std::to_string(num_ranks));
  return nullptr;
}

const char* allocate(std::size_t bytes, char** block) {
  *block = static_cast<char*>(nvshmem_calloc(1, bytes));
  return *block != nullptr ? nullptr
                           : failure("NVSHMEM has no " + std::to_string(bytes) + " bytes: NVSHMEM_SYMMETRIC_SIZE");
}

const char* quiet(Stream stream) {
  nvshmemx_quiet_on_stream(static_cast<cudaStream_t>(stream));
  return nullptr;
}

const char* prepare() {
  return guarded([] {
    kernels::internode::load_notify<NvshmemNetwork>();
    kernels::internode::load_dispatch<NvshmemNetwork>();
    kernels::internode::load_combine<NvshmemNetwork>();
    kernels::internode::load_direct_dispatch<NvshmemNetwork>();
    kernels::internode::load_direct_combine<NvshmemNetwork>();
  });
}

const char* notify(const RailDomain& domain, char* block, const kernels::internode::NotifyArgs& args, Stream stream) {
  return guarded([&] { kernels::internode::launch_notify(domain, NvshmemNetwork{block}, args, stream); });
}
const char* dispatch(const RailDomain& domain, char* block, const kernels::internode::DispatchArgs& args,
                     Stream stream) {
  return guarded([&] { kernels::internode::launch_dispatch(domain, NvshmemNetwork{block}, args, stream); });
}
const char* combine(const RailDomain& domain, char* block, const kernels::internode::CombineArgs& args, Stream stream) {
  return guarded([&] { kernels::internode::launch_combine(domain, NvshmemNetwork{block}, args, stream); });
}

const char* low_latency_dispatch(const DirectDomain& domain, char* block, const kernels::LowLatencyDispatchArgs& args,
                                 Stream stream) {
  return guarded([&] { kernels::internode::launch_direct_dispatch(domain, NvshmemNetwork{block}, args, stream); });
}
const char* low_latency_combine(const DirectDomain& domain, char* block, const kernels::LowLatencyCombineArgs& args,
                                Stream stream) {
  return guarded([&] { kernels::internode::launch_direct_combine(domain, NvshmemNetwork{block}, args, stream); });
}
const char* low_latency_refuse(const DirectDomain& domain, char* block, const kernels::internode::DirectRefusal& args,
                               Stream stream) {
  return guarded([&] { kernels::internode::launch_direct_refusal(domain, NvshmemNetwork{block}, args, stream); });
}

#define DEEP_MOE_TEXT(value) #value
#define DEEP_MOE_TEXT_OF(value) DEEP_MOE_TEXT(value)
constexpr const char* kBuiltAgainst = DEEP_MOE_TEXT_OF(NVSHMEM_VENDOR_MAJOR_VERSION) "." DEEP_MOE_TEXT_OF(
    NVSHMEM_VENDOR_MINOR_VERSION) "." DEEP_MOE_TEXT_OF(NVSHMEM_VENDOR_PATCH_VERSION);

}  // namespace
}  // namespace deep_moe::nvshmem

extern "C" __attribute__((visibility("default"))) const deep_moe::nvshmem::Plugin* deep_moe_nvshmem_plugin() {
  using namespace deep_moe::nvshmem;
  static const Plugin plugin{kPluginVersion,
                             kBuiltAgainst,
                             library_version,
                             unique_id,
                             start,
                             allocate,
                             quiet,
                             prepare,
                             notify,
                             dispatch,
                             combine,
                             low_latency_dispatch,
                             low_latency_combine,
                             low_latency_refuse};
  return &plugin;
}
