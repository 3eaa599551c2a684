// Combine on a GPU.
#include <numeric>

#include "cuda/cuda_call.hpp"
#include "layout/handle.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

namespace {

using RowRange = CudaBuffer::RowRange;

// Rows without gaps; as one piece where they are one, for a copy row by row takes several times as long.
void copy_rows(void* to, const TensorView& rows, std::size_t width, std::int64_t num_rows, cudaStream_t stream) {
  const std::size_t height = static_cast<std::size_t>(num_rows);
  if (num_rows == 1 || rows.is_contiguous()) {
    check_runtime(cudaMemcpyAsync(to, rows.data, width * height, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  } else {
    const std::size_t pitch = dtype_bytes(rows.dtype) * static_cast<std::size_t>(rows.stride[0]);
    check_runtime(cudaMemcpy2DAsync(to, width, rows.data, pitch, width, height, cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpy2DAsync");
  }
}

// The same rows of both, which have no gaps.
void copy_range(char* to, const TensorView& rows, std::size_t width, RowRange range, cudaStream_t stream) {
  if (range.count == 0) return;
  const std::size_t first = width * static_cast<std::size_t>(range.first);
  check_runtime(cudaMemcpyAsync(to + first, static_cast<const char*>(rows.data) + first,
                                width * static_cast<std::size_t>(range.count), cudaMemcpyDeviceToDevice, stream),
                "cudaMemcpyAsync");
}

// What this rank had sent to itself, by the handle; none where the host does not know.
RowRange own_range(const TensorView& meta, int rank, int num_ranks, std::int64_t num_rows) {
  if (meta.numel() != layout::kDispatchMetaSize + num_ranks) return {};
  const std::int64_t* source_rows = meta.as<std::int64_t>() + layout::kDispatchMetaSize;
  if (std::accumulate(source_rows, source_rows + num_ranks, std::int64_t{0}) != num_rows) return {};
  return {std::accumulate(source_rows, source_rows + rank, std::int64_t{0}), source_rows[rank]};
}

}  // namespace

// Where peers read `rows` from: in place if they lie in the heap as kernels load them, else a copy of them there. Those
// of `own`, which no peer reads, are left out of a copy where this rank can read them as they are: then `*own_rows`.
layout::Place CudaBuffer::stage(const TensorView& rows, std::int64_t num_rows, RowRange own, Stream work,
                                std::vector<Block>* staging, const void** own_rows) {
  layout::Place place;
  place.capacity = num_rows;
  if (num_rows == 0) return place;
  const std::size_t item = dtype_bytes(rows.dtype), width = item * static_cast<std::size_t>(rows.shape[1]);
  std::size_t offset = 0;
  if (rows.is_contiguous() &&
      world_->heap().locate(rows.data, width * static_cast<std::size_t>(num_rows), &place.segment, &offset) &&
      offset % static_cast<std::size_t>(kRowAlignment) == 0 && world_->shared(place.segment)) {
    place.offset = static_cast<std::int64_t>(offset);
    return place;
  }
  const bool in_place =
      own.count > 0 && rows.is_contiguous() && width % 16 == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
  if (in_place) *own_rows = rows.data;
  if (in_place && own.count == num_rows) return place;
  const Block block = shared_block(width * static_cast<std::size_t>(num_rows), work, "combine");
  staging->push_back(block);
  const auto stream = static_cast<cudaStream_t>(work);
  if (in_place) {
    copy_range(block.ptr, rows, width, {0, own.first}, stream);
    copy_range(block.ptr, rows, width, {own.first + own.count, num_rows - own.first - own.count}, stream);
  } else {
    copy_rows(block.ptr, rows, width, num_rows, stream);
  }
  place.segment = block.segment;
  place.offset = static_cast<std::int64_t>(block.offset);
  return place;
}

CombineResult CudaBuffer::combine_rows(const layout::CallSignature& call, const CombineArgs& given) {
  CombineArgs args = given;
  const std::int64_t* meta = args.handle.meta.as<std::int64_t>();
  const std::int64_t num_tokens = meta[layout::kMetaNumTokens], num_rows = meta[layout::kMetaNumRecv];
  const std::int64_t hidden = args.x.shape[1], item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  const std::int64_t topk = call.topk;
  CallStreams streams = join_streams(args.streams);
  CombineResult result;
  std::vector<Block> staging;
  kernels::CombineArgs rows;
  try {
    if (const Nodes* nodes = world_->nodes())
      nodes->check_row("combine", layout::RailRow(static_cast<std::size_t>(hidden * item), 0, 0,
                                                  4 * static_cast<std::size_t>(topk), 0));
    if (is_expert_major(args.handle)) args = sum_by_row(given, streams.work(), &staging);
    const RowRange own =
        world_->nodes() != nullptr ? RowRange{} : own_range(args.handle.meta, rank, num_ranks, num_rows);
    rows.start.place = stage(args.x, num_rows, own, streams.work(), &staging, &rows.own_rows);
    if (topk > 0) rows.start.weight_place = stage(args.topk_weights, num_rows, {}, streams.work(), &staging, nullptr);
    if (args.out.defined()) {
      result.combined_x.view = args.out;
    } else {
      result.combined_x = device_tensor(args.x.dtype, {num_tokens, hidden}, streams.work(), streams.caller());
    }
    if (topk > 0)
      result.combined_topk_weights =
          device_tensor(DType::kFloat32, {num_tokens, topk}, streams.work(), streams.caller());
  } catch (const BufferTooSmallError& error) {
    for (const Block& block : staging) world_->heap().own(block, streams.work()).reset();
    post_refusal(call, error.what());
    throw;
  }
  rows.start.signature = call;
  rows.type = args.x.dtype == DType::kBFloat16  ? kernels::SumType::kBf16
              : args.x.dtype == DType::kFloat16 ? kernels::SumType::kFp16
                                                : kernels::SumType::kFp32;
  rows.num_tokens = num_tokens;
  rows.hidden = hidden;
  rows.send_position = args.handle.send_index.as<std::int32_t>();
  rows.rank_prefix_matrix = args.handle.rank_prefix_matrix.as<std::int32_t>();
  rows.segment_bases = world_->segment_table();
  const TensorView* biases[] = {&args.bias0, &args.bias1};
  for (int i = 0; i < 2; ++i) {
    if (!biases[i]->defined()) continue;
    rows.bias[i] = biases[i]->data;
    rows.bias_stride[i] = (num_tokens > 1 ? biases[i]->stride[0] : hidden) * item;
  }
  rows.out = result.combined_x.view.data;
  rows.out_stride = (num_tokens > 1 ? result.combined_x.view.stride[0] : hidden) * item;
  rows.topk = static_cast<int>(topk);
  rows.combined_topk_weights = topk > 0 ? result.combined_topk_weights.as<float>() : nullptr;
  rows.num_sms = num_blocks(args.num_sms);
  if (world_->nodes() != nullptr) {
    combine_between(args, rows, streams.work());
  } else {
    kernels::combine(world_->domain(), rows, streams.work());
  }
  // Dropped behind the kernel, which ends when no peer reads them any more.
  for (const Block& block : staging) world_->heap().own(block, streams.work()).reset();
  streams.finish();
  return result;
}

}  // namespace deep_moe::cuda
