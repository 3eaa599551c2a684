// A program whose kernel is linked from two files, beside the library's kernels, which are not.
#include <cuda_runtime.h>

#include <cstdio>

#include "exchange.hpp"

__device__ int plus_one(int value);
#ifdef WITH_NVSHMEM
int nvshmem_major_version();
#endif

namespace {

__global__ void add_one(int* value) { *value = plus_one(*value); }

bool own_kernels_work() {
#ifdef WITH_NVSHMEM
  std::printf("own kernels with NVSHMEM, interface of major version %d\n", nvshmem_major_version());
  if (nvshmem_major_version() < 1) return false;
#endif
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("no GPU: own kernel linked, not run\n");
    return true;
  }
  int *value = nullptr, result = 41;
  bool ok = cudaMalloc(&value, sizeof(int)) == cudaSuccess;
  ok = ok && cudaMemcpy(value, &result, sizeof(int), cudaMemcpyHostToDevice) == cudaSuccess;
  if (ok) add_one<<<1, 1>>>(value);
  ok = ok && cudaMemcpy(&result, value, sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess;
  cudaFree(value);
  std::printf("own kernel: %d\n", result);
  return ok && result == 42;
}

}  // namespace

int main() { return consumer::exchange() && own_kernels_work() ? 0 : 1; }
