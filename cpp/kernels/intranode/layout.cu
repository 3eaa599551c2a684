// get_dispatch_layout by itself, and what concerns all kernels of this build.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels/intranode/launch.hpp"
#include "kernels/intranode/layout.cuh"
#include "kernels/low_latency/launch.hpp"
#include "kernels/ptx/features.cuh"
#include "kernels/ptx/memory.cuh"

namespace deep_moe::kernels {
namespace {

// One pass over the ids. Blocks add their counts to `sums` [E + R], all zero before and after; who adds last writes
// out.
template <typename Id>
__global__ void __launch_bounds__(NotifyTuning::kThreads)
    layout_kernel(const __grid_constant__ LayoutArgs args, const __grid_constant__ Owners owners, std::uint64_t* sums) {
  extern __shared__ std::uint32_t expert_counts[];
  __shared__ WarpCounts warp_counts;
  const int num_ranks = owners.blocks.num_ranks;
  const int block = static_cast<int>(blockIdx.x);
  const TokenRange range(args.ids.num_tokens, block, static_cast<int>(gridDim.x));

  count_tokens(RouteByIds<Id>{args.ids, owners}, owners.blocks, block, range, expert_counts, warp_counts,
               [&](int, std::int64_t t, std::uint64_t mask) {
                 if (t >= range.end) return;
                 for (int r = 0; r < num_ranks; ++r) args.is_token_in_rank[t * num_ranks + r] = (mask >> r) & 1;
               });
  __syncthreads();

  for (int i = threadIdx.x; i < args.num_experts + num_ranks; i += NotifyTuning::kThreads) {
    const int rank = i - args.num_experts;
    const std::uint32_t count = rank < 0 ? expert_counts[i] : sum_warps(warp_counts[0], rank, NotifyTuning::kWarps);
    const std::uint64_t before = ptx::atom_add_relaxed_gpu(sums + i, layout::arrive_with(count));
    if (layout::arrivals(before) != gridDim.x - 1) continue;
    const std::int32_t total = static_cast<std::int32_t>(layout::tagged_count(before) + count);
    if (rank < 0) {
      args.num_tokens_per_expert[i] = total;
    } else {
      args.num_tokens_per_rank[rank] = total;
    }
    sums[i] = 0;
  }
}

// By device: the version of the code that runs there, once prepare() has looked.
constexpr int kMaxDevices = 64;
std::atomic<int> code_version[kMaxDevices];

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_range("the current device", device, 0, kMaxDevices - 1);
  return device;
}

// By device, bytes a thread; known to reserve_local_memory() alone.
std::atomic<std::size_t> local_bytes[kMaxDevices];
constexpr std::size_t kFewestLocalBytes = 256, kMostLocalBytes = 4096;

// Does nothing, with that much local memory.
template <std::size_t kBytes>
__global__ void local_memory_kernel(int at) {
  volatile char bytes[kBytes];
  bytes[at] = 0;
  (void)bytes[kBytes - 1 - static_cast<std::size_t>(at)];
}

template <std::size_t kBytes>
void reserve(std::size_t bytes) {
  if constexpr (kBytes < kMostLocalBytes) {
    if (bytes > kBytes) return reserve<2 * kBytes>(bytes);
  }
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  local_memory_kernel<kBytes><<<1, 1, 0, stream>>>(0);
  const cudaError_t launched = cudaGetLastError(), ended = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check_cuda(launched, "launch of a kernel with local memory");
  check_cuda(ended, "setting local memory aside");
  local_bytes[current_device()] = kBytes;
}

}  // namespace

bool compiled() { return true; }

void prepare() {
  prepare_layout();
  prepare_notify();
  prepare_dispatch();
  prepare_combine();
  prepare_expert_major();
  prepare_low_latency_dispatch();
  prepare_low_latency_combine();
  prepare_low_latency_masks();
  code_version[current_device()] = loaded_code_version();
}

void reserve_local_memory(std::size_t bytes) {
  if (bytes > local_bytes[current_device()]) reserve<kFewestLocalBytes>(bytes);
}

bool has_copy_engine() {
  static const bool wanted = [] {
    const char* text = std::getenv("DEEP_MOE_COPY_ENGINE");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  return wanted && ptx::has_sm90_features(10 * code_version[current_device()]);
}

void get_dispatch_layout(const DeviceDomain& domain, const LayoutArgs& args, Stream stream) {
  check_domain(domain);
  check_ids(args.ids, args.num_experts, args.num_blocks);
  const dim3 grid(static_cast<unsigned>(num_layout_blocks(args.ids.num_tokens, args.num_blocks)));
  const std::size_t shared = sizeof(std::uint32_t) * static_cast<std::size_t>(args.num_experts);
  std::uint64_t* sums = domain.words.layout_sums(domain.workspaces[domain.rank]);
  with_id_type(args.ids.id_bytes, [&](auto id) {
    layout_kernel<decltype(id)><<<grid, NotifyTuning::kThreads, shared, static_cast<cudaStream_t>(stream)>>>(
        args, Owners(args.num_experts, domain.num_ranks), sums);
  });
  check_cuda(cudaGetLastError(), "launch of get_dispatch_layout");
}

void prepare_layout() {
  const int shared = static_cast<int>(sizeof(std::uint32_t)) * layout::kMaxExperts;
  for (const int id_bytes : {4, 8}) {
    with_id_type(id_bytes, [&](auto id) { load_kernel(layout_kernel<decltype(id)>, shared); });
  }
}

}  // namespace deep_moe::kernels
