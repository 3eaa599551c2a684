// A program with a kernel of its own beside those of the library.
#include <cuda_runtime.h>

#include <cstdio>

#include "exchange.hpp"

namespace {

__global__ void add_one(int* value) { *value += 1; }

bool own_kernel_works() {
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

int main() { return consumer::exchange() && own_kernel_works() ? 0 : 1; }
