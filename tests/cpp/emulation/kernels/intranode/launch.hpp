// Counterpart of cpp/kernels/intranode/launch.hpp: the checks are its own, a launch runs every block as a thread.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include <deep_moe/error.hpp>

#include "kernels/api.hpp"

namespace deep_moe::kernels {

inline void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) throw ArgumentError(std::string(name) + " is " + std::to_string(value));
}
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(what);
}
inline void check_domain(const DeviceDomain& domain) {
  check_range("domain.num_ranks", domain.num_ranks, 1, layout::kMaxKernelRanks);
}
inline void check_ids(const TopkIds& ids, int num_experts, int) {
  check_range("num_experts", num_experts, 1, layout::kMaxExperts);
  check_range("ids.topk", ids.topk, 1, layout::kMaxTopk);
}
template <typename Body>
void with_id_type(int id_bytes, Body body) {
  if (id_bytes == 4) return body(std::int32_t{});
  if (id_bytes == 8) return body(std::int64_t{});
  throw ArgumentError("ids.id_bytes is " + std::to_string(id_bytes));
}
// For every other launch that asks, so that ranks with and without it meet.
inline bool has_copy_engine() {
  static std::atomic<unsigned> asked{0};
  return asked++ % 2 == 0;
}
template <typename Kernel>
void load_kernel(Kernel*, int) {}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int num_blocks, int num_warps, std::size_t, Stream, bool, const char*,
            const Args&... args) {
  ::emulation::run_blocks(num_blocks, [&](int block) {
    ::emulation::Block(static_cast<unsigned>(block), static_cast<unsigned>(num_blocks),
                       static_cast<unsigned>(32 * num_warps), [&] { kernel(args...); })
        .run();
  });
}

void prepare_expert_major();

}  // namespace deep_moe::kernels
