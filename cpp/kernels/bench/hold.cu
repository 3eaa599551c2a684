#include "kernels/bench/hold.hpp"

#include <cuda_runtime.h>

#include "kernels/intranode/dispatch.cuh"
#include "kernels/protocol/cuda_check.hpp"
#include "kernels/ptx/timer.cuh"

namespace deep_moe::bench {
namespace {

__global__ void hold_kernel(std::int64_t nanoseconds) {
  const std::uint64_t end = ptx::globaltimer_ns() + static_cast<std::uint64_t>(nanoseconds);
  while (ptx::globaltimer_ns() < end) __nanosleep(1000);
}

std::size_t shared_bytes(int num_ranks) {
  return kernels::DispatchShared(true, kernels::DispatchTuning::num_warps(true), num_ranks).total;
}

}  // namespace

void prepare_hold() {
  kernels::check_cuda(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes(layout::kMaxKernelRanks))),
                      "setting the holding kernel's shared memory");
}

void launch_hold(int num_sms, int num_ranks, std::int64_t nanoseconds, kernels::Stream stream) {
  hold_kernel<<<num_sms, 32 * kernels::DispatchTuning::num_warps(true), shared_bytes(num_ranks),
                static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  kernels::check_cuda(cudaGetLastError(), "launch of the holding kernel");
}

}  // namespace deep_moe::bench
