#include <deep_moe/buffer.hpp>

#include <algorithm>

#include "cpu/cpu_buffer.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe {

Buffer::Impl::Impl(const Bootstrap& bootstrap, const BufferOptions& options_)
    : rank(bootstrap.rank), num_ranks(bootstrap.size), options(options_), forks(fork_count()) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks || !bootstrap.all_gather)
    throw ArgumentError("bootstrap: got rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) +
                        ", expected 0 <= rank < size and an all_gather function");
}

void Buffer::Impl::check_process() const {
  if (forks != fork_count())
    throw ForkedProcessError(
        "this Buffer was made in a parent process; a forked child cannot use it: make the Buffer after the fork");
}

std::int64_t Buffer::Impl::check_scratch_range(std::int64_t offset, std::int64_t num_bytes,
                                               bool use_rdma_buffer) const {
  const std::int64_t capacity = use_rdma_buffer ? options.num_rdma_bytes : options.num_nvl_bytes;
  if (offset < 0 || num_bytes < 0 || offset > capacity || num_bytes > capacity - offset)
    throw_value("size", std::to_string(num_bytes) + " bytes at offset " + std::to_string(offset),
                "what fits in the " + std::to_string(capacity) + " bytes given as " +
                    (use_rdma_buffer ? "num_rdma_bytes" : "num_nvl_bytes"));
  return capacity;
}

Buffer::Buffer(const Bootstrap& bootstrap, const BufferOptions& options) {
  if (options.device != kCpuDevice) {
    impl_ = cuda::make_buffer(bootstrap, options);
    return;
  }
  const auto buffer = std::make_shared<cpu::CpuBuffer>(bootstrap, options);
  buffer->start();
  impl_ = buffer;
}

Buffer::~Buffer() { impl_->destroy(); }

int Buffer::rank() const { return impl_->rank; }
int Buffer::num_ranks() const { return impl_->num_ranks; }
int Buffer::num_nodes() const { return impl_->num_nodes; }
int Buffer::node() const { return impl_->node; }
const BufferOptions& Buffer::options() const { return impl_->options; }

LayoutResult Buffer::get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                         const StreamOptions& streams) {
  return impl_->get_dispatch_layout(topk_idx, num_experts, streams);
}
DispatchResult Buffer::dispatch(const DispatchArgs& args) { return impl_->dispatch(args); }
CombineResult Buffer::combine(const CombineArgs& args) { return impl_->combine(args); }
LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArgs& args) {
  return impl_->low_latency_dispatch(args);
}
LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArgs& args) {
  return impl_->low_latency_combine(args);
}
void Buffer::clean_low_latency_buffer(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden,
                                      std::int64_t num_experts) {
  impl_->clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts);
}
void Buffer::update_mask(int rank, bool masked) { impl_->update_mask(rank, masked); }
void Buffer::query_mask(std::int32_t* status) const { impl_->query_mask(status); }
void Buffer::clean_mask() { impl_->clean_mask(); }
Tensor Buffer::empty(DType dtype, const std::vector<std::int64_t>& shape) { return impl_->empty(dtype, shape); }
Tensor Buffer::local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) {
  return impl_->local_buffer(offset, num_bytes, use_rdma_buffer);
}
MemoryStats Buffer::memory_stats() const { return impl_->memory_stats(); }
std::string Buffer::memory_kind() const { return impl_->memory_kind(); }
void Buffer::refuse(const std::string& call, const std::string& reason) { impl_->refuse(call, reason); }
void* Buffer::comm_stream() const { return impl_->comm_stream(); }
void Buffer::record_stream(const TensorView& tensor, void* stream) { impl_->record_stream(tensor, stream); }
void Buffer::check() { impl_->check(); }
void Buffer::reset() { impl_->reset(); }
void Buffer::destroy() { impl_->destroy(); }

void check_device(const char* name, const TensorView& view, int device) {
  if (!view.defined() || view.device == device) return;
  const auto text = [](int which) {
    return which == kCpuDevice ? std::string("the CPU") : "CUDA device " + std::to_string(which);
  };
  throw_value(name, "a tensor on " + text(view.device), "one on this Buffer's device, " + text(device));
}

constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

TensorView checked_shape(DType dtype, const std::vector<std::int64_t>& shape) {
  if (shape.empty() || shape.size() > kMaxTensorDims)
    throw_value("shape", std::to_string(shape.size()) + " dimensions", "1 to " + std::to_string(kMaxTensorDims));
  if (dtype == DType::kNone) throw_type("dtype", "none", "a dtype");
  TensorView view;
  view.dtype = dtype;
  view.num_dims = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = view.num_dims - 1; i >= 0; --i) {
    const std::int64_t size = shape[static_cast<std::size_t>(i)];
    if (size < 0) throw_value("shape", "a dimension of " + std::to_string(size), ">= 0");
    view.shape[i] = size;
    view.stride[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(size, 1), &stride) || stride > kMaxElements)
      throw_value("shape", "more elements than " + std::to_string(kMaxElements), "at most that many");
  }
  return view;
}

std::uint32_t call_kind(const std::string& name) {
  using layout::CallKind;
  for (const auto kind : {CallKind::kDispatch, CallKind::kCachedDispatch, CallKind::kCombine,
                          CallKind::kLowLatencyDispatch, CallKind::kLowLatencyCombine}) {
    if (name == call_name(static_cast<std::uint32_t>(kind))) return static_cast<std::uint32_t>(kind);
  }
  return static_cast<std::uint32_t>(CallKind::kNone);
}

DispatchHandle OwnedDispatchHandle::view() const {
  return {rank_prefix_matrix.view,
          recv_src_idx.view,
          is_token_in_rank.view,
          send_index.view,
          send_rdma_index.view,
          recv_rdma_rank_prefix_sum.view,
          send_nvl_index.view,
          expert_offsets.view,
          expert_counts.view,
          expert_rows.view,
          meta.view};
}

LowLatencyHandle OwnedLowLatencyHandle::view() const {
  return {src_info.view, layout_range.view, recv_pos.view, recv_weights.view, meta.view};
}

}  // namespace deep_moe
