// Masks of ranks, from the host in stream order.
#include <cuda_runtime.h>

#include "kernels/low_latency/launch.hpp"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {
namespace {

__device__ __forceinline__ layout::LowLatencyState& low_latency_state(const DeviceDomain& domain) {
  return *reinterpret_cast<layout::LowLatencyState*>(domain.words.low_latency_state(domain.workspaces[domain.rank]));
}

__global__ void mask_kernel(const __grid_constant__ DeviceDomain domain, std::uint64_t ranks) {
  low_latency_state(domain).masked |= ranks;
}

__global__ void query_kernel(const __grid_constant__ DeviceDomain domain, std::int32_t* status) {
  const int peer = static_cast<int>(threadIdx.x);
  status[peer] = static_cast<std::int32_t>(low_latency_state(domain).masked >> peer & 1);
}

}  // namespace

void mask_ranks(const DeviceDomain& domain, std::uint64_t ranks, Stream stream) {
  check_domain(domain);
  mask_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(domain, ranks);
  check_cuda(cudaGetLastError(), "launch of mask_ranks");
}

void query_masked(const DeviceDomain& domain, std::int32_t* status, Stream stream) {
  check_domain(domain);
  query_kernel<<<1, static_cast<unsigned>(domain.num_ranks), 0, static_cast<cudaStream_t>(stream)>>>(domain, status);
  check_cuda(cudaGetLastError(), "launch of query_masked");
}

void prepare_low_latency_masks() {
  load_kernel(mask_kernel, 0);
  load_kernel(query_kernel, 0);
}

}  // namespace deep_moe::kernels
