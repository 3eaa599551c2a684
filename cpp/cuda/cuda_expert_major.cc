// Rows by local expert on a GPU: behind a dispatch the received rows are copied to their groups, on its stream; ahead
// of a combine the rows of each received row are summed into the heap, where peers read them. Both are local.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/cuda_call.hpp"
#include "cuda/cuda_row_movement.hpp"
#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

namespace {

kernels::ExpertGroups groups_of(const DispatchHandle& handle) {
  kernels::ExpertGroups groups;
  groups.num_experts = static_cast<int>(handle.expert_counts.shape[0]);
  groups.num_received = handle.expert_rows.shape[0];
  groups.topk = static_cast<int>(handle.expert_rows.shape[1]);
  groups.num_rows = handle.meta.as<std::int64_t>()[layout::kMetaNumExpertRows];
  groups.offsets = handle.expert_offsets.as<std::int32_t>();
  groups.counts = handle.expert_counts.as<std::int32_t>();
  groups.rows = handle.expert_rows.as<std::int32_t>();
  return groups;
}

// Parts of one piece of memory, one behind the other.
class Parts {
 public:
  std::size_t add(std::int64_t items, std::size_t item_bytes) {
    const std::size_t offset = total_;
    total_ = layout::align_up(total_ + static_cast<std::size_t>(items) * item_bytes, layout::kAlign);
    return offset;
  }
  std::size_t total() const { return total_; }

 private:
  std::size_t total_ = 0;
};

Tensor part_of(const Tensor& memory, std::size_t offset, DType dtype, const std::vector<std::int64_t>& shape) {
  Tensor part;
  part.view = checked_shape(dtype, shape);
  part.view.device = memory.view.device;
  part.view.data = memory.as<char>() + offset;
  part.owner = memory.owner;
  return part;
}

}  // namespace

// Memory that is asked for while rows move: what the heap has free, else more once they have arrived, for nothing is
// mapped while a kernel may be waiting. Where the heap cannot grow, ordinary memory: no peer looks at it.
Tensor CudaBuffer::tensor_behind(RowMovement* move, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const Stream work = move->streams.work(), user = move->streams.caller();
  const auto tensor = [&](char* data, std::shared_ptr<void> owner) {
    Tensor made{TensorView::contiguous(data, DType::kUInt8, {static_cast<std::int64_t>(bytes)}), std::move(owner)};
    made.view.device = world_->device();
    return made;
  };
  if (const Block block = world_->heap().allocate(bytes, work))
    return tensor(block.ptr, world_->heap().own(block, user));
  const bool captured = is_captured();
  if (!captured) {
    move->streams.join_comm();
    world_->wait_idle("dispatch: the end of its kernels");
  }
  std::string reason;
  if (const Block block = world_->allocate_or_grow(bytes, work, &reason))
    return tensor(block.ptr, world_->heap().own(block, user));
  if (captured)
    throw BufferTooSmallError("dispatch: " + std::to_string(bytes) +
                              " bytes of heap needed for rows by expert: " + reason);
  const auto spill = std::make_shared<Spill>(bytes, world_->device(), comm_stream_, work, user, options.current_stream);
  spills_.add(spill);
  return tensor(spill->data(), spill);
}

DispatchResult CudaBuffer::group_by_expert(const DispatchArgs& args, RowMovement* move, DispatchResult received) {
  const Stream work = move->streams.work();
  DispatchResult result;
  kernels::ExpertGroups groups;
  if (move->cached) {
    groups = groups_of(*args.handle);
  } else {
    const TensorView& ids = received.recv_topk_idx.view;
    const TensorView& weights = received.recv_topk_weights.view;
    const std::vector<std::int64_t>& sizes = received.num_recv_tokens_per_expert;
    const layout::ExpertBlocks blocks(static_cast<int>(move->num_experts), num_ranks);
    groups.num_experts = blocks.num_local_experts(rank);
    groups.num_received = ids.shape[0];
    groups.topk = static_cast<int>(ids.shape[1]);
    groups.num_rows = move->worst_rows > 0 ? most_expert_rows(args, groups.num_experts)
                                           : std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    if (groups.num_rows > kMaxRows)
      throw_value("expert_major", std::to_string(groups.num_rows) + " rows, padding included",
                  "at most " + std::to_string(kMaxRows));
    const std::int64_t num_experts = groups.num_experts, num_rows = groups.num_rows;
    constexpr std::size_t kWord = sizeof(std::int32_t);
    Parts parts;
    const std::size_t rows = parts.add(ids.numel(), kWord), offsets = parts.add(num_experts + 1, kWord);
    const std::size_t counts = parts.add(num_experts, kWord), experts = parts.add(num_rows, kWord);
    const std::size_t row_weights = parts.add(weights.defined() ? num_rows : 0, kWord);
    const std::size_t scratch = parts.add(kernels::place_by_expert_words(groups), kWord);
    const Tensor memory = tensor_behind(move, parts.total());
    OwnedDispatchHandle& handle = received.handle;
    handle.expert_offsets = part_of(memory, offsets, DType::kInt32, {num_experts + 1});
    handle.expert_counts = part_of(memory, counts, DType::kInt32, {num_experts});
    handle.expert_rows = part_of(memory, rows, DType::kInt32, {groups.num_received, groups.topk});
    handle.meta.as<std::int64_t>()[layout::kMetaNumExpertRows] = num_rows;
    groups = groups_of(handle.view());
    result.recv_topk_idx = part_of(memory, experts, DType::kInt32, {num_rows});
    kernels::PlaceByExpertArgs place;
    place.groups = groups;
    place.ids = ids.data;
    place.id_bytes = static_cast<int>(dtype_bytes(ids.dtype));
    place.alignment = args.expert_alignment;
    place.scratch = reinterpret_cast<std::int32_t*>(memory.as<char>() + scratch);
    place.experts = result.recv_topk_idx.as<std::int32_t>();
    if (weights.defined()) {
      result.recv_topk_weights = part_of(memory, row_weights, DType::kFloat32, {num_rows});
      place.weights = weights.as<float>();
      place.row_weights = result.recv_topk_weights.as<float>();
    }
    kernels::place_by_expert(place, work);
    result.num_recv_tokens_per_expert = std::move(received.num_recv_tokens_per_expert);
    result.handle = std::move(received.handle);
  }

  const TensorView& x = received.recv_x.data.view;
  const TensorView& scales = received.recv_x.scales.view;
  const std::int64_t item = scales.defined() ? static_cast<std::int64_t>(dtype_bytes(scales.dtype)) : 0;
  const std::int64_t items = !scales.defined() ? 0 : scales.num_dims == 2 ? scales.shape[1] : 1;
  kernels::GroupRowsArgs rows;
  rows.groups = groups;
  rows.x = x.data;
  rows.row_bytes = x.shape[1] * static_cast<std::int64_t>(dtype_bytes(x.dtype));
  Parts parts;
  const std::size_t rows_at = parts.add(groups.num_rows, static_cast<std::size_t>(rows.row_bytes));
  const std::size_t scales_at = parts.add(groups.num_rows, static_cast<std::size_t>(items * item));
  const Tensor memory = tensor_behind(move, parts.total());
  result.recv_x.data = part_of(memory, rows_at, x.dtype, {groups.num_rows, x.shape[1]});
  rows.out = result.recv_x.data.view.data;
  if (scales.defined()) {
    std::vector<std::int64_t> shape{groups.num_rows};
    if (scales.num_dims == 2) shape.push_back(items);
    Tensor& out = result.recv_x.scales;
    out = part_of(memory, scales_at, scales.dtype, shape);
    if (move->column_scales) {
      out.view.stride[0] = 1;
      out.view.stride[1] = groups.num_rows;
    }
    rows.scales.data = scales.data;
    rows.scales.item_bytes = static_cast<int>(item);
    rows.scales.num_items = items;
    rows.scales.row_stride = scales.stride[0] * item;
    rows.scales.item_stride = scales.num_dims == 2 ? scales.stride[1] * item : 0;
    rows.out_scales = out.view.data;
    rows.out_row_stride = out.view.stride[0] * item;
    rows.out_item_stride = scales.num_dims == 2 ? out.view.stride[1] * item : 0;
  }
  kernels::group_rows(rows, work);
  return result;
}

// The arguments of a combine of received rows, which lie in `staging`.
CombineArgs CudaBuffer::sum_by_row(const CombineArgs& args, Stream work, std::vector<Block>* staging) {
  kernels::SumGroupsArgs sums;
  sums.groups = groups_of(args.handle);
  const std::int64_t received = sums.groups.num_received, hidden = args.x.shape[1];
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  sums.type = args.x.dtype == DType::kBFloat16  ? kernels::SumType::kBf16
              : args.x.dtype == DType::kFloat16 ? kernels::SumType::kFp16
                                                : kernels::SumType::kFp32;
  sums.x = args.x.data;
  sums.hidden = hidden;
  sums.row_stride = (args.x.shape[0] > 1 ? args.x.stride[0] : hidden) * item;
  sums.row_weights = args.row_weights.defined() ? args.row_weights.as<float>() : nullptr;
  const bool weights = args.topk_weights.defined();
  Parts parts;
  const std::size_t rows_at = parts.add(received, static_cast<std::size_t>(hidden * item));
  const std::size_t weights_at = parts.add(weights ? received * sums.groups.topk : 0, sizeof(float));
  CombineArgs inner = args;
  inner.x = checked_shape(args.x.dtype, {received, hidden});
  inner.x.device = world_->device();
  if (weights) {
    inner.topk_weights = checked_shape(DType::kFloat32, {received, sums.groups.topk});
    inner.topk_weights.device = world_->device();
  }
  inner.row_weights = {};
  if (received == 0) return inner;
  const Block block = shared_block(parts.total(), work, "combine");
  staging->push_back(block);
  inner.x.data = sums.out = block.ptr + rows_at;
  if (weights) {
    sums.weights = args.topk_weights.as<float>();
    sums.out_weights = reinterpret_cast<float*>(block.ptr + weights_at);
    inner.topk_weights.data = sums.out_weights;
  }
  kernels::sum_groups(sums, work);
  return inner;
}

}  // namespace deep_moe::cuda
