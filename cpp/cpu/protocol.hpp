// The CPU backend's calls. Each runs with the Buffer's call lock held, on validated arguments.
#pragma once

#include <deep_moe/buffer.hpp>

#include "cpu/rails.hpp"
#include "cpu/worker_pool.hpp"
#include "runtime/domain.hpp"

namespace deep_moe::cpu {

struct Context {
  Domain& domain;
  WorkerPool& pool;
  Rails* rails;  // null on one node
};

LayoutResult dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts, const Topology& topology);
DispatchResult dispatch(Context context, const DispatchArgs& args);
CombineResult combine(Context context, const CombineArgs& args);

}  // namespace deep_moe::cpu
