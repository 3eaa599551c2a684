// Errors of the CUDA runtime become deep_moe::Error.
#pragma once

#include <cuda_runtime_api.h>

#include <deep_moe/error.hpp>

namespace deep_moe::kernels {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string(what) + " failed: " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

}  // namespace deep_moe::kernels
