// What the launch functions of this folder share: checks of arguments, the choice of the id type, loading.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include <deep_moe/error.hpp>

#include "kernels/api.hpp"
#include "kernels/protocol/cuda_check.hpp"

namespace deep_moe::kernels {

inline void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw ArgumentError(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) +
                      " to " + std::to_string(high));
}

inline void check_domain(const DeviceDomain& domain) {
  check_range("domain.num_ranks", domain.num_ranks, 1, layout::kMaxKernelRanks);
  check_range("domain.rank", domain.rank, 0, domain.num_ranks - 1);
}

inline void check_ids(const TopkIds& ids, int num_experts, int num_blocks) {
  check_range("num_experts", num_experts, 1, layout::kMaxExperts);
  check_range("num_blocks", num_blocks, 0, layout::kMaxNotifyBlocks);
  check_range("ids.topk", ids.topk, 1, layout::kMaxTopk);
  check_range("ids.num_tokens", ids.num_tokens, 0, INT32_MAX);
  if (ids.num_tokens > 0) check_range("ids.row_stride", ids.row_stride, ids.topk, INT64_MAX);
  if (ids.num_tokens > 0 && ids.data == nullptr)
    throw ArgumentError("ids.data is null; allowed: null only without tokens");
}

// Calls `body` with a value of the id type.
template <typename Body>
void with_id_type(int id_bytes, Body body) {
  switch (id_bytes) {
    case 4: return body(std::int32_t{});
    case 8: return body(std::int64_t{});
    default: throw ArgumentError("ids.id_bytes is " + std::to_string(id_bytes) + "; allowed: 4, 8");
  }
}

// Makes the driver set local memory aside for as many bytes a thread on the current device. It does so by itself when a
// kernel is launched that needs more than any before, but waits for all kernels of the device to end first, and one of
// them may be waiting for that very launch: ranks that share a GPU.
void reserve_local_memory(std::size_t bytes);

// Makes the driver load a kernel now, with the local memory that it needs, and lets it take that much dynamic shared
// memory.
template <typename Kernel>
void load_kernel(Kernel* kernel, int dynamic_shared_bytes) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  reserve_local_memory(attributes.localSizeBytes);
  if (dynamic_shared_bytes > 0) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_shared_bytes),
               "setting a kernel's shared memory");
  }
}

// Whether the code that runs on the current device may use the copy engine; kept from prepare(). With
// DEEP_MOE_COPY_ENGINE=0 it never does: the paths of sm_80 on later devices.
bool has_copy_engine();

// Launches `num_blocks` blocks. With `early` the launch may start before the kernel in front of it has ended, and has
// to wait for that by itself.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int num_blocks, int num_warps, std::size_t shared_bytes, Stream stream,
            bool early, const char* what, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(32 * num_warps));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && has_copy_engine() ? 1 : 0;  // both came with sm_90
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

// Of each file with kernels.
void prepare_layout();
void prepare_notify();
void prepare_dispatch();
void prepare_combine();
void prepare_expert_major();
int loaded_code_version();  // 90 for sm_90

}  // namespace deep_moe::kernels
