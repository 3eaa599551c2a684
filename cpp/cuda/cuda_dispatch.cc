// Dispatch on a GPU.
#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "cuda/cuda_call.hpp"
#include "cuda/cuda_row_movement.hpp"
#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "layout/hash.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

namespace {

using layout::NotifyOutcome;
using layout::Place;
using layout::RecvBlock;

std::uint64_t load(std::uint64_t& word) { return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_acquire); }

}  // namespace

DispatchResult CudaBuffer::dispatch_rows(const layout::CallSignature& call, const DispatchArgs& args) {
  CallStreams streams = join_streams(args.streams);
  RowMovement move(streams);
  try {
    prepare_route(args, &move);
    offer_block(&move);
  } catch (const BufferTooSmallError& error) {
    post_refusal(call, error.what());
    throw;
  }
  try {
    if (move.cached) {
      launch_placed(args, &move);
    } else {
      launch_notified(args, &move);
      if (move.worst_rows == 0) read_counts(args, &move);
    }
    DispatchResult result = hand_out(args, &move);
    if (args.handle != nullptr ? is_expert_major(*args.handle) : args.expert_major)
      result = group_by_expert(args, &move, std::move(result));
    streams.finish();
    return result;
  } catch (...) {
    // Rows may still be on their way there. Errors that leave the Buffer usable have freed it.
    if (move.block) world_->heap().quarantine(move.block);
    throw;
  }
}

// Only with DEEP_MOE_CHECK=1: waits for the ids. Those of a graph are not there yet.
void CudaBuffer::check_device_ids(const TensorView& topk_idx, std::int64_t num_experts,
                                  const StreamOptions& streams) const {
  const auto stream = static_cast<cudaStream_t>(current_stream());
  if (is_captured()) return;
  if (streams.previous_event != nullptr)
    check_runtime(cudaEventSynchronize(static_cast<cudaEvent_t>(streams.previous_event)), "cudaEventSynchronize");
  check_runtime(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // a copy that waits would hold the driver
  const std::int64_t rows = topk_idx.shape[0], columns = topk_idx.shape[1];
  const Tensor host = make_host_tensor(topk_idx.dtype, {rows, columns});
  const std::size_t item = dtype_bytes(topk_idx.dtype), width = item * static_cast<std::size_t>(columns);
  if (rows > 0)
    check_runtime(cudaMemcpy2DAsync(host.view.data, width, topk_idx.data,
                                    item * static_cast<std::size_t>(rows > 1 ? topk_idx.stride[0] : columns), width,
                                    static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost, stream),
                  "cudaMemcpy2DAsync");
  check_runtime(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check_topk_ids(host.view, num_experts);
}

void CudaBuffer::prepare_route(const DispatchArgs& args, RowMovement* move) {
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.data.dtype));
  move->format.row_bytes = args.x.data.shape[1] * item;
  move->num_tokens = args.x.data.shape[0];
  move->cached = args.handle != nullptr;
  move->worst_rows = args.num_worst_tokens;
  if (const TensorView& scales = args.x.scales; scales.defined()) {
    move->scales.data = scales.data;
    move->scales.item_bytes = static_cast<int>(dtype_bytes(scales.dtype));
    move->scales.num_items = scales.num_dims == 2 ? scales.shape[1] : 1;
    move->scales.row_stride = scales.stride[0] * move->scales.item_bytes;
    move->scales.item_stride = scales.num_dims == 2 ? scales.stride[1] * move->scales.item_bytes : 0;
    move->format.scale_bytes = move->scales.num_items * move->scales.item_bytes;
    move->column_scales = scales.num_dims == 2 && move->scales.num_items > 1 && scales.stride[0] == 1;
  }
  if (move->cached) {
    const std::int64_t* meta = args.handle->meta.as<std::int64_t>();
    move->arrived = meta[layout::kMetaNumArrived];
    move->worst_rows = meta[layout::kMetaNumRecv] != meta[layout::kMetaNumArrived] ? meta[layout::kMetaNumRecv] : 0;
    move->handle.send_index.view = args.handle->send_index;
    move->handle.rank_prefix_matrix.view = args.handle->rank_prefix_matrix;
    move->handle.send_rdma_index.view = args.handle->send_rdma_index;
    move->handle.recv_rdma_rank_prefix_sum.view = args.handle->recv_rdma_rank_prefix_sum;
    move->handle.send_nvl_index.view = args.handle->send_nvl_index;
    if (num_nodes > 1) check_rail_row("dispatch", move->format);
    return;
  }
  move->num_experts = args.topk_idx.defined() ? args.num_experts : args.num_tokens_per_expert.shape[0];
  if (args.topk_idx.defined()) {
    move->format.topk = args.topk_idx.shape[1];
    move->format.idx_bytes = static_cast<std::int64_t>(dtype_bytes(args.topk_idx.dtype));
  }
  move->format.weight_bytes = args.topk_weights.defined() ? 4 : 0;
  const std::int64_t known_rows = move->worst_rows > 0 ? 0 : num_ranks;
  move->handle.meta = make_host_tensor(DType::kInt64, {layout::kDispatchMetaSize + known_rows + (num_nodes > 1)});
  if (num_nodes > 1) {
    check_rail_row("dispatch", move->format);
    return make_rail_handle(move);
  }
  const Stream user = move->streams.caller();
  // One block, for they live and die together.
  const std::size_t cells = static_cast<std::size_t>(move->num_tokens) * static_cast<std::size_t>(num_ranks);
  const std::size_t send_index =
      layout::align_up(sizeof(std::int32_t) * static_cast<std::size_t>(num_ranks * num_ranks), layout::kAlign);
  const std::size_t in_rank = send_index + layout::align_up(sizeof(std::int32_t) * cells, layout::kAlign);
  const Tensor block =
      device_tensor(DType::kUInt8, {static_cast<std::int64_t>(in_rank + cells)}, move->streams.work(), user);
  const auto part = [&](std::size_t offset, DType dtype, std::int64_t rows) {
    Tensor tensor = block;
    tensor.view = TensorView::contiguous(block.as<char>() + offset, dtype, {rows, num_ranks});
    tensor.view.device = world_->device();
    return tensor;
  };
  move->handle.rank_prefix_matrix = part(0, DType::kInt32, num_ranks);
  move->handle.send_index = part(send_index, DType::kInt32, move->num_tokens);
  move->handle.is_token_in_rank = part(in_rank, DType::kBool, move->num_tokens);
}

void CudaBuffer::offer_block(RowMovement* move) {
  const std::int64_t known = move->worst_rows > 0 ? move->worst_rows : move->cached ? move->arrived : -1;
  if (known < 0) {
    move->block = world_->heap().allocate_largest(std::numeric_limits<std::int64_t>::max(), move->streams.work());
    if (move->block && !world_->shared(move->block.segment))  // appended for this rank alone, and not everywhere yet
      free_block(move);
    move->place.capacity = RecvBlock::capacity(move->format, static_cast<std::int64_t>(move->block.bytes));
  } else {
    move->block = shared_block(RecvBlock(move->format, known).total, move->streams.work(), "dispatch");
    move->place.capacity = known;
  }
  if (!move->block) move->place.capacity = 0;
  move->place.segment = move->block.segment;
  move->place.offset = static_cast<std::int64_t>(move->block.offset);
  move->place.flags =
      (move->column_scales ? layout::kPlaceColumnScales : 0) | (move->worst_rows > 0 ? layout::kPlaceHard : 0);
}

// A block that every peer can reach, or BufferTooSmallError.
Block CudaBuffer::shared_block(std::size_t bytes, Stream first_user, const char* call) {
  std::string reason;
  const Block block = world_->allocate_or_grow(bytes, first_user, &reason);
  if (!block)
    throw BufferTooSmallError(std::string(call) + ": " + std::to_string(bytes) + " bytes of heap needed: " + reason);
  try {
    world_->wait_until_shared(block.segment, call);
  } catch (...) {
    world_->heap().free(block);
    throw;
  }
  return block;
}

void CudaBuffer::free_block(RowMovement* move) {
  if (move->block) world_->heap().free(move->block);
  move->block = {};
}

kernels::DispatchArgs CudaBuffer::row_arguments(const DispatchArgs& args, const RowMovement& move) const {
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.data.dtype));
  kernels::DispatchArgs rows;
  rows.x = args.x.data.data;
  rows.num_tokens = move.num_tokens;
  rows.row_bytes = move.format.row_bytes;
  rows.row_stride = move.num_tokens > 1 ? args.x.data.stride[0] * item : move.format.row_bytes;
  rows.scales = move.scales;
  rows.num_experts = static_cast<int>(move.num_experts);
  if (args.topk_idx.defined()) {
    rows.ids.data = args.topk_idx.data;
    rows.ids.id_bytes = static_cast<int>(move.format.idx_bytes);
    rows.ids.topk = static_cast<int>(move.format.topk);
    rows.ids.num_tokens = move.num_tokens;
    rows.ids.row_stride = move.num_tokens > 1 ? args.topk_idx.stride[0] : move.format.topk;
  }
  if (args.topk_weights.defined()) {
    rows.has_weights = true;
    rows.topk_weights = args.topk_weights.as<float>();
    rows.weight_stride = move.num_tokens > 1 ? args.topk_weights.stride[0] : move.format.topk;
  }
  rows.send_position = move.handle.send_index.as<std::int32_t>();
  rows.rank_prefix_matrix = move.handle.rank_prefix_matrix.as<std::int32_t>();
  rows.segment_bases = world_->segment_table();
  rows.num_sms = num_blocks(args.num_sms);
  return rows;
}

void CudaBuffer::launch_notified(const DispatchArgs& args, RowMovement* move) {
  const kernels::DispatchArgs rows = row_arguments(args, *move);
  kernels::NotifyArgs notify;
  notify.ids = rows.ids;
  if (!args.topk_idx.defined()) {
    notify.ids.num_tokens = move->num_tokens;
    notify.token_in_rank = args.is_token_in_rank.as<bool>();
    notify.expert_counts = args.num_tokens_per_expert.as<std::int32_t>();
  }
  notify.num_experts = rows.num_experts;
  notify.signature = signature(args);
  notify.place = move->place;
  notify.segment_bases = rows.segment_bases;
  notify.sequence = move->worst_rows > 0 ? 0 : move->sequence = ++sequence_ == 0 ? ++sequence_ : sequence_;
  notify.send_position = move->handle.send_index.as<std::int32_t>();
  notify.is_token_in_rank = move->handle.is_token_in_rank.as<bool>();
  notify.rank_prefix_matrix = move->handle.rank_prefix_matrix.as<std::int32_t>();
  if (world_->nodes() != nullptr) {
    notify_nodes(notify, move);
    return move_rows_between(rows, move);
  }
  kernels::notify(world_->domain(), notify, move->streams.work());
  kernels::dispatch(world_->domain(), rows, move->streams.work());
}

// Rows alone, into a place whose size is known: the cached dispatch, and the second try of one that was too small.
void CudaBuffer::launch_placed(const DispatchArgs& args, RowMovement* move) {
  kernels::DispatchArgs rows = row_arguments(args, *move);
  rows.cached = true;
  rows.start.signature = signature(args);
  rows.start.place = move->place;
  if (world_->nodes() != nullptr) {
    start_between(rows.start, move->streams.work());
    return move_rows_between(rows, move);
  }
  kernels::dispatch(world_->domain(), rows, move->streams.work());
}

// The host's half of notify: counts from mapped memory, while rows already move.
void CudaBuffer::read_counts(const DispatchArgs& args, RowMovement* move) {
  const layout::HostLayout& words = rows_domain().host_words;
  char* const host = rows_host_words();
  const auto has_tag = [&](std::uint64_t& word) { return layout::has_tag(load(word), move->sequence); };
  const auto started = [&] { return has_tag(words.started(host)); };
  world_->wait_for_kernel("dispatch/notify", move->streams.work(), started,
                          [&] { return has_tag(words.outcome(host)); });
  const auto outcome = static_cast<NotifyOutcome>(layout::tagged_count(load(words.outcome(host))));
  if (outcome == NotifyOutcome::kFailed || outcome == NotifyOutcome::kRefused || outcome == NotifyOutcome::kMismatch ||
      outcome == NotifyOutcome::kTooSmallHard) {
    move->streams.join_comm();
    world_->wait_idle("dispatch: the end of its kernels");
    if (outcome != NotifyOutcome::kFailed) free_block(move);
    take_kernel_error();
    throw Error("dispatch: an earlier call on this Buffer has failed");
  }
  const auto read = [&](std::uint64_t& word) {
    if (!has_tag(word))
      world_->wait_for_kernel("dispatch/notify", move->streams.work(), started, [&] { return has_tag(word); });
    return static_cast<std::int64_t>(layout::tagged_count(load(word)));
  };
  move->hash = layout::kFnvStart ^ static_cast<std::uint64_t>(move->num_experts);
  for (int peer = 0; peer < num_ranks; ++peer) {
    move->totals.push_back(read(words.rank_rows(host)[peer]));
    move->source_rows.push_back(read(words.source_rows(host)[peer]));
    move->hash = layout::fnv_step(move->hash, static_cast<std::uint64_t>(move->totals.back()));
  }
  move->arrived = move->totals[static_cast<std::size_t>(rank)];
  const layout::ExpertBlocks blocks(static_cast<int>(move->num_experts), num_ranks);
  for (int expert = 0; expert < blocks.num_local_experts(rank); ++expert) {
    const std::int64_t rows = read(words.expert_rows(host)[expert]), alignment = args.expert_alignment;
    move->expert_rows.push_back((rows + alignment - 1) / alignment * alignment);
  }
  if (world_->nodes() != nullptr) {
    std::int64_t rows_in = 0;
    for (int other = 0; other < num_nodes; ++other) rows_in += read(words.node_rows(host)[other]);
    if (rows_in > move->handle.send_nvl_index.view.shape[0]) {
      make_forward_map(rows_in, move);
      if (outcome == NotifyOutcome::kRowsFit) move_rows_between(row_arguments(args, *move), move);
    }
    move->handle.send_nvl_index.view.shape[0] = rows_in;
  }
  if (outcome == NotifyOutcome::kTooSmall) grow_and_move(args, move);
}

DispatchResult CudaBuffer::hand_out(const DispatchArgs& args, RowMovement* move) {
  const Stream user = move->streams.caller();
  const std::int64_t rows = move->worst_rows > 0 ? move->worst_rows : move->arrived;
  const RecvBlock parts(move->format, rows);
  // Rows and scales die together, and so does what is small.
  char* base = nullptr;
  std::shared_ptr<void> rows_owner, small_owner;
  if (move->spill) {
    base = move->spill->data();
    rows_owner = small_owner = move->spill;
    // The window is written and copied out yet.
    world_->heap().own(std::exchange(move->block, {}), move->streams.work()).reset();
  } else if (parts.total == 0) {
    free_block(move);
  } else {
    base = move->block.ptr;
    world_->heap().shrink(move->block, parts.total);
    const std::vector<Block> blocks = world_->heap().split(move->block, {parts.x, parts.topk_idx});
    move->block = {};
    rows_owner = world_->heap().own(blocks[0], user);
    small_owner = world_->heap().own(blocks[1], user);
  }
  const auto tensor = [&](std::size_t offset, DType dtype, const std::vector<std::int64_t>& shape) {
    Tensor out;
    out.view = checked_shape(dtype, shape);
    out.view.device = world_->device();
    if (base != nullptr && out.view.numel() > 0) {
      out.view.data = base + offset;
      out.owner = offset < parts.topk_idx ? rows_owner : small_owner;
    }
    return out;
  };
  DispatchResult result;
  result.recv_x.data = tensor(parts.x, args.x.data.dtype, {rows, args.x.data.shape[1]});
  if (const TensorView& scales = args.x.scales; scales.defined()) {
    Tensor& out = result.recv_x.scales;
    out = scales.num_dims == 2 ? tensor(parts.scales, scales.dtype, {rows, scales.shape[1]})
                               : tensor(parts.scales, scales.dtype, {rows});
    if (move->column_scales) {
      out.view.stride[0] = 1;
      out.view.stride[1] = rows;
    }
  }
  Tensor src_idx = tensor(parts.src_idx, DType::kInt32, {rows});
  if (move->cached) return result;
  if (move->format.topk > 0)
    result.recv_topk_idx = tensor(parts.topk_idx, args.topk_idx.dtype, {rows, move->format.topk});
  if (move->format.weight_bytes > 0)
    result.recv_topk_weights = tensor(parts.topk_weights, DType::kFloat32, {rows, move->format.topk});
  result.num_recv_tokens_per_expert = std::move(move->expert_rows);
  std::int64_t* meta = move->handle.meta.as<std::int64_t>();
  meta[layout::kMetaNumTokens] = move->num_tokens;
  meta[layout::kMetaNumRecv] = rows;
  meta[layout::kMetaNumArrived] = move->worst_rows > 0 ? -1 : rows;  // with a fixed number the host does not learn it
  meta[layout::kMetaNumExperts] = move->num_experts;
  meta[layout::kMetaTopk] = move->format.topk;
  meta[layout::kMetaNumRanks] = num_ranks;
  meta[layout::kMetaHash] = static_cast<std::int64_t>(move->hash | 1);
  meta[layout::kMetaNumNodes] = num_nodes > 1 ? num_nodes : 0;
  meta[layout::kMetaNumExpertRows] = -1;
  std::copy(move->source_rows.begin(), move->source_rows.end(), meta + layout::kDispatchMetaSize);
  if (num_nodes > 1) meta[move->handle.meta.view.shape[0] - 1] = move->handle.send_nvl_index.view.shape[0];
  move->handle.recv_src_idx = std::move(src_idx);
  result.handle = std::move(move->handle);
  return result;
}

}  // namespace deep_moe::cuda
