// A call under way on a GPU Buffer; for the files that make up CudaBuffer.
#pragma once

#include "cuda/cuda_buffer.hpp"
#include "cuda/driver.hpp"

namespace deep_moe::cuda {

// Throws what has failed the Buffer.
struct CudaBuffer::Call {
  explicit Call(CudaBuffer& buffer);
  CallGate::Pass pass;
  OnDevice on_device;
};

}  // namespace deep_moe::cuda
