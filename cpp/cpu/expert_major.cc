#include "cpu/expert_major.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/copy.hpp"
#include "cpu/output.hpp"
#include "cpu/simd.hpp"
#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "layout/words.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cpu {
namespace {

constexpr std::int64_t kRowGrain = 32;  // received rows a thread takes at least

// Which row of which group each entry becomes; P, the number of rows.
struct Groups {
  const std::int32_t* offsets;  // [L + 1]
  const std::int32_t* counts;   // [L]
  const std::int32_t* rows;     // [N, K]
  std::int64_t num_experts, num_received, topk, num_rows;

  explicit Groups(const DispatchHandle& handle)
      : offsets(handle.expert_offsets.as<std::int32_t>()),
        counts(handle.expert_counts.as<std::int32_t>()),
        rows(handle.expert_rows.as<std::int32_t>()),
        num_experts(handle.expert_counts.shape[0]),
        num_received(handle.expert_rows.shape[0]),
        topk(handle.expert_rows.shape[1]),
        num_rows(handle.meta.as<std::int64_t>()[layout::kMetaNumExpertRows]) {}

  // Calls f(received row, its entry, expert-major row) for all entries, on all threads.
  template <typename F>
  void for_each(WorkerPool& pool, const F& f) const {
    pool.parallel_for(num_received, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin * topk; at < end * topk; ++at)
        if (rows[at] >= 0) f(at / topk, at, static_cast<std::int64_t>(rows[at]));
      finish_streaming();
    });
  }
  // Calls f(first row, number of rows) for the rows behind the groups, of which a fixed number of rows leaves some.
  template <typename F>
  void for_tail(const F& f) const {
    if (num_rows > offsets[num_experts]) f(offsets[num_experts], num_rows - offsets[num_experts]);
  }
  // Calls f(first row, number of rows) for the padding of each group.
  template <typename F>
  void for_padding(const F& f) const {
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::int64_t first = std::int64_t{offsets[expert]} + counts[expert];
      if (offsets[expert + 1] > first) f(first, offsets[expert + 1] - first);
    }
  }
};

// In the order of the received rows, then of their entries.
template <typename Id>
void place_entries(const Id* ids, std::int64_t num_entries, std::int64_t alignment, std::int64_t num_experts,
                   std::int32_t* offsets, std::int32_t* counts, std::int32_t* rows) {
  std::fill_n(counts, num_experts, 0);
  for (std::int64_t at = 0; at < num_entries; ++at)
    if (ids[at] >= 0) ++counts[ids[at]];
  std::int64_t first = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    offsets[expert] = static_cast<std::int32_t>(first);
    first += (counts[expert] + alignment - 1) / alignment * alignment;
    if (first > kMaxRows)
      throw_value("expert_major", std::to_string(first) + " rows and more, padding included",
                  "at most " + std::to_string(kMaxRows));
  }
  offsets[num_experts] = static_cast<std::int32_t>(first);
  std::vector<std::int32_t> next(offsets, offsets + num_experts);
  for (std::int64_t at = 0; at < num_entries; ++at) rows[at] = ids[at] >= 0 ? next[ids[at]]++ : -1;
}

void make_groups(int rank, const DispatchArgs& args, const TensorView& ids, OwnedDispatchHandle* handle) {
  std::int64_t* meta = handle->meta.as<std::int64_t>();
  const layout::ExpertBlocks blocks(static_cast<int>(meta[layout::kMetaNumExperts]),
                                    static_cast<int>(meta[layout::kMetaNumRanks]));
  const std::int64_t num_experts = blocks.num_local_experts(rank);
  handle->expert_offsets = make_host_tensor(DType::kInt32, {num_experts + 1});
  handle->expert_counts = make_host_tensor(DType::kInt32, {num_experts});
  handle->expert_rows = make_host_tensor(DType::kInt32, {ids.shape[0], ids.shape[1]});
  std::int32_t* offsets = handle->expert_offsets.as<std::int32_t>();
  const auto place = [&](const auto* values) {
    place_entries(values, ids.numel(), args.expert_alignment, num_experts, offsets,
                  handle->expert_counts.as<std::int32_t>(), handle->expert_rows.as<std::int32_t>());
  };
  if (ids.dtype == DType::kInt64) {
    place(ids.as<std::int64_t>());
  } else {
    place(ids.as<std::int32_t>());
  }
  meta[layout::kMetaNumExpertRows] =
      args.num_worst_tokens > 0 ? most_expert_rows(args, num_experts) : offsets[num_experts];
}

Tensor grouped_rows(Context context, const Groups& groups, const TensorView& from) {
  const std::int64_t bytes = from.shape[1] * static_cast<std::int64_t>(dtype_bytes(from.dtype));
  Tensor out = make_output(context.domain, from.dtype, groups.num_rows, from.shape[1]);
  char* to = out.as<char>();
  const bool streaming = groups.num_rows * bytes > kStreamingBytes;
  groups.for_each(context.pool, [&](std::int64_t received, std::int64_t, std::int64_t row) {
    copy_row(to + row * bytes, from.as<char>() + received * bytes, bytes, streaming);
  });
  groups.for_padding([&](std::int64_t first, std::int64_t count) {
    std::memset(to + first * bytes, 0, static_cast<std::size_t>(count * bytes));
  });
  return out;
}

// Row- or column-major, as received.
Tensor grouped_scales(Context context, const Groups& groups, const TensorView& from) {
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(from.dtype));
  const std::int64_t columns = from.num_dims == 2 ? from.shape[1] : 1;
  const bool by_column = columns > 1 && from.stride[1] != 1;
  Tensor out = make_output(context.domain, from.dtype, groups.num_rows, columns);
  const std::int64_t row_step = by_column ? item : columns * item,
                     column_step = by_column ? groups.num_rows * item : item;
  const std::int64_t from_row = from.stride[0] * item, from_column = columns > 1 ? from.stride[1] * item : item;
  std::memset(out.as<char>(), 0, static_cast<std::size_t>(groups.num_rows * columns * item));
  groups.for_each(context.pool, [&](std::int64_t received, std::int64_t, std::int64_t row) {
    const char* source = from.as<char>() + received * from_row;
    char* target = out.as<char>() + row * row_step;
    if (!by_column) {
      std::memcpy(target, source, static_cast<std::size_t>(columns * item));
      return;
    }
    for (std::int64_t column = 0; column < columns; ++column)
      std::memcpy(target + column * column_step, source + column * from_column, static_cast<std::size_t>(item));
  });
  if (from.num_dims == 1) {
    out.view.num_dims = 1;
    out.view.stride[0] = 1;
  } else if (by_column) {
    out.view.stride[0] = 1;
    out.view.stride[1] = groups.num_rows;
  }
  return out;
}

}  // namespace

DispatchResult group_by_expert(Context context, const DispatchArgs& args, DispatchResult received) {
  if (args.handle == nullptr) make_groups(context.domain.rank(), args, received.recv_topk_idx.view, &received.handle);
  const Groups groups(args.handle == nullptr ? received.handle.view() : *args.handle);
  DispatchResult result;
  result.recv_x.data = grouped_rows(context, groups, received.recv_x.data.view);
  if (received.recv_x.scales.view.defined())
    result.recv_x.scales = grouped_scales(context, groups, received.recv_x.scales.view);
  if (args.handle != nullptr) return result;
  result.recv_topk_idx = make_host_tensor(DType::kInt32, {groups.num_rows});
  std::int32_t* ids = result.recv_topk_idx.as<std::int32_t>();
  for (std::int64_t expert = 0; expert < groups.num_experts; ++expert)
    std::fill_n(ids + groups.offsets[expert], groups.counts[expert], static_cast<std::int32_t>(expert));
  const auto no_expert = [&](std::int64_t first, std::int64_t count) { std::fill_n(ids + first, count, -1); };
  groups.for_padding(no_expert);
  groups.for_tail(no_expert);
  if (received.recv_topk_weights.view.defined()) {
    result.recv_topk_weights = make_host_tensor(DType::kFloat32, {groups.num_rows});
    const float* from = received.recv_topk_weights.as<float>();
    float* to = result.recv_topk_weights.as<float>();
    groups.for_each(context.pool, [&](std::int64_t, std::int64_t entry, std::int64_t row) { to[row] = from[entry]; });
    const auto no_weight = [&](std::int64_t first, std::int64_t count) { std::fill_n(to + first, count, 0.0f); };
    groups.for_padding(no_weight);
    groups.for_tail(no_weight);
  }
  result.num_recv_tokens_per_expert = std::move(received.num_recv_tokens_per_expert);
  result.handle = std::move(received.handle);
  return result;
}

CombineArgs sum_by_row(Context context, const CombineArgs& args, std::vector<Tensor>* kept) {
  const Groups groups(args.handle);
  const std::int64_t hidden = args.x.shape[1], item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  // In the heap if it can be, where the peers read it in place.
  Heap& heap = context.domain.heap();
  std::string reason;
  const Block block = heap.allocate_or_grow(static_cast<std::size_t>(groups.num_received * hidden * item), &reason);
  Tensor sums = make_host_tensor(args.x.dtype, {block ? 0 : groups.num_received, hidden});
  if (block) sums = {TensorView::contiguous(block.ptr, args.x.dtype, {groups.num_received, hidden}), heap.own(block)};
  const SimdOps& ops = simd_ops();
  const float* weights = args.row_weights.defined() ? args.row_weights.as<float>() : nullptr;
  context.pool.parallel_for(groups.num_received, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    const void* rows[layout::kMaxTopk];
    float factors[layout::kMaxTopk];
    for (std::int64_t received = begin; received < end; ++received) {
      int count = 0;
      for (std::int64_t k = 0; k < groups.topk; ++k) {
        const std::int64_t row = groups.rows[received * groups.topk + k];
        if (row < 0) continue;
        rows[count] = args.x.as<char>() + row * args.x.stride[0] * item;
        factors[count++] = weights != nullptr ? weights[row] : 0.0f;
      }
      if (count == 0) continue;  // nothing has arrived there
      char* out = sums.as<char>() + received * hidden * item;
      if (weights != nullptr) {
        ops.weighted_sum_rows(args.x.dtype, rows, factors, count, out, hidden);
      } else {
        ops.sum_rows(args.x.dtype, rows, count, nullptr, nullptr, out, hidden);
      }
    }
  });
  CombineArgs inner = args;
  inner.x = sums.view;
  inner.row_weights = {};
  kept->push_back(std::move(sums));
  if (args.topk_weights.defined()) {
    Tensor by_entry = make_output(context.domain, DType::kFloat32, groups.num_received, groups.topk);
    std::fill_n(by_entry.as<float>(), groups.num_received * groups.topk, 0.0f);
    const float* from = args.topk_weights.as<float>();
    groups.for_each(context.pool, [&](std::int64_t, std::int64_t entry, std::int64_t row) {
      by_entry.as<float>()[entry] = from[row];
    });
    inner.topk_weights = by_entry.view;
    kept->push_back(std::move(by_entry));
  }
  return inner;
}

}  // namespace deep_moe::cpu
