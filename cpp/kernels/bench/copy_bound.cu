#include "kernels/bench/copy_bound.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include <deep_moe/error.hpp>

#include "kernels/protocol/cuda_check.hpp"
#include "kernels/ptx/features.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"

namespace deep_moe::bench {
namespace {

constexpr int kMaxWarps = 20;

// A chunk in shared memory.
struct Unit {
  std::int64_t token;
  std::uint32_t stores;  // ranks that it is stored to
  int chunk;
};

// Of one warp: chunks, their barriers, what they hold.
struct Ring {
  __host__ __device__ static int stage_bytes(const CopyBound& args) { return args.chunk_bytes + args.extra_bytes; }
  __host__ __device__ static int bytes(const CopyBound& args, int num_stages) {
    return num_stages * (stage_bytes(args) + static_cast<int>(sizeof(Unit) + sizeof(std::uint64_t)));
  }
};

// The warp's place in its stream of chunks: token after token, chunk after chunk, rank after rank.
class Cursor {
 public:
  __device__ Cursor(const CopyBound& args, int num_chunks) : args_(args), num_chunks_(num_chunks) {
    const std::int64_t num_warps = blockDim.x / 32;
    token_ = threadIdx.x / 32 * static_cast<std::int64_t>(gridDim.x) + blockIdx.x;
    step_ = num_warps * gridDim.x;
    if (args_.tickets != nullptr) {
      token_ = draw();
      if (token_ < args_.num_tokens) next_ = draw();
    }
    find_row();
  }

  __device__ bool valid() const { return token_ < args_.num_tokens; }
  __device__ std::int64_t token() const { return token_; }
  __device__ int chunk() const { return chunk_; }
  __device__ int source() const { return args_.num_loads > 1 ? __ffs(sources_) - 1 : 0; }
  // Ranks that the chunk at hand is stored to: none but behind the last load of it.
  __device__ std::uint32_t stores() const {
    if (args_.num_loads == 1) return wanted_;
    return (sources_ & (sources_ - 1)) == 0 ? 1 : 0;
  }

  __device__ void advance() {
    sources_ &= sources_ - 1;
    if (sources_ != 0) return;
    sources_ = args_.num_loads > 1 ? wanted_ : 1;
    if (++chunk_ < num_chunks_) return;
    step();
    find_row();
  }

 private:
  __device__ std::int64_t draw() { return static_cast<std::int64_t>(ptx::atom_add_relaxed_gpu(args_.tickets, 1)); }

  __device__ void step() {
    if (args_.tickets == nullptr) {
      token_ += step_;
      return;
    }
    token_ = next_;
    if (token_ < args_.num_tokens) next_ = draw();  // long before it is needed
  }

  __device__ void find_row() {
    const int num_ranks = max(args_.num_loads, args_.num_stores);
    const int columns = args_.num_wanted > 0 ? args_.num_wanted : num_ranks;
    for (chunk_ = 0; valid(); step()) {
      wanted_ = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (args_.wanted == nullptr || rank >= columns || args_.wanted[token_ * columns + rank]) wanted_ |= 1u << rank;
      }
      sources_ = args_.num_loads > 1 ? wanted_ : 1;
      if (wanted_ != 0) return;
    }
  }

  const CopyBound& args_;
  int num_chunks_, chunk_ = 0;
  std::int64_t token_, step_, next_ = 0;
  std::uint32_t wanted_ = 0, sources_ = 0;
};

// One lane a warp.
template <int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) copy_bound_kernel(const __grid_constant__ CopyBound args) {
  if constexpr (ptx::kHasTma) {
    extern __shared__ __align__(128) char shared[];
    if (threadIdx.x % 32 != 0) return;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, stage_bytes = Ring::stage_bytes(args);
    char* const stages = shared + warp * kStages * stage_bytes;
    Unit* const units = reinterpret_cast<Unit*>(shared + num_warps * kStages * stage_bytes) + warp * kStages;
    std::uint64_t* const barriers =
        reinterpret_cast<std::uint64_t*>(shared + num_warps * kStages * (stage_bytes + sizeof(Unit))) + warp * kStages;
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers + i, 1);
    ptx::fence_mbarrier_init();

    const int num_chunks = (args.row_bytes + args.chunk_bytes - 1) / args.chunk_bytes;
    const auto offset_of = [&](std::int64_t token, int chunk) {
      return token * args.row_bytes + static_cast<std::int64_t>(chunk) * args.chunk_bytes;
    };
    const auto bytes_of = [&](int chunk) { return min(args.chunk_bytes, args.row_bytes - chunk * args.chunk_bytes); };
    const auto extra_of = [&](int chunk) { return chunk == num_chunks - 1 ? args.extra_bytes : 0; };

    Cursor load(args, num_chunks);
    std::uint32_t loaded = 0, stored = 0;
    while (true) {
      for (; loaded - stored < kStages - 1 && load.valid(); load.advance()) {
        const int stage = loaded++ % kStages, chunk = load.chunk(), extra = extra_of(chunk);
        char* const to = stages + stage * stage_bytes;
        units[stage] = {load.token(), load.stores(), chunk};
        ptx::mbarrier_arrive_expect_tx(barriers + stage, bytes_of(chunk) + extra);
        ptx::bulk_load(to, args.from[load.source()] + offset_of(load.token(), chunk), bytes_of(chunk),
                       barriers + stage);
        if (extra > 0) {
          ptx::bulk_load(to + args.chunk_bytes, args.extra_from + load.token() * extra, extra, barriers + stage);
        }
      }
      if (stored == loaded) break;
      const int stage = stored % kStages;
      while (!ptx::mbarrier_try_wait_acquire_cta(barriers + stage, stored / kStages % 2)) {
      }
      const Unit unit = units[stage];
      const int extra = extra_of(unit.chunk);
      const char* const from = stages + stage * stage_bytes;
      for (std::uint32_t left = unit.stores; left != 0; left &= left - 1) {
        const int rank = __ffs(left) - 1;
        ptx::bulk_store(args.to[rank] + offset_of(unit.token, unit.chunk), from, bytes_of(unit.chunk));
        if (extra > 0) ptx::bulk_store(args.extra_to[rank] + unit.token * extra, from + args.chunk_bytes, extra);
      }
      ptx::bulk_commit_group();
      ++stored;
      ptx::bulk_wait_group_read<1>();
    }
    ptx::bulk_wait_group<0>();
    if (args.tickets == nullptr) return;
    const std::uint64_t all = static_cast<std::uint64_t>(num_warps) * gridDim.x;
    if (ptx::atom_add_acq_rel_gpu(args.tickets + 1, 1) != all - 1) return;
    ptx::st_relaxed_gpu(args.tickets, 0);
    ptx::st_relaxed_gpu(args.tickets + 1, 0);
  }
}

using Kernel = void (*)(CopyBound);

void check(bool ok, const char* name, std::int64_t value, const char* allowed) {
  if (!ok) throw ArgumentError(std::string(name) + " is " + std::to_string(value) + "; allowed: " + allowed);
}

}  // namespace

bool prepare_copy_bound() {
  int device = 0, most = 0;
  bool has_copy_engine = true;
  kernels::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  kernels::check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                      "cudaDeviceGetAttribute");
  for (const Kernel kernel : {Kernel(copy_bound_kernel<3>), Kernel(copy_bound_kernel<4>)}) {
    kernels::check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
                        "setting the plain copy's shared memory");
    cudaFuncAttributes attributes;
    kernels::check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading the plain copy");
    const int code_version = std::min(attributes.ptxVersion, attributes.binaryVersion);
    has_copy_engine = has_copy_engine && ptx::has_sm90_features(10 * code_version);
  }
  return has_copy_engine;
}

void launch_copy_bound(const CopyBound& args, const CopyShape& shape, kernels::Stream stream) {
  check(shape.num_sms >= 1, "num_sms", shape.num_sms, "1 or more");
  check(shape.num_warps >= 1 && shape.num_warps <= kMaxWarps, "num_warps", shape.num_warps, "1 to 20");
  check(shape.num_stages == 3 || shape.num_stages == 4, "num_stages", shape.num_stages, "3, 4");
  check(args.row_bytes > 0 && args.row_bytes % 16 == 0, "row_bytes", args.row_bytes, "multiples of 16");
  check(args.chunk_bytes > 0 && args.chunk_bytes % 16 == 0, "chunk_bytes", args.chunk_bytes, "multiples of 16");
  check(args.extra_bytes >= 0 && args.extra_bytes % 16 == 0, "extra_bytes", args.extra_bytes, "multiples of 16");
  check(args.num_loads >= 1 && args.num_loads <= kMaxCopyRanks, "num_loads", args.num_loads, "1 to 32");
  check(args.num_stores >= 1 && args.num_stores <= kMaxCopyRanks, "num_stores", args.num_stores, "1 to 32");
  check(args.num_loads == 1 || args.num_stores == 1, "num_stores", args.num_stores, "1 where there are several loads");
  const Kernel kernel = shape.num_stages == 3 ? copy_bound_kernel<3> : copy_bound_kernel<4>;
  const int shared = shape.num_warps * Ring::bytes(args, shape.num_stages);
  kernel<<<shape.num_sms, 32 * shape.num_warps, static_cast<std::size_t>(shared), static_cast<cudaStream_t>(stream)>>>(
      args);
  kernels::check_cuda(cudaGetLastError(), "launch of the plain copy");
}

}  // namespace deep_moe::bench
