#include "cuda/cuda_buffer.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cuda/cuda_call.hpp"
#include "layout/experts.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cuda {

CudaBuffer::CudaBuffer(const Bootstrap& bootstrap, const BufferOptions& options_)
    : Buffer::Impl(bootstrap, options_), gate_([this] { release(); }) {
  DeviceWorldOptions world;
  world.device = options.device;
  world.heap_bytes = static_cast<std::size_t>(options.num_nvl_bytes);
  if (options.use_fabric) world.memory = MemoryKind::kFabric;
  world.network_bytes = static_cast<std::size_t>(options.num_rdma_bytes);
  if (options.low_latency_mode) world.low_latency_bytes = world.network_bytes;
  world.timeout_seconds = options.timeout_seconds;
  world.interrupt_check = [this] {
    if (!gate_.destroy_wanted() && options.interrupt_check) options.interrupt_check();
    gate_.check_interrupt();
  };
  world.current_stream = options.current_stream;
  const char* check = std::getenv("DEEP_MOE_CHECK");
  check_ids_ = check != nullptr && std::strcmp(check, "1") == 0;
  world_ = make_device_world(bootstrap, world);
  comm_stream_ = world_->comm_stream();
  if (const Nodes* nodes = world_->nodes()) {
    num_nodes = nodes->topology().num_nodes();
    node = nodes->topology().node_of(rank);
  }
  most_blocks_ = world_->most_blocks();
  const OnDevice on_device(world_->device());
  order_ = std::make_unique<CallOrder>();
  low_latency_ = std::make_unique<LowLatency>(
      *world_, LowLatency::Options{options.num_rdma_bytes, options.enable_shrink, options.current_stream},
      [this](const layout::CallSignature& call, const std::string& reason) { post_refusal(call, reason); });
}

CudaBuffer::~CudaBuffer() { destroy(); }

CallGate& CudaBuffer::open_gate() {
  check_process();
  return gate_;
}

CudaBuffer::Call::Call(CudaBuffer& buffer) : pass(buffer.open_gate()), on_device(buffer.world_->device()) {
  if (buffer.failure_) std::rethrow_exception(buffer.failure_);
  buffer.world_->check_attendant();
}

Stream CudaBuffer::current_stream() const { return options.current_stream ? options.current_stream() : nullptr; }

bool CudaBuffer::is_captured() const { return capture_of(comm_stream_).active || capture_of(current_stream()).active; }

CallStreams CudaBuffer::join_streams(const StreamOptions& stream_options) {
  world_->heap().note_comm_work();
  const std::uint64_t num_drops = world_->heap().num_drops();  // other threads may drop more behind the join
  CallStreams streams(*order_, comm_stream_, current_stream(), stream_options);
  low_latency_->before_other_call(streams.work());
  if (capture_of(comm_stream_).active) {
    has_captured_ = true;
    world_->heap().retain_in_capture(comm_stream_);
  }
  if (stream_options.previous_event == nullptr) world_->heap().free_behind(streams.caller(), streams.work(), num_drops);
  return streams;
}

void* CudaBuffer::comm_stream() const {
  check_process();
  gate_.check_usable();
  return comm_stream_;
}

void CudaBuffer::take_kernel_error() {
  using layout::KernelErrorKind;
  if (late_error_) std::rethrow_exception(std::exchange(late_error_, nullptr));
  // Between nodes, high-throughput calls have words of their own.
  struct Source {
    const kernels::DeviceDomain& domain;
    char* host;
    bool between_nodes;
  };
  const Nodes* const nodes = world_->nodes();
  const Source of_ranks{world_->domain(), world_->host_words(), false};
  const Source of_rows{rows_domain(), rows_host_words(), nodes != nullptr};
  const auto record = [&](const Source& source, bool failure) -> layout::ErrorRecord& {
    return source.domain.host_words.error(source.host, failure);
  };
  const auto kind_of = [&](const Source& source, bool failure) {
    return static_cast<KernelErrorKind>(
        std::atomic_ref<std::uint32_t>(record(source, failure).kind).load(std::memory_order_acquire));
  };
  // What does not fail the Buffer first: it may be why a peer did not come. The next call finds the failure.
  const bool failure =
      kind_of(of_rows, false) == KernelErrorKind::kNone && kind_of(of_ranks, false) == KernelErrorKind::kNone;
  const Source& source = kind_of(of_rows, failure) != KernelErrorKind::kNone ? of_rows : of_ranks;
  const KernelErrorKind kind = kind_of(source, failure);
  if (kind == KernelErrorKind::kNone) return;
  const layout::ErrorRecord seen = record(source, failure);
  const int blamed = source.between_nodes ? nodes->blamed(seen) : seen.peer;
  const std::string me = "rank " + std::to_string(rank), peer = "rank " + std::to_string(blamed),
                    call = " (call " + std::to_string(seen.epoch) + ")",
                    phase = layout::wait_phase_name(static_cast<layout::WaitPhase>(seen.phase));
  if (!failure) order_->note_comm_work();
  if (!failure) kernels::clear_error(source.domain, source.host, comm_stream_, false);
  try {
    switch (kind) {
      case KernelErrorKind::kTimeout:
        throw TimeoutError(me + " waited " + std::to_string(options.timeout_seconds) + " s for " + peer + " in " +
                           phase + call + ": expected " + std::to_string(seen.expected) + ", saw " +
                           std::to_string(seen.seen));
      case KernelErrorKind::kPeerLost: {
        std::string how = "is gone";
        world_->peer_gone(blamed, &how);
        throw PeerLostError(peer + " " + how + " while " + me + " waited for it in " + phase + call);
      }
      case KernelErrorKind::kUnknownSegment:
        throw Error(peer + " named its segment " + std::to_string(seen.seen) + call + ", which " + me +
                    " has not mapped");
      case KernelErrorKind::kTooFewRows:
        throw ArgumentError("num_worst_tokens: " + peer + " allows " + std::to_string(seen.expected) + " rows and " +
                            std::to_string(seen.seen) + " arrive there" + call + "; nothing was sent");
      case KernelErrorKind::kPeerRefused:
        throw PeerRefusedError(peer + " refused its " + call_name(seen.peer_signature.kind) + call + ": " +
                               std::string(seen.reason, seen.num_reason_bytes));
      default:
        throw CallMismatchError("the ranks did not make the same call" + call + ": rank " + std::to_string(rank) +
                                " called " + describe_signature(last_signature_) + ", " + peer + " called " +
                                describe_signature(seen.peer_signature));
    }
  } catch (...) {
    if (failure) failure_ = std::current_exception();
    throw;
  }
}

void CudaBuffer::post_refusal(const layout::CallSignature& signature, const std::string& reason) {
  low_latency_->before_other_call(comm_stream_);
  order_->note_comm_work();
  using layout::CallKind;
  const auto kind = static_cast<CallKind>(signature.kind);
  const bool low_latency = kind == CallKind::kLowLatencyDispatch || kind == CallKind::kLowLatencyCombine;
  if (world_->nodes() != nullptr && !low_latency) return refuse_between(signature, reason, comm_stream_);
  if (low_latency && low_latency_->is_direct()) return low_latency_->refuse(signature, reason, comm_stream_);
  kernels::post_refusal(world_->domain(), signature, reason, comm_stream_);
}

template <typename Check, typename Body>
auto CudaBuffer::run(const layout::CallSignature& signature, const Check& checks, const Body& body) {
  const Call call(*this);
  ++num_calls_;
  try {
    take_kernel_error();
    checks();
  } catch (const std::exception& error) {
    // An earlier call's error comes up in place of this one, for which the peers would wait.
    if (!failure_) post_refusal(signature, error.what());
    throw;
  }
  last_signature_ = signature;
  return run_guarded(body, [&] {
    if (!failure_) failure_ = std::current_exception();
  });
}

// Of one rank.
void CudaBuffer::check_grouped_experts(std::int64_t num_experts) const {
  const int most = layout::ExpertBlocks(static_cast<int>(num_experts), num_ranks).max_local_experts();
  if (most > kernels::kMaxGroupedExperts)
    throw_value("expert_major", "True where a rank has " + std::to_string(most) + " experts",
                "at most " + std::to_string(kernels::kMaxGroupedExperts) + " on a GPU");
}

DispatchResult CudaBuffer::dispatch(const DispatchArgs& args) {
  const layout::CallSignature call = signature(args);
  return run(
      call,
      [&] {
        for (const auto& [name, view] :
             {std::pair("x", &args.x.data), std::pair("x[1] (scales)", &args.x.scales),
              std::pair("topk_idx", &args.topk_idx), std::pair("topk_weights", &args.topk_weights),
              std::pair("is_token_in_rank", &args.is_token_in_rank),
              std::pair("num_tokens_per_expert", &args.num_tokens_per_expert)})
          check_device(name, *view, world_->device());
        check_unmasked("dispatch");
        validate(args, num_ranks, false, num_nodes);
        if (args.expert_major) check_grouped_experts(args.num_experts);
        if (args.handle == nullptr && args.num_worst_tokens == 0 && is_captured())
          throw_value("num_worst_tokens", "0 while the stream is captured into a graph",
                      "the number of rows of the results: a graph tells the host no counts");
        if (check_ids_ && args.topk_idx.defined()) check_device_ids(args.topk_idx, args.num_experts, args.streams);
      },
      [&] { return dispatch_rows(call, args); });
}

CombineResult CudaBuffer::combine(const CombineArgs& args) {
  const layout::CallSignature call = signature(args);
  return run(
      call,
      [&] {
        for (const auto& [name, view] :
             {std::pair("x", &args.x), std::pair("topk_weights", &args.topk_weights), std::pair("bias", &args.bias0),
              std::pair("bias", &args.bias1), std::pair("out", &args.out), std::pair("row_weights", &args.row_weights)})
          check_device(name, *view, world_->device());
        check_unmasked("combine");
        validate(args, num_ranks, num_nodes);
      },
      [&] { return combine_rows(call, args); });
}

const kernels::DeviceDomain& CudaBuffer::rows_domain() const {
  return world_->nodes() != nullptr ? world_->nodes()->domain() : world_->domain();
}

char* CudaBuffer::rows_host_words() const {
  return world_->nodes() != nullptr ? world_->nodes()->host_words() : world_->host_words();
}

Tensor CudaBuffer::device_tensor(DType dtype, const std::vector<std::int64_t>& shape, Stream first_user, Stream user) {
  Tensor tensor;
  tensor.view = checked_shape(dtype, shape);
  tensor.view.device = world_->device();
  std::string reason;
  const Block block = world_->allocate_or_grow(tensor.view.num_bytes(), first_user, &reason);
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
  const Call call(*this);
  check_device("topk_idx", topk_idx, world_->device());
  check_topk_idx_shape(topk_idx, num_experts);
  CallStreams joined = join_streams(streams);
  LayoutResult result;
  result.num_tokens_per_rank = device_tensor(DType::kInt32, {num_ranks}, joined.work(), joined.caller());
  result.num_tokens_per_expert = device_tensor(DType::kInt32, {num_experts}, joined.work(), joined.caller());
  result.is_token_in_rank = device_tensor(DType::kBool, {topk_idx.shape[0], num_ranks}, joined.work(), joined.caller());
  kernels::LayoutArgs args;
  args.ids = ids_of(topk_idx);
  args.num_experts = static_cast<int>(num_experts);
  args.num_tokens_per_rank = result.num_tokens_per_rank.as<std::int32_t>();
  args.num_tokens_per_expert = result.num_tokens_per_expert.as<std::int32_t>();
  args.is_token_in_rank = result.is_token_in_rank.as<bool>();
  kernels::get_dispatch_layout(world_->domain(), args, joined.work());
  if (const Nodes* nodes = world_->nodes()) {
    result.num_tokens_per_rdma_rank = device_tensor(DType::kInt32, {num_nodes}, joined.work(), joined.caller());
    nodes->count_nodes(args.is_token_in_rank, topk_idx.shape[0], result.num_tokens_per_rdma_rank.as<std::int32_t>(),
                       joined.work());
  }
  joined.finish();
  return result;
}

Tensor CudaBuffer::empty(DType dtype, const std::vector<std::int64_t>& shape) {
  const Call call(*this);
  const Stream user = current_stream();
  return device_tensor(dtype, shape, user, user);
}

Tensor CudaBuffer::local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) {
  const Call call(*this);
  const std::int64_t capacity = check_scratch_range(offset, num_bytes, use_rdma_buffer);
  const std::lock_guard<std::mutex> scratch_lock(scratch_mutex_);
  Tensor& scratch = scratch_[use_rdma_buffer ? 1 : 0];
  if (!scratch.owner) {
    const Stream user = current_stream();
    scratch = device_tensor(DType::kUInt8, {capacity > 0 ? capacity : 1}, user, user);
  }
  Tensor view;
  view.view = TensorView::contiguous(scratch.as<char>() + offset, DType::kUInt8, {num_bytes});
  view.view.device = world_->device();
  view.owner = scratch.owner;
  return view;
}

MemoryStats CudaBuffer::memory_stats() {
  const CallGate::Pass pass(open_gate());
  MemoryStats stats = world_->heap().stats();
  stats.ll_staging_bytes = low_latency_->staging_bytes();
  return stats;
}

std::string CudaBuffer::memory_kind() {
  const CallGate::Pass pass(open_gate());
  return memory_kind_name(world_->memory_kind());
}

void CudaBuffer::refuse(const std::string& call_name, const std::string& reason) {
  const Call call(*this);
  ++num_calls_;
  layout::CallSignature signature;
  signature.kind = call_kind(call_name);
  post_refusal(signature, reason);
}

void CudaBuffer::record_stream(const TensorView& tensor, void* stream) {
  const CallGate::Pass pass(open_gate());
  check_device("tensor", tensor, world_->device());
  if (tensor.numel() > 0 && !world_->heap().record_stream(tensor.data, stream) &&
      !spills_.record_stream(tensor.data, stream))
    throw_value("tensor", tensor.describe(), "a tensor that this Buffer has handed out");
}

void CudaBuffer::check() {
  const Call call(*this);
  take_kernel_error();
}

void CudaBuffer::reset() { reset_state(false); }

void CudaBuffer::reset_state(bool behind_calls) {
  const CallGate::Pass pass(open_gate());
  const OnDevice on_device(world_->device());
  try {
    low_latency_->before_other_call(comm_stream_);  // the comm stream's end is waited for
    order_->note_comm_work();
    if (behind_calls && !failure_) world_->wait_idle("low_latency_clean_mask_buffer: the calls before it");
    world_->reset();
    low_latency_->restart();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();  // the kernels of this rank have been told to leave
    throw;
  }
  world_->heap().release_quarantine();
  num_calls_ = 0;
  late_error_ = nullptr;
  failure_ = nullptr;
}

std::string CudaBuffer::failure_text() const noexcept {
  try {
    if (failure_) std::rethrow_exception(failure_);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
  }
  return {};
}

void CudaBuffer::destroy() {
  if (forks != fork_count()) {
    new std::shared_ptr<DeviceWorld>(std::move(world_));  // the parent's; its driver state is useless here
    (void)order_.release();
    (void)low_latency_.release();
    return;
  }
  gate_.destroy();
}

void CudaBuffer::release() noexcept {
  scratch_[0] = {};
  scratch_[1] = {};
  if (!world_) return;  // its construction has failed
  const OnDevice on_device = OnDevice::quiet(world_->device());
  if (on_device && low_latency_) low_latency_->depart(comm_stream_);
  if (on_device)
    low_latency_.reset();
  else
    (void)low_latency_.release();
  world_->depart(!has_captured_, failure_text());
  world_.reset();
  if (on_device) {
    order_.reset();
  } else {
    (void)order_.release();
  }
}

std::shared_ptr<Buffer::Impl> make_buffer(const Bootstrap& bootstrap, const BufferOptions& options) {
  return std::make_shared<CudaBuffer>(bootstrap, options);
}

}  // namespace deep_moe::cuda

namespace deep_moe {
bool cuda_transport_compiled() { return true; }
}  // namespace deep_moe
