// What dispatch and combine are held against: kernels that only copy rows with the copy engine, through the same ring
// of chunks in shared memory. No counts, no words, no peers, no sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ptx/tma.cuh"

namespace deep_moe::test {

struct CopyBound {
  const char* from[6] = {};  // rows at token * row_bytes
  char* to[2] = {};
  int num_loads = 1;
  int num_stores = 1;            // of the row loaded last
  const bool* wanted = nullptr;  // [num_tokens, num_wanted] which of the stores, or of the loads if there are several,
  int num_wanted = 2;            // are made; loads past num_wanted are always made
  std::int64_t num_tokens = 0;
  int row_bytes = 0, chunk_bytes = 0;  // whole chunks
  int extra_bytes = 0;                 // a piece more a row (scales), of arrays of its own
  const char* extra_from = nullptr;
  char* extra_to[2] = {};
};

// One lane a warp; warp w of n takes tokens w, w + n, ... kLoads 0: any number of loads.
template <int kStages, int kLoads>
__global__ void __launch_bounds__(640, 1) copy_bound_kernel(const __grid_constant__ CopyBound args) {
  extern __shared__ __align__(128) char shared[];
  if (threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, whole = args.row_bytes / args.chunk_bytes;
  const int chunks = whole + (args.extra_bytes > 0 ? 1 : 0);
  const auto bytes_of = [&](int chunk) { return chunk < whole ? args.chunk_bytes : args.extra_bytes; };
  const auto offset_of = [&](std::int64_t token, int chunk) {
    return chunk < whole ? token * args.row_bytes + chunk * args.chunk_bytes : token * args.extra_bytes;
  };
  char* stages = shared + warp * kStages * args.chunk_bytes;
  std::uint64_t* barriers =
      reinterpret_cast<std::uint64_t*>(shared + num_warps * kStages * args.chunk_bytes) + warp * kStages;
  for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers + i, 1);
  ptx::fence_mbarrier_init();

  // Units in order: token, chunk, load.
  struct Cursor {
    std::int64_t token;
    int chunk = 0, source = 0;
  };
  const std::int64_t step = static_cast<std::int64_t>(num_warps) * gridDim.x;
  const int num_loads = kLoads > 0 ? kLoads : args.num_loads;
  const auto loads = [&](std::int64_t token, int source) {
    if (kLoads > 0) return num_loads == 1 || args.wanted[token * 2 + source];
    return source >= args.num_wanted || args.wanted[token * args.num_wanted + source];
  };
  const auto valid = [&](const Cursor& at) { return loads(at.token, at.source); };
  const auto is_last = [&](const Cursor& at) {
    for (int source = at.source + 1; source < num_loads; ++source)
      if (loads(at.token, source)) return false;
    return true;
  };
  const auto advance = [&](Cursor& at) {
    do {
      if (++at.source == num_loads) at.source = 0, ++at.chunk;
      if (at.chunk == chunks) at.chunk = 0, at.token += step;
    } while (at.token < args.num_tokens && !valid(at));
  };
  Cursor load{static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x}, store = load;
  if (load.token < args.num_tokens && !valid(load)) advance(load), advance(store);
  std::uint32_t loaded = 0, stored = 0;
  while (store.token < args.num_tokens) {
    while (loaded - stored < kStages - 1 && load.token < args.num_tokens) {
      const int stage = loaded++ % kStages;
      const char* from = load.chunk < whole ? args.from[load.source] : args.extra_from;
      ptx::mbarrier_arrive_expect_tx(barriers + stage, bytes_of(load.chunk));
      ptx::bulk_load(stages + stage * args.chunk_bytes, from + offset_of(load.token, load.chunk), bytes_of(load.chunk),
                     barriers + stage);
      advance(load);
    }
    const int stage = stored % kStages;
    while (!ptx::mbarrier_try_wait_acquire_cta(barriers + stage, stored / kStages % 2)) {
    }
    const bool last = is_last(store);
    for (int i = 0; last && i < args.num_stores; ++i) {
      if (args.num_stores > 1 && !args.wanted[store.token * args.num_wanted + i]) continue;
      char* to = store.chunk < whole ? args.to[i] : args.extra_to[i];
      ptx::bulk_store(to + offset_of(store.token, store.chunk), stages + stage * args.chunk_bytes,
                      bytes_of(store.chunk));
    }
    ptx::bulk_commit_group();
    ++stored;
    ptx::bulk_wait_group_read<1>();
    advance(store);
  }
  ptx::bulk_wait_group<0>();
}

}  // namespace deep_moe::test
