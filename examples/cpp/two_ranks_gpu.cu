// Two ranks on GPUs as two threads, without Python: tokens go to the ranks that own their experts, a kernel doubles
// them there, and the owner of the token gets the sum back. With two GPUs each rank has its own, else they share one.
//
//   cmake --preset example_gpu && cmake --build --preset example_gpu && build/example_gpu/examples/two_ranks_gpu
//
// Flow of one layer, on the rank's own stream: copy in -> dispatch -> experts on recv_x -> combine -> copy out.
#include <cuda_runtime.h>

#include <deep_moe/buffer.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 2;
constexpr int kSkipped = 77;  // exit status where there is no GPU
constexpr std::int64_t kTokens = 48, kHidden = 1024, kExperts = 8, kTopk = 2;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

__global__ void double_all(float* rows, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    rows[i] *= 2;
}

// What a rank has on its GPU before and after its Buffer: a stream has to outlive the Buffer that it was used with.
struct Inputs {
  int device;
  cudaStream_t stream = nullptr;
  float* x = nullptr;                // [kTokens, kHidden]
  std::int64_t* topk_idx = nullptr;  // [kTokens, kTopk]

  explicit Inputs(int device_) : device(device_) {
    check(cudaSetDevice(device), "cudaSetDevice");
    // Threads that share a GPU need a stream each: on a common one, a rank's call would wait for the other's.
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaMalloc(&x, kTokens * kHidden * sizeof(*x)), "cudaMalloc");
    check(cudaMalloc(&topk_idx, kTokens * kTopk * sizeof(*topk_idx)), "cudaMalloc");
  }
  ~Inputs() {
    cudaSetDevice(device);
    cudaFree(topk_idx);
    cudaFree(x);
    cudaStreamDestroy(stream);
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  deep_moe::TensorView view(void* data, deep_moe::DType dtype, std::int64_t columns) const {
    deep_moe::TensorView tensor = deep_moe::TensorView::contiguous(data, dtype, {kTokens, columns});
    tensor.device = device;
    return tensor;
  }
};

// Every element of token t on rank r is 100 r + t; its experts are spread over both ranks, some ids are -1.
std::int64_t expert_of(int rank, std::int64_t token, int k) {
  if (k == 0) return (token + rank) % kExperts;
  return token % 3 == 0 ? -1 : (token * 3 + 4) % kExperts;
}

void run_rank(const deep_moe::Bootstrap& bootstrap, const Inputs& inputs) {
  const int rank = bootstrap.rank;
  const cudaStream_t stream = inputs.stream;
  check(cudaSetDevice(inputs.device), "cudaSetDevice");
  std::vector<float> x(kTokens * kHidden);
  std::vector<std::int64_t> topk_idx(kTokens * kTopk);
  for (std::int64_t token = 0; token < kTokens; ++token) {
    for (std::int64_t h = 0; h < kHidden; ++h) x[token * kHidden + h] = static_cast<float>(100 * rank + token);
    for (int k = 0; k < kTopk; ++k) topk_idx[token * kTopk + k] = expert_of(rank, token, k);
  }
  check(cudaMemcpyAsync(inputs.x, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice, stream), "copy of x");
  check(cudaMemcpyAsync(inputs.topk_idx, topk_idx.data(), topk_idx.size() * sizeof(std::int64_t),
                        cudaMemcpyHostToDevice, stream),
        "copy of topk_idx");

  deep_moe::BufferOptions options;
  options.device = inputs.device;
  options.num_nvl_bytes = 8 << 20;
  options.timeout_seconds = 30;
  options.current_stream = [stream] { return static_cast<void*>(stream); };
  deep_moe::Buffer buffer(bootstrap, options);

  deep_moe::DispatchArgs dispatch;
  dispatch.x.data = inputs.view(inputs.x, deep_moe::DType::kFloat32, kHidden);
  dispatch.topk_idx = inputs.view(inputs.topk_idx, deep_moe::DType::kInt64, kTopk);
  dispatch.num_experts = kExperts;
  dispatch.num_sms = 4;  // of both ranks together fewer than the GPU has
  const deep_moe::DispatchResult received = buffer.dispatch(dispatch);

  const std::int64_t num_rows = received.recv_x.data.view.shape[0];
  float* rows = received.recv_x.data.as<float>();  // in the heap, and ours: changed in place, it is combined in place
  if (num_rows > 0) double_all<<<32, 256, 0, stream>>>(rows, num_rows * kHidden);
  check(cudaGetLastError(), "double_all");

  deep_moe::CombineArgs combine;
  combine.x = received.recv_x.data.view;
  combine.handle = received.handle.view();
  combine.num_sms = dispatch.num_sms;
  const deep_moe::CombineResult combined = buffer.combine(combine);

  // A copy to ordinary memory holds the driver while it waits, also for a kernel of the other rank: so wait first.
  std::vector<float> sums(x.size());
  check(cudaStreamSynchronize(stream), "dispatch, experts, combine");
  check(cudaMemcpyAsync(sums.data(), combined.combined_x.as<float>(), sums.size() * sizeof(float),
                        cudaMemcpyDeviceToHost, stream),
        "copy of combined_x");
  check(cudaStreamSynchronize(stream), "copy of combined_x");

  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    const std::int64_t token = i / kHidden, first = expert_of(rank, token, 0), second = expert_of(rank, token, 1);
    const bool both = second >= 0 && first / (kExperts / kRanks) != second / (kExperts / kRanks);
    const float expected = x[i] * 2 * (both ? 2 : 1);
    if (sums[i] == expected) continue;
    buffer.check();  // throws the reason, if a call has failed
    throw std::runtime_error("token " + std::to_string(token) + ", element " + std::to_string(i % kHidden) + ": got " +
                             std::to_string(sums[i]) + ", expected " + std::to_string(expected));
  }
  std::printf("rank %d on GPU %d: %lld tokens out, %lld rows in, %lld tokens back, all right\n", rank, inputs.device,
              static_cast<long long>(kTokens), static_cast<long long>(num_rows), static_cast<long long>(kTokens));
}

void rank_thread(const deep_moe::Bootstrap& bootstrap, const Inputs& inputs, bool& ok) {
  try {
    run_rank(bootstrap, inputs);
    ok = true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", bootstrap.rank, error.what());
  }
}

int num_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  std::fprintf(stderr,
               "two_ranks_gpu needs an NVIDIA GPU (sm_80 or newer) and its driver; here: %s.\n"
               "The example two_ranks does the same on the CPU.\n",
               status == cudaSuccess ? "no GPU" : cudaGetErrorString(status));
  return 0;
}

}  // namespace

int main() {
  // For threads that share a GPU, and before CUDA starts: no code is loaded while a kernel waits for a peer, and no two
  // streams share a hardware queue.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const int gpus = num_gpus();
  if (gpus == 0) return std::getenv("DEEP_MOE_EXPECT_GPUS") ? EXIT_FAILURE : kSkipped;
  try {
    const std::vector<deep_moe::Bootstrap> bootstraps = deep_moe::make_thread_bootstraps(kRanks);
    const Inputs inputs[kRanks] = {Inputs(0), Inputs(gpus >= kRanks ? 1 : 0)};
    bool ok[kRanks] = {};
    std::thread other(rank_thread, std::cref(bootstraps[1]), std::cref(inputs[1]), std::ref(ok[1]));
    rank_thread(bootstraps[0], inputs[0], ok[0]);
    other.join();
    return ok[0] && ok[1] ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}
