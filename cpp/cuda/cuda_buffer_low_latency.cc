// The low-latency calls of the GPU Buffer, and masks of ranks.
#include "cuda/cuda_call.hpp"
#include "runtime/validate.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cuda {

template <typename Check, typename Body>
auto CudaBuffer::run_low_latency(const layout::CallSignature& signature, bool async, const Check& checks,
                                 const Body& body) {
  const Call call(*this);
  ++num_calls_;
  try {
    take_kernel_error();
  } catch (...) {
    if (failure_) throw;
    late_error_ = std::current_exception();
  }
  try {
    checks();
  } catch (const std::exception& error) {
    post_refusal(signature, error.what());
    throw;
  }
  last_signature_ = signature;
  const auto made = [&] {
    order_->note_comm_work();  // new staging is cleared there
    const Stream user = current_stream();
    LowLatencyStreams streams{async ? comm_stream_ : user, user};
    streams.captured = capture_of(user).active;
    has_captured_ = has_captured_ || streams.captured;
    if (!async) {
      if (streams.captured) world_->heap().retain_in_capture(user);
      return body(streams);
    }
    world_->heap().note_comm_work();
    CallStreams joined(*order_, comm_stream_, user, {.previous_event = nullptr, .async_finish = true});
    if (streams.captured) world_->heap().retain_in_capture(comm_stream_);
    return body(streams);
  };
  auto result = run_guarded(made, [&] {
    if (!failure_) failure_ = std::current_exception();
  });
  if (late_error_) std::rethrow_exception(std::exchange(late_error_, nullptr));
  return result;
}

LowLatency::Enter CudaBuffer::hook_entry() {
  return [self = shared_from_this()]() -> std::shared_ptr<void> {
    auto call = std::make_shared<Call>(*self);
    self->take_kernel_error();
    return call;
  };
}

LowLatencyDispatchResult CudaBuffer::low_latency_dispatch(const LowLatencyDispatchArgs& args) {
  const layout::CallSignature call = signature(args);
  return run_low_latency(
      call, args.async_finish && !args.return_recv_hook,
      [&] {
        low_latency_->validate(args);
        if (check_ids_) check_device_ids(args.topk_idx, args.num_experts, {});
      },
      [&](const LowLatencyStreams& streams) {
        return low_latency_->dispatch(args, call, num_calls_, streams,
                                      args.return_recv_hook ? hook_entry() : LowLatency::Enter());
      });
}

LowLatencyCombineResult CudaBuffer::low_latency_combine(const LowLatencyCombineArgs& args) {
  const layout::CallSignature call = signature(args);
  return run_low_latency(
      call, args.async_finish && !args.return_recv_hook, [&] { low_latency_->validate(args); },
      [&](const LowLatencyStreams& streams) {
        return low_latency_->combine(args, call, num_calls_, streams,
                                     args.return_recv_hook ? hook_entry() : LowLatency::Enter());
      });
}

void CudaBuffer::clean_low_latency_buffer(std::int64_t max_tokens, std::int64_t hidden, std::int64_t num_experts) {
  const Call call(*this);
  low_latency_size_hint(max_tokens, hidden, num_ranks, num_experts);  // checks the numbers; there is nothing to clean
}

void CudaBuffer::check_shrink(const char* call) const {
  if (!options.enable_shrink)
    throw ArgumentError(std::string(call) + ": this Buffer was made with enable_shrink=False, which has no masks");
}

void CudaBuffer::check_unmasked(const char* call) const {
  if (low_latency_->any_masked())
    throw Error(std::string(call) +
                ": some rank is masked, and high-throughput calls need all ranks; unmask with "
                "low_latency_clean_mask_buffer() on all ranks first");
}

void CudaBuffer::update_mask(int peer, bool masked) {
  check_shrink("low_latency_update_mask_buffer");
  if (peer < 0 || peer >= num_ranks || peer == rank)
    throw_value("rank", std::to_string(peer), "another rank, 0 to " + std::to_string(num_ranks - 1));
  if (!masked) return reset_state(true);
  const Call call(*this);
  order_->note_comm_work();
  low_latency_->mask(peer, current_stream());
}

void CudaBuffer::query_mask(std::int32_t* status) {
  check_shrink("low_latency_query_mask_buffer");
  const Call call(*this);
  low_latency_->query_mask(status, current_stream());
}

void CudaBuffer::clean_mask() {
  check_shrink("low_latency_clean_mask_buffer");
  reset_state(true);
}

}  // namespace deep_moe::cuda
