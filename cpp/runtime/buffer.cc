#include <sys/mman.h>

#include <algorithm>
#include <cstring>

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
  domain = std::make_shared<Domain>(bootstrap, options);
  pool = std::make_unique<cpu::WorkerPool>(cpu::default_num_threads(num_ranks));
}

Buffer::Impl::~Impl() { destroy(); }

void Buffer::Impl::check_process() const {
  if (forks != fork_count())
    throw ForkedProcessError(
        "this Buffer was made in a parent process; a forked child cannot use it: make the Buffer after the fork");
}

void Buffer::Impl::check_usable() const {
  check_process();
  if (destroyed) throw DestroyedError("this Buffer has been destroyed");
}

std::unique_lock<std::mutex> Buffer::Impl::lock_call() {
  check_process();
  std::unique_lock<std::mutex> lock(call_mutex);
  if (destroyed) throw DestroyedError("this Buffer has been destroyed");
  domain->check_failed();
  return lock;
}

template <typename Body>
auto Buffer::Impl::guarded(const Body& body) {
  try {
    return body();
  } catch (const ArgumentError&) {
    throw;
  } catch (const PeerRefusedError&) {
    throw;
  } catch (const CallMismatchError&) {
    throw;
  } catch (const BufferTooSmallError&) {
    throw;
  } catch (...) {
    domain->fail(std::current_exception());
    throw;
  }
}

template <typename Check, typename Body>
auto Buffer::Impl::run(const layout::CallSignature& signature, const Check& check, const Body& body) {
  try {
    check();
  } catch (const std::exception& error) {
    domain->announce_refusal(signature, error.what());
    cpu::skip_call(*domain, low_latency);
    throw;
  }
  try {
    return guarded(body);
  } catch (...) {
    if (!domain->failed()) cpu::skip_call(*domain, low_latency);
    throw;
  }
}

cpu::LowLatencyContext Buffer::Impl::low_latency_context() {
  auto self = shared_from_this();
  cpu::LowLatencyContext result{
      context(),
      low_latency,
      [self, born = generation]() -> std::shared_ptr<void> {
        auto lock = std::make_shared<std::unique_lock<std::mutex>>(self->lock_call());
        if (self->generation != born)
          throw Error("this hook belongs to a call from before reset(): what it waited for is gone");
        return lock;
      },
      [self](const std::function<void()>& body) { self->guarded(body); },
  };
  return result;
}

void Buffer::Impl::destroy() {
  if (forks != fork_count()) {
    // A child's copy: locks may be held by threads that do not exist here, and the peers are the parent's.
    (void)pool.release();
    new std::shared_ptr<Domain>(std::move(domain));
    return;
  }
  const std::lock_guard<std::mutex> lock(call_mutex);
  if (destroyed.exchange(true)) return;
  if (domain) domain->depart();
  pool.reset();
  domain.reset();
}

Buffer::Buffer(const Bootstrap& bootstrap, const BufferOptions& options)
    : impl_(std::make_shared<Impl>(bootstrap, options)) {
  if (options.low_latency_mode) {
    const auto lock = impl_->lock_call();
    cpu::initialise(impl_->low_latency_context());
  }
}

Buffer::~Buffer() { impl_->destroy(); }

int Buffer::rank() const { return impl_->rank; }
int Buffer::num_ranks() const { return impl_->num_ranks; }
const BufferOptions& Buffer::options() const { return impl_->options; }

LayoutResult Buffer::get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts) {
  impl_->check_usable();
  check_topk_idx_shape(topk_idx, num_experts);
  check_topk_ids(topk_idx, num_experts);
  return cpu::dispatch_layout(topk_idx, num_experts, impl_->num_ranks);
}

DispatchResult Buffer::dispatch(const DispatchArgs& args) {
  const auto lock = impl_->lock_call();
  return impl_->run(
      signature(args), [&] { validate(args, impl_->num_ranks); },
      [&] { return cpu::dispatch(impl_->context(), args); });
}

CombineResult Buffer::combine(const CombineArgs& args) {
  const auto lock = impl_->lock_call();
  return impl_->run(
      signature(args), [&] { validate(args, impl_->num_ranks); }, [&] { return cpu::combine(impl_->context(), args); });
}

LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArgs& args) {
  const auto lock = impl_->lock_call();
  return impl_->run(
      cpu::signature(args), [&] { cpu::validate(*impl_->domain, impl_->low_latency, args); },
      [&] { return cpu::low_latency_dispatch(impl_->low_latency_context(), args); });
}

LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArgs& args) {
  const auto lock = impl_->lock_call();
  return impl_->run(
      cpu::signature(args), [&] { cpu::validate(*impl_->domain, impl_->low_latency, args); },
      [&] { return cpu::low_latency_combine(impl_->low_latency_context(), args); });
}

void Buffer::clean_low_latency_buffer(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden,
                                      std::int64_t num_experts) {
  // Nothing to clean: every word of the staging is tagged with its call.
  const auto lock = impl_->lock_call();
  low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, impl_->num_ranks, num_experts);
}

namespace {

void check_shrink(const BufferOptions& options, const char* call) {
  if (!options.enable_shrink)
    throw ArgumentError(std::string(call) + ": this Buffer was made with enable_shrink=False, which has no masks");
}

}  // namespace

void Buffer::Impl::unmask() {
  // Collective, whatever this rank's own mask says: the rank that others have masked may have masked nobody.
  guarded([&] { domain->reset(true); });
  restart_low_latency();
}

void Buffer::update_mask(int rank, bool masked) {
  const auto lock = impl_->lock_call();
  check_shrink(impl_->options, "low_latency_update_mask_buffer");
  if (rank < 0 || rank >= impl_->num_ranks || rank == impl_->rank)
    throw_value("rank", std::to_string(rank), "another rank, 0 to " + std::to_string(impl_->num_ranks - 1));
  if (masked) {
    impl_->domain->set_masked(rank, true);
  } else {
    impl_->unmask();
  }
}

void Buffer::query_mask(std::int32_t* status) const {
  const auto lock = impl_->lock_call();
  check_shrink(impl_->options, "low_latency_query_mask_buffer");
  for (int peer = 0; peer < impl_->num_ranks; ++peer) status[peer] = impl_->domain->masked(peer) ? 1 : 0;
}

void Buffer::clean_mask() {
  const auto lock = impl_->lock_call();
  check_shrink(impl_->options, "low_latency_clean_mask_buffer");
  impl_->unmask();
}

Tensor Buffer::empty(DType dtype, const std::vector<std::int64_t>& shape) {
  const auto lock = impl_->lock_call();
  if (shape.empty() || shape.size() > kMaxTensorDims)
    throw_value("shape", std::to_string(shape.size()) + " dimensions", "1 to " + std::to_string(kMaxTensorDims));
  if (dtype == DType::kNone) throw_type("dtype", "none", "a dtype");
  Tensor tensor;
  tensor.view.dtype = dtype;
  tensor.view.num_dims = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = tensor.view.num_dims - 1; i >= 0; --i) {
    if (shape[static_cast<std::size_t>(i)] < 0)
      throw_value("shape", "a dimension of " + std::to_string(shape[static_cast<std::size_t>(i)]), ">= 0");
    tensor.view.shape[i] = shape[static_cast<std::size_t>(i)];
    tensor.view.stride[i] = stride;
    stride *= tensor.view.shape[i];
  }
  std::string reason;
  const Block block = impl_->domain->heap().allocate_or_grow(tensor.view.num_bytes(), &reason);
  if (!block)
    throw BufferTooSmallError("empty: " + std::to_string(tensor.view.num_bytes()) + " bytes of heap needed: " + reason);
  tensor.view.data = block.ptr;
  tensor.owner = impl_->domain->heap().own(block);
  return tensor;
}

Tensor Buffer::local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) {
  impl_->check_usable();
  const std::int64_t capacity = use_rdma_buffer ? impl_->options.num_rdma_bytes : impl_->options.num_nvl_bytes;
  if (offset < 0 || num_bytes < 0 || offset > capacity || num_bytes > capacity - offset)
    throw_value("size", std::to_string(num_bytes) + " bytes at offset " + std::to_string(offset),
                "what fits in the " + std::to_string(capacity) + " bytes given as " +
                    (use_rdma_buffer ? "num_rdma_bytes" : "num_nvl_bytes"));
  const std::lock_guard<std::mutex> lock(impl_->scratch_mutex);
  Tensor& scratch = impl_->scratch[use_rdma_buffer ? 1 : 0];
  if (!scratch.owner) {
    const std::size_t bytes = static_cast<std::size_t>(std::max<std::int64_t>(capacity, 1));
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw Error("cannot map " + std::to_string(bytes) + " bytes of scratch memory");
    scratch.owner = std::shared_ptr<void>(base, [bytes](void* memory) { ::munmap(memory, bytes); });
  }
  Tensor view;
  view.view = TensorView::contiguous(static_cast<char*>(scratch.owner.get()) + offset, DType::kUInt8, {num_bytes});
  view.owner = scratch.owner;
  return view;
}

MemoryStats Buffer::memory_stats() const {
  impl_->check_process();
  const std::lock_guard<std::mutex> lock(impl_->call_mutex);
  if (impl_->destroyed) throw DestroyedError("this Buffer has been destroyed");
  MemoryStats stats = impl_->domain->heap().stats();
  stats.ll_staging_bytes = impl_->low_latency.staging_bytes;
  return stats;
}

void Buffer::refuse(const std::string& call, const std::string& reason) {
  const auto lock = impl_->lock_call();
  layout::CallSignature signature;
  using layout::CallKind;
  for (const auto kind : {CallKind::kDispatch, CallKind::kCachedDispatch, CallKind::kCombine,
                          CallKind::kLowLatencyDispatch, CallKind::kLowLatencyCombine}) {
    if (call == call_name(static_cast<std::uint32_t>(kind))) signature.kind = static_cast<std::uint32_t>(kind);
  }
  impl_->domain->announce_refusal(signature, reason);
  cpu::skip_call(*impl_->domain, impl_->low_latency);
}

void Buffer::check() { const auto lock = impl_->lock_call(); }

void Buffer::Impl::restart_low_latency() {
  ++generation;
  low_latency.restart();
}

void Buffer::reset() {
  impl_->check_process();
  const std::lock_guard<std::mutex> lock(impl_->call_mutex);
  if (impl_->destroyed) throw DestroyedError("this Buffer has been destroyed");
  impl_->domain->reset(false);
  impl_->restart_low_latency();
}

void Buffer::destroy() { impl_->destroy(); }

DispatchHandle OwnedDispatchHandle::view() const {
  return {rank_prefix_matrix.view, recv_src_idx.view, is_token_in_rank.view, send_index.view, meta.view};
}

LowLatencyHandle OwnedLowLatencyHandle::view() const {
  return {src_info.view, layout_range.view, recv_pos.view, recv_weights.view, meta.view};
}

}  // namespace deep_moe
