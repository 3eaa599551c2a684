#include "cuda/cuda_buffer.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cuda/call_streams.hpp"
#include "layout/handle.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

CudaBuffer::CudaBuffer(const Bootstrap& bootstrap, const BufferOptions& options_) : Buffer::Impl(bootstrap, options_) {
  if (options.low_latency_mode)
    throw UnavailableError(
        "low_latency_mode: this version has the low-latency calls on the CPU alone; on GPUs it has "
        "the high-throughput ones");
  DeviceWorldOptions world;
  world.device = options.device;
  world.heap_bytes = static_cast<std::size_t>(options.num_nvl_bytes);
  if (const char* text = std::getenv("DEEP_MOE_MAX_HEAP_BYTES"); text != nullptr && *text != '\0')
    world.max_heap_bytes = static_cast<std::size_t>(std::strtod(text, nullptr));
  world.timeout_seconds = options.timeout_seconds;
  world.interrupt_check = options.interrupt_check;
  world.current_stream = options.current_stream;
  const char* check = std::getenv("DEEP_MOE_CHECK");
  check_ids_ = check != nullptr && std::strcmp(check, "1") == 0;
  world_ = make_device_world(bootstrap, world);
}

CudaBuffer::~CudaBuffer() { destroy(); }

std::unique_lock<std::mutex> CudaBuffer::lock_call() {
  check_process();
  std::unique_lock<std::mutex> lock(call_mutex_);
  if (destroyed_) throw DestroyedError("this Buffer has been destroyed");
  if (failure_) std::rethrow_exception(failure_);
  world_->poll();
  take_kernel_error();
  return lock;
}

Stream CudaBuffer::current_stream() const { return options.current_stream ? options.current_stream() : nullptr; }

void* CudaBuffer::comm_stream() const {
  check_process();
  if (destroyed_) throw DestroyedError("this Buffer has been destroyed");
  return world_->comm_stream();
}

void CudaBuffer::take_kernel_error() {
  layout::ErrorRecord& record = world_->domain().host_words.error(world_->host_words());
  const auto kind =
      static_cast<layout::KernelErrorKind>(std::atomic_ref<std::uint32_t>(record.kind).load(std::memory_order_acquire));
  if (kind == layout::KernelErrorKind::kNone) return;
  const std::string peer = "rank " + std::to_string(record.peer), call = " (call " + std::to_string(record.epoch) + ")";
  if (kind == layout::KernelErrorKind::kTimeout) {
    try {
      throw TimeoutError("rank " + std::to_string(record.rank) + " waited " + std::to_string(options.timeout_seconds) +
                         " s for " + peer + " in " +
                         layout::wait_phase_name(static_cast<layout::WaitPhase>(record.phase)) + call + ": expected " +
                         std::to_string(record.expected) + ", saw " + std::to_string(record.seen));
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }
  const layout::ErrorRecord seen = record;
  kernels::clear_error(world_->domain(), world_->host_words(), world_->comm_stream());
  if (kind == layout::KernelErrorKind::kPeerRefused)
    throw PeerRefusedError(peer + " refused its " + call_name(seen.peer_signature.kind) + call + ": " +
                           std::string(seen.reason, seen.num_reason_bytes));
  throw CallMismatchError("the ranks did not make the same call" + call + ": rank " + std::to_string(rank) +
                          " called " + describe_signature(last_signature_) + ", " + peer + " called " +
                          describe_signature(seen.peer_signature));
}

void CudaBuffer::check_or_refuse(const layout::CallSignature& signature, const std::function<void()>& checks) {
  try {
    checks();
  } catch (const std::exception&) {
    refuse_and_throw(signature, std::current_exception());
  }
  last_signature_ = signature;
}

void CudaBuffer::refuse_and_throw(const layout::CallSignature& signature, std::exception_ptr error) {
  std::string reason = "an unknown error";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    reason = known.what();
  }
  kernels::post_refusal(world_->domain(), signature, reason, world_->comm_stream());
  std::rethrow_exception(error);
}

Tensor CudaBuffer::device_tensor(DType dtype, const std::vector<std::int64_t>& shape, Stream user) {
  Tensor tensor;
  tensor.view = checked_shape(dtype, shape);
  tensor.view.device = world_->device();
  std::string reason;
  const Block block = world_->allocate_or_grow(tensor.view.num_bytes(), user, &reason);
  if (!block)
    throw BufferTooSmallError(std::to_string(tensor.view.num_bytes()) + " bytes of device heap needed: " + reason);
  tensor.view.data = block.ptr;
  tensor.owner = world_->heap().own(block, user);
  return tensor;
}

namespace {

kernels::TopkIds ids_of(const TensorView& topk_idx) {
  kernels::TopkIds ids;
  if (!topk_idx.defined()) return ids;
  ids.data = topk_idx.data;
  ids.id_bytes = static_cast<int>(dtype_bytes(topk_idx.dtype));
  ids.topk = static_cast<int>(topk_idx.shape[1]);
  ids.num_tokens = topk_idx.shape[0];
  ids.row_stride = topk_idx.shape[0] > 1 ? topk_idx.stride[0] : topk_idx.shape[1];
  return ids;
}

}  // namespace

LayoutResult CudaBuffer::get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                             const StreamOptions& streams) {
  const auto lock = lock_call();
  check_device("topk_idx", topk_idx, world_->device());
  check_topk_idx_shape(topk_idx, num_experts);
  CallStreams joined(world_->comm_stream(), current_stream(), streams);
  LayoutResult result;
  result.num_tokens_per_rank = device_tensor(DType::kInt32, {num_ranks}, joined.caller());
  result.num_tokens_per_expert = device_tensor(DType::kInt32, {num_experts}, joined.caller());
  result.is_token_in_rank = device_tensor(DType::kBool, {topk_idx.shape[0], num_ranks}, joined.caller());
  kernels::LayoutArgs args;
  args.ids = ids_of(topk_idx);
  args.num_experts = static_cast<int>(num_experts);
  args.num_tokens_per_rank = result.num_tokens_per_rank.as<std::int32_t>();
  args.num_tokens_per_expert = result.num_tokens_per_expert.as<std::int32_t>();
  args.is_token_in_rank = result.is_token_in_rank.as<bool>();
  kernels::get_dispatch_layout(world_->domain(), args, joined.comm());
  joined.finish();
  return result;
}

LowLatencyDispatchResult CudaBuffer::low_latency_dispatch(const LowLatencyDispatchArgs&) {
  throw UnavailableError("low_latency_dispatch: not on GPUs in this version");
}
LowLatencyCombineResult CudaBuffer::low_latency_combine(const LowLatencyCombineArgs&) {
  throw UnavailableError("low_latency_combine: not on GPUs in this version");
}
void CudaBuffer::clean_low_latency_buffer(std::int64_t max_tokens, std::int64_t hidden, std::int64_t num_experts) {
  const auto lock = lock_call();
  low_latency_size_hint(max_tokens, hidden, num_ranks, num_experts);  // checks the numbers; there is nothing to clean
}
void CudaBuffer::update_mask(int, bool) { throw UnavailableError("masks of ranks: not on GPUs in this version"); }
void CudaBuffer::query_mask(std::int32_t*) { throw UnavailableError("masks of ranks: not on GPUs in this version"); }
void CudaBuffer::clean_mask() { throw UnavailableError("masks of ranks: not on GPUs in this version"); }

Tensor CudaBuffer::empty(DType dtype, const std::vector<std::int64_t>& shape) {
  const auto lock = lock_call();
  return device_tensor(dtype, shape, current_stream());
}

Tensor CudaBuffer::local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) {
  const auto lock = lock_call();
  const std::int64_t capacity = check_scratch_range(offset, num_bytes, use_rdma_buffer);
  const std::lock_guard<std::mutex> scratch_lock(scratch_mutex_);
  Tensor& scratch = scratch_[use_rdma_buffer ? 1 : 0];
  if (!scratch.owner) scratch = device_tensor(DType::kUInt8, {capacity > 0 ? capacity : 1}, current_stream());
  Tensor view;
  view.view = TensorView::contiguous(scratch.as<char>() + offset, DType::kUInt8, {num_bytes});
  view.view.device = world_->device();
  view.owner = scratch.owner;
  return view;
}

MemoryStats CudaBuffer::memory_stats() {
  check_process();
  const std::lock_guard<std::mutex> lock(call_mutex_);
  if (destroyed_) throw DestroyedError("this Buffer has been destroyed");
  return world_->heap().stats();
}

void CudaBuffer::refuse(const std::string& call, const std::string& reason) {
  const auto lock = lock_call();
  layout::CallSignature signature;
  signature.kind = call_kind(call);
  kernels::post_refusal(world_->domain(), signature, reason, world_->comm_stream());
}

void CudaBuffer::record_stream(const TensorView& tensor, void* stream) {
  const auto lock = lock_call();
  check_device("t", tensor, world_->device());
  if (tensor.numel() > 0 && !world_->heap().record_stream(tensor.data, stream))
    throw_value("t", tensor.describe(), "a tensor that this Buffer has handed out");
}

void CudaBuffer::check() { const auto lock = lock_call(); }

void CudaBuffer::reset() {
  check_process();
  const std::lock_guard<std::mutex> lock(call_mutex_);
  if (destroyed_) throw DestroyedError("this Buffer has been destroyed");
  throw UnavailableError("reset: not on GPUs in this version; destroy() the Buffer on all ranks and make a new one");
}

void CudaBuffer::destroy() {
  if (forks != fork_count()) {
    new std::shared_ptr<DeviceWorld>(std::move(world_));  // the parent's; its driver state is useless here
    return;
  }
  const std::lock_guard<std::mutex> lock(call_mutex_);
  if (destroyed_.exchange(true)) return;
  scratch_[0] = {};
  scratch_[1] = {};
  if (world_) world_->depart();
  world_.reset();
}

std::shared_ptr<Buffer::Impl> make_buffer(const Bootstrap& bootstrap, const BufferOptions& options) {
  if (!cuda_transport_compiled())
    throw UnavailableError(
        "device: Buffers on GPUs are not finished in this version; use the CPU (device='cpu'). DEEP_MOE_CUDA_PREVIEW=1 "
        "allows them for work on deep_moe itself");
  return std::make_shared<CudaBuffer>(bootstrap, options);
}

}  // namespace deep_moe::cuda

namespace deep_moe {
// Until the GPU Buffer passes its tests it has to be asked for by name.
bool cuda_transport_compiled() {
  const char* preview = std::getenv("DEEP_MOE_CUDA_PREVIEW");
  return preview != nullptr && std::strcmp(preview, "1") == 0;
}
}  // namespace deep_moe
