// The high-throughput calls of a GPU Buffer whose ranks are on several nodes: what differs from those on one node.
//
// The map of what this rank forwards is made before the host knows its size: for as many rows as other nodes' ranks
// would send with as many tokens as this one has. Where more come, the kernel that moves rows leaves at once, and is
// launched again; the peers wait for it.
#include <algorithm>
#include <cstring>

#include "cuda/cuda_call.hpp"
#include "cuda/cuda_row_movement.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

namespace internode = kernels::internode;

namespace {

layout::RailRow rail_row(const layout::RowFormat& format, int num_local_ranks) {
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  return layout::RailRow(bytes(format.row_bytes), bytes(format.scale_bytes), bytes(format.topk * format.idx_bytes),
                         bytes(format.topk * format.weight_bytes), num_local_ranks);
}

std::int64_t token_stride(const TensorView& view) { return view.shape[0] > 1 ? view.stride[0] : view.shape[1]; }

internode::Routes routes_of(const DispatchHandle& handle, int num_nodes) {
  internode::Routes routes;
  routes.position = handle.send_index.as<std::int32_t>();
  routes.position_stride = token_stride(handle.send_index);
  routes.node_position = handle.send_rdma_index.as<std::int32_t>();
  routes.node_stride = token_stride(handle.send_rdma_index);
  routes.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  routes.rows_in_prefix = handle.recv_rdma_rank_prefix_sum.as<std::int32_t>();
  routes.rows_out = routes.rows_in_prefix + num_nodes;
  return routes;
}

}  // namespace

void CudaBuffer::check_rail_row(const char* call, const layout::RowFormat& format) const {
  world_->nodes()->check_row(call, rail_row(format, world_->nodes()->topology().num_local_ranks()));
}

// One block: they live and die together. Positions for ranks and for nodes lie side by side, as the kernel writes them.
void CudaBuffer::make_rail_handle(RowMovement* move) {
  const std::int64_t R = num_ranks, N = num_nodes, T = move->num_tokens;
  const std::size_t word = sizeof(std::int32_t);
  const auto bytes = [](std::int64_t items, std::size_t item) {
    return layout::align_up(static_cast<std::size_t>(items) * item, layout::kAlign);
  };
  const std::size_t rows = bytes(R * R, word), positions = rows + bytes(2 * N, word);
  const std::size_t in_rank = positions + bytes(T * (R + N), word), total = in_rank + bytes(T * (R + N) + 1, 1);
  const Tensor block =
      device_tensor(DType::kUInt8, {static_cast<std::int64_t>(total)}, move->streams.work(), move->streams.caller());
  const auto part = [&](std::size_t offset, DType dtype, std::int64_t height, std::int64_t width, std::int64_t stride) {
    Tensor tensor = block;
    tensor.view = TensorView::contiguous(block.as<char>() + offset, dtype, {height, width});
    tensor.view.stride[0] = stride;
    tensor.view.device = world_->device();
    return tensor;
  };
  move->handle.rank_prefix_matrix = part(0, DType::kInt32, R, R, R);
  move->handle.recv_rdma_rank_prefix_sum = part(rows, DType::kInt32, 2, N, N);
  move->handle.send_index = part(positions, DType::kInt32, T, R, R + N);
  move->handle.send_rdma_index = part(positions + word * static_cast<std::size_t>(R), DType::kInt32, T, N, R + N);
  move->handle.is_token_in_rank = part(in_rank, DType::kBool, T, R, R + N);
  // With num_worst_tokens: each row that this rank forwards is received by a rank of its node.
  make_forward_map(move->worst_rows > 0 ? move->worst_rows * (R / N) : (N - 1) * T, move);
}

void CudaBuffer::make_forward_map(std::int64_t num_rows, RowMovement* move) {
  const std::int64_t L = world_->nodes()->topology().num_local_ranks();
  Tensor map = device_tensor(DType::kInt32, {std::max<std::int64_t>(1, num_rows), L}, move->streams.work(),
                             move->streams.caller());
  map.view.shape[0] = num_rows;
  move->handle.send_nvl_index = std::move(map);
}

void CudaBuffer::notify_nodes(const kernels::NotifyArgs& args, RowMovement* move) {
  internode::NotifyArgs notify;
  notify.signature = args.signature;
  notify.place = args.place;
  notify.sequence = args.sequence;
  notify.ids = args.ids;
  notify.token_in_rank = args.token_in_rank;
  notify.expert_counts = args.expert_counts;
  notify.num_experts = args.num_experts;
  notify.position = move->handle.send_index.as<std::int32_t>();
  notify.is_token_in_rank = move->handle.is_token_in_rank.as<bool>();
  notify.rank_prefix_matrix = args.rank_prefix_matrix;
  notify.rows_in_prefix = move->handle.recv_rdma_rank_prefix_sum.as<std::int32_t>();
  notify.rows_out = notify.rows_in_prefix + num_nodes;
  world_->nodes()->notify(notify, move->streams.work());
}

// Behind a notify on the same stream.
void CudaBuffer::move_rows_between(const kernels::DispatchArgs& args, RowMovement* move) {
  internode::DispatchArgs rows;
  rows.routes = routes_of(move->handle.view(), num_nodes);
  rows.routes.segment_bases = world_->segment_table();
  rows.routes.num_sms = args.num_sms;
  rows.x = args.x;
  rows.num_tokens = args.num_tokens;
  rows.row_bytes = args.row_bytes;
  rows.row_stride = args.row_stride;
  rows.scales = args.scales;
  rows.ids = args.ids;
  rows.num_experts = args.num_experts;
  rows.topk_weights = args.topk_weights;
  rows.has_weights = args.has_weights;
  rows.weight_stride = args.weight_stride;
  if (!move->cached) {
    rows.send_nvl_index = move->handle.send_nvl_index.as<std::int32_t>();
    rows.map_rows = move->handle.send_nvl_index.view.shape[0];
  }
  world_->nodes()->dispatch(rows, move->streams.work());
}

// The same calls on all ranks, before rows whose routes are known.
void CudaBuffer::start_between(const kernels::CallStart& start, Stream stream) {
  internode::NotifyArgs notify;
  notify.signature = start.signature;
  notify.place = start.place;
  notify.weight_place = start.weight_place;
  world_->nodes()->notify(notify, stream);
}

void CudaBuffer::combine_between(const CombineArgs& args, const kernels::CombineArgs& rows, Stream stream) {
  internode::CombineArgs sums;
  sums.routes = routes_of(args.handle, num_nodes);
  sums.routes.segment_bases = world_->segment_table();
  sums.routes.num_sms = rows.num_sms;
  sums.type = rows.type;
  sums.num_tokens = rows.num_tokens;
  sums.hidden = rows.hidden;
  sums.send_nvl_index = args.handle.send_nvl_index.as<std::int32_t>();
  std::copy(std::begin(rows.bias), std::end(rows.bias), sums.bias);
  std::copy(std::begin(rows.bias_stride), std::end(rows.bias_stride), sums.bias_stride);
  sums.out = rows.out;
  sums.out_stride = rows.out_stride;
  sums.topk = rows.topk;
  sums.combined_topk_weights = rows.combined_topk_weights;
  start_between(rows.start, stream);
  world_->nodes()->combine(sums, stream);
}

void CudaBuffer::refuse_between(const layout::CallSignature& signature, const std::string& reason, Stream stream) {
  internode::NotifyArgs notify;
  notify.signature = signature;
  notify.refused = true;
  notify.num_reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(notify.reason)));
  std::memcpy(notify.reason, reason.data(), notify.num_reason_bytes);
  world_->nodes()->notify(notify, stream);
}

}  // namespace deep_moe::cuda
