#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/cpu_buffer.hpp"
#include "cpu/expert_major.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cpu {

CpuBuffer::CpuBuffer(const Bootstrap& bootstrap, const BufferOptions& options_)
    : Buffer::Impl(bootstrap, options_), gate_([this] { release(); }) {
  BufferOptions inner = options;
  inner.interrupt_check = [this] {
    if (!gate_.destroy_wanted() && options.interrupt_check) options.interrupt_check();
    gate_.check_interrupt();
  };
  const auto start_threads = [this] { pool_ = std::make_unique<WorkerPool>(default_num_threads(num_ranks)); };
  domain_ = std::make_shared<Domain>(bootstrap, inner, start_threads);
  num_nodes = domain_->topology().num_nodes();
  node = domain_->topology().node_of(rank);
  if (num_nodes > 1) rails_ = std::make_unique<Rails>(*domain_);
}

CpuBuffer::~CpuBuffer() { destroy(); }

void CpuBuffer::start() {
  if (!options.low_latency_mode) return;
  const ReadyLock lock(*this);
  initialise(low_latency_context());
}

void CpuBuffer::check_usable() const {
  check_process();
  gate_.check_usable();
}

CallGate& CpuBuffer::open_gate() {
  check_process();
  return gate_;
}

std::shared_ptr<Domain> CpuBuffer::usable_domain() const {
  check_process();
  const std::lock_guard<std::mutex> lock(domain_mutex_);
  gate_.check_usable();
  return domain_;
}

CpuBuffer::ReadyLock::ReadyLock(CpuBuffer& buffer) : pass(buffer.open_gate()) { buffer.domain_->check_failed(); }

void CpuBuffer::check_unmasked(const char* call) const {
  if (domain_->any_masked())
    throw Error(std::string(call) +
                ": some rank is masked, and high-throughput calls need all ranks; unmask with "
                "low_latency_clean_mask_buffer() on all ranks first");
}

template <typename Body>
auto CpuBuffer::guarded(const Body& body) {
  return run_guarded(body, [&] { domain_->fail(std::current_exception()); });
}

template <typename Check, typename Body>
auto CpuBuffer::run(const layout::CallSignature& signature, const Check& checks, const Body& body) {
  try {
    checks();
  } catch (const std::exception& error) {
    domain_->announce_refusal(signature, error.what());
    skip_call(*domain_, low_latency_);
    throw;
  }
  try {
    return guarded(body);
  } catch (...) {
    if (!domain_->failed()) skip_call(*domain_, low_latency_);
    throw;
  }
}

LowLatencyContext CpuBuffer::low_latency_context() {
  auto self = shared_from_this();
  LowLatencyContext result{
      context(),
      low_latency_,
      [self, born = generation_]() -> std::shared_ptr<void> {
        auto lock = std::make_shared<ReadyLock>(*self);
        if (self->generation_ != born)
          throw Error("this hook belongs to a call from before reset(): what it waited for is gone");
        return lock;
      },
      [self](const std::function<void()>& body) { self->guarded(body); },
  };
  return result;
}

void CpuBuffer::destroy() {
  if (forks != fork_count()) {
    // A child's copy: locks may be held by threads that do not exist here, and the peers are the parent's.
    (void)pool_.release();
    (void)rails_.release();
    new std::shared_ptr<Domain>(std::move(domain_));
    return;
  }
  gate_.destroy();
}

void CpuBuffer::release() noexcept {
  std::shared_ptr<Domain> domain;
  {
    const std::lock_guard<std::mutex> lock(domain_mutex_);
    domain.swap(domain_);
  }
  if (rails_) rails_->quiet();  // else word of the departure may come before what peers still wait for
  if (domain) domain->depart();
  pool_.reset();
  rails_.reset();
}

LayoutResult CpuBuffer::get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                            const StreamOptions&) {
  check_usable();
  check_topk_idx_shape(topk_idx, num_experts);
  check_topk_ids(topk_idx, num_experts);
  return dispatch_layout(topk_idx, num_experts, usable_domain()->topology());
}

DispatchResult CpuBuffer::dispatch(const DispatchArgs& args) {
  const ReadyLock lock(*this);
  return run(
      signature(args),
      [&] {
        check_unmasked("dispatch");
        validate(args, num_ranks, true, num_nodes);
      },
      [&] {
        const bool expert_major = args.handle != nullptr ? is_expert_major(*args.handle) : args.expert_major;
        DispatchResult received = cpu::dispatch(context(), args);
        return expert_major ? group_by_expert(context(), args, std::move(received)) : received;
      });
}

CombineResult CpuBuffer::combine(const CombineArgs& args) {
  const ReadyLock lock(*this);
  return run(
      signature(args),
      [&] {
        check_unmasked("combine");
        validate(args, num_ranks, num_nodes);
      },
      [&] {
        if (!is_expert_major(args.handle)) return cpu::combine(context(), args);
        std::vector<Tensor> kept;
        return cpu::combine(context(), sum_by_row(context(), args, &kept));
      });
}

LowLatencyDispatchResult CpuBuffer::low_latency_dispatch(const LowLatencyDispatchArgs& args) {
  const ReadyLock lock(*this);
  return run(
      signature(args), [&] { cpu::validate(*domain_, low_latency_, args); },
      [&] { return cpu::low_latency_dispatch(low_latency_context(), args); });
}

LowLatencyCombineResult CpuBuffer::low_latency_combine(const LowLatencyCombineArgs& args) {
  const ReadyLock lock(*this);
  return run(
      signature(args), [&] { cpu::validate(*domain_, low_latency_, args); },
      [&] { return cpu::low_latency_combine(low_latency_context(), args); });
}

void CpuBuffer::clean_low_latency_buffer(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden,
                                         std::int64_t num_experts) {
  // Nothing to clean: every word of the staging is tagged with its call.
  const ReadyLock lock(*this);
  low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts);
}

void CpuBuffer::check_shrink(const char* call) const {
  if (!options.enable_shrink)
    throw ArgumentError(std::string(call) + ": this Buffer was made with enable_shrink=False, which has no masks");
}

void CpuBuffer::unmask() {
  // Collective, whatever this rank's own mask says: the rank that others have masked may have masked nobody.
  guarded([&] { start_over(true); });
}

void CpuBuffer::update_mask(int peer, bool masked) {
  const ReadyLock lock(*this);
  check_shrink("low_latency_update_mask_buffer");
  if (peer < 0 || peer >= num_ranks || peer == rank)
    throw_value("rank", std::to_string(peer), "another rank, 0 to " + std::to_string(num_ranks - 1));
  if (masked) {
    domain_->set_masked(peer, true);
  } else {
    unmask();
  }
}

void CpuBuffer::query_mask(std::int32_t* status) {
  const ReadyLock lock(*this);
  check_shrink("low_latency_query_mask_buffer");
  for (int peer = 0; peer < num_ranks; ++peer) status[peer] = domain_->masked(peer) ? 1 : 0;
}

void CpuBuffer::clean_mask() {
  const ReadyLock lock(*this);
  check_shrink("low_latency_clean_mask_buffer");
  unmask();
}

Tensor CpuBuffer::empty(DType dtype, const std::vector<std::int64_t>& shape) {
  const std::shared_ptr<Domain> domain = usable_domain();
  Tensor tensor;
  tensor.view = checked_shape(dtype, shape);
  std::string reason;
  const Block block = domain->heap().allocate_or_grow(tensor.view.num_bytes(), &reason);
  if (!block)
    throw BufferTooSmallError("empty: " + std::to_string(tensor.view.num_bytes()) + " bytes of heap needed: " + reason);
  tensor.view.data = block.ptr;
  tensor.owner = domain->heap().own(block);
  return tensor;
}

Tensor CpuBuffer::local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) {
  check_usable();
  const std::int64_t capacity = check_scratch_range(offset, num_bytes, use_rdma_buffer);
  const std::lock_guard<std::mutex> lock(scratch_mutex_);
  Tensor& scratch = scratch_[use_rdma_buffer ? 1 : 0];
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

MemoryStats CpuBuffer::memory_stats() {
  MemoryStats stats = usable_domain()->heap().stats();
  stats.ll_staging_bytes = low_latency_.staging_bytes;
  return stats;
}

void CpuBuffer::refuse(const std::string& call, const std::string& reason) {
  const ReadyLock lock(*this);
  layout::CallSignature signature;
  signature.kind = call_kind(call);
  domain_->announce_refusal(signature, reason);
  skip_call(*domain_, low_latency_);
}

void CpuBuffer::check() { usable_domain()->check_failed(); }

void CpuBuffer::start_over(bool unmask) {
  if (rails_) rails_->quiet();
  domain_->reset(unmask);
  ++generation_;
  if (rails_) rails_->restart();
  low_latency_.restart();
}

void CpuBuffer::reset() {
  const CallGate::Pass pass(open_gate());
  start_over(false);
}

}  // namespace deep_moe::cpu
