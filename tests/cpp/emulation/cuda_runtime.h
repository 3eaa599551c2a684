// Enough of CUDA to run the kernels between nodes and those of low-latency calls on a CPU: a thread block is a thread
// whose CUDA threads are fibers, which change at barriers, at warp-wide operations and now and then at loads. It stands
// before the real headers on the include path; kernels/ptx, all inline PTX, and the launch helper have counterparts
// beside it. What it cannot show: races that need less order than fibers of one block have, and anything about time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // a block is a thread

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

// Fibers that wait for each other.
struct Barrier {
  std::vector<int> waiting;
};

class Block {
 public:
  Block(unsigned index, unsigned num_blocks, unsigned num_threads, std::function<void()> kernel);
  void run();  // until all fibers have returned

  static Block& here();
  unsigned thread() const { return static_cast<unsigned>(current_); }
  void yield();
  void wait(Barrier& barrier, int needed);
  void sync_threads() { wait(all_, live_); }
  void sync_warp() { wait(warps_[warp()], live_lanes_[warp()]); }
  // Every lane gives a value and gets those of all.
  const std::uint64_t* exchange(std::uint64_t value);
  int count_threads(bool vote);  // that say yes; with a barrier
  // Barriers 1 to 15, of so many threads; who does not wait only counts.
  void named_barrier(int id, int num_threads, bool waits);
  // Called by loads: other fibers run now and then, so that nobody waits for what cannot happen.
  void loads() {
    if (++num_loads_ % 7 == 0) yield();
  }
  int live() const { return live_; }
  std::uint64_t launch() const { return launch_; }  // another number for each block of each launch

  const uint3 block_idx, grid_dim, block_dim;

 private:
  struct Fiber {
    ucontext_t start;
    std::jmp_buf at;  // where it goes on, once it has started
    bool started = false;
    unsigned votes = 0;
  };
  static void enter();
  void resume(Fiber& fiber);   // until it suspends itself or returns
  void suspend(Fiber& fiber);  // goes on in run()
  [[noreturn]] void give_up() const;
  std::size_t warp() const { return static_cast<std::size_t>(current_ / 32); }
  void release_if_complete(Barrier& barrier, int needed);
  void leave();

  const std::function<void()> kernel_;
  const std::uint64_t launch_;
  std::vector<Fiber> fibers_;
  std::deque<int> ready_;
  std::jmp_buf scheduler_;
  int current_ = 0, live_ = 0;
  unsigned num_loads_ = 0;
  struct NamedBarrier {
    std::vector<int> waiting;
    int arrived = 0;
  };
  Barrier all_;
  NamedBarrier named_[16];
  std::vector<Barrier> warps_;
  std::vector<int> live_lanes_;
  std::vector<std::array<std::uint64_t, 32>> lanes_;
  int votes_[3] = {};
};

// Calls body(block) for each at the same time, on threads that are used again: what a block finds in its shared memory
// is what an earlier one has left there.
void run_blocks(int num_blocks, const std::function<void(int)>& body);

}  // namespace emulation

#define threadIdx (uint3{::emulation::Block::here().thread(), 0, 0})
#define blockIdx (::emulation::Block::here().block_idx)
#define gridDim (::emulation::Block::here().grid_dim)
#define blockDim (::emulation::Block::here().block_dim)

using std::max;
using std::min;

inline void __syncthreads() { ::emulation::Block::here().sync_threads(); }
inline void __syncwarp() { ::emulation::Block::here().sync_warp(); }
inline int __syncthreads_or(bool vote) { return ::emulation::Block::here().count_threads(vote) > 0; }
inline int __syncthreads_and(bool vote) { return ::emulation::Block::here().count_threads(!vote) == 0; }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const std::uint64_t* all = ::emulation::Block::here().exchange(vote);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane] != 0) << lane;
  __syncwarp();
  return mask;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

namespace emulation {

inline int lane() { return static_cast<int>(threadIdx.x % 32); }
// The value of the lane that each asks for.
template <typename T>
T from_lane(T value, int lane) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t from = Block::here().exchange(bits)[lane];
  std::memcpy(&value, &from, sizeof(T));
  __syncwarp();
  return value;
}
// `combine` of all lanes' values, in their order.
template <typename Combine>
unsigned reduce(unsigned value, Combine combine) {
  const std::uint64_t* all = Block::here().exchange(value);
  unsigned result = static_cast<unsigned>(all[0]);
  for (int lane = 1; lane < 32; ++lane) result = combine(result, static_cast<unsigned>(all[lane]));
  __syncwarp();
  return result;
}

}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return ::emulation::from_lane(value, ::emulation::lane() / width * width + (lane & (width - 1)));
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const int lane = ::emulation::lane() + static_cast<int>(delta);
  return ::emulation::from_lane(value, lane < 32 ? lane : ::emulation::lane());
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return ::emulation::from_lane(value, ::emulation::lane() ^ bits);
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return ::emulation::reduce(value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return ::emulation::reduce(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __reduce_max_sync(unsigned, int value) {
  return static_cast<int>(::emulation::reduce(static_cast<unsigned>(value), [](unsigned a, unsigned b) {
    return static_cast<unsigned>(std::max(static_cast<int>(a), static_cast<int>(b)));
  }));
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return ::emulation::reduce(value, [](unsigned a, unsigned b) { return a | b; });
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const std::uint64_t own = static_cast<std::uint64_t>(value);
  const std::uint64_t* all = ::emulation::Block::here().exchange(own);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane] == own) << lane;
  __syncwarp();
  return mask;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rz(float a, float b) {  // of numbers whose sum is a double
  const double sum = static_cast<double>(a) + b;
  const float near = static_cast<float>(sum);
  return std::fabs(near) > std::fabs(sum) ? std::nextafter(near, 0.0f) : near;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicMax(T* address, T value) {
  T seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (seen < value &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <typename T>
T atomicExch(T* address, T value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32) | low) >> (shift & 31));
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// ---- The runtime, as far as the tests go: memory is memory, and every launch is over when it returns.
using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorPeerAccessAlreadyEnabled = 704;
enum { cudaDevAttrMultiProcessorCount };
enum { cudaMemcpyDefault, cudaStreamNonBlocking, cudaHostAllocMapped = 1, cudaHostAllocPortable = 2 };
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 16, cudaSuccess; }
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
  return *memory == nullptr;
}
template <typename T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
inline cudaError_t cudaHostGetDevicePointer(void** mapped, void* host, unsigned) { return *mapped = host, cudaSuccess; }
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return std::memset(to, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, int) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, int, cudaStream_t) {
  for (std::size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int numRegs = 128;
  std::size_t localSizeBytes = 0;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return *attributes = {}, cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
