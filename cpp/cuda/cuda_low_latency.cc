#include "cuda/cuda_low_latency.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "cuda/call_streams.hpp"
#include "cuda/cuda_low_latency_call.hpp"
#include "cuda/driver.hpp"
#include "layout/handle.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/text.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cuda {

using kernels::LowLatencyHalf;

namespace {

constexpr int kFewestBlocks = 3;

cudaStream_t as_cuda(Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

LowLatency::LowLatency(DeviceWorld& world, Options options, Refuse refuse)
    : world_(world), options_(std::move(options)), refuse_(std::move(refuse)) {
  num_blocks_ = std::max(kFewestBlocks, world.most_blocks());
  is_alone_ = world.num_ranks_on_device() == 1;
  cudaEvent_t event;
  check_runtime(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_ = event;
  const auto wishes = world.exchange("constructor/low latency", static_cast<std::uint64_t>(options_.staging_bytes), "");
  for (const DeviceWorld::Said& wish : wishes)
    wanted_slot_bytes_ = std::max(wanted_slot_bytes_, static_cast<std::int64_t>(wish.value) / layout::kLowLatencySlots);
  if (const Nodes* nodes = world.nodes(); nodes != nullptr && nodes->is_direct()) {
    direct_ = nodes;
    const std::string failures =
        grow_staging(static_cast<std::int64_t>(direct_->direct_layout().mates_slot_bytes()), 0, [](int) {});
    if (!failures.empty()) throw BufferTooSmallError("num_rdma_bytes: low-latency memory for node mates" + failures);
    return;
  }
  // Where that fails, on all ranks, the first call asks for what it needs, and says why it cannot have it.
  if (wanted_slot_bytes_ > 0 && !grow_staging(wanted_slot_bytes_, 0, [](int) {}).empty()) wanted_slot_bytes_ = 0;
}

LowLatency::~LowLatency() { cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

std::int64_t LowLatency::staging_bytes() const { return staging_.slot_bytes * layout::kLowLatencySlots; }

void LowLatency::restart() {
  for (Slot& slot : slots_) slot = {};
  ++generation_;
  for (int peer = 0; peer < world_.num_ranks(); ++peer)
    world_.domain().host_words.masked(world_.host_words())[peer] = 0;
  bool same = true;
  for (const DeviceWorld::Said& said :
       world_.exchange("reset/low latency", static_cast<std::uint64_t>(num_growths_), captured_ ? "captured" : "")) {
    same = same && said.value == static_cast<std::uint64_t>(num_growths_);
    captured_ = captured_ || !said.text.empty();
  }
  if (same) return;
  wanted_slot_bytes_ = std::max(wanted_slot_bytes_, staging_.slot_bytes);
  num_growths_ = 0;
  drop_staging();
}

void LowLatency::validate(const LowLatencyDispatchArgs& args) const {
  for (const auto& [name, view] :
       {std::pair("x", &args.x.data), std::pair("x[1] (scales)", &args.x.scales), std::pair("topk_idx", &args.topk_idx),
        std::pair("topk_weights", &args.topk_weights),
        std::pair("cumulative_local_expert_recv_stats", &args.cumulative_local_expert_recv_stats),
        std::pair("dispatch_wait_recv_cost_stats", &args.wait_recv_cost_stats)})
    check_device(name, *view, world_.device());
  deep_moe::validate(args, world_.rank(), world_.num_ranks(), false);
  check_in_flight(num_in_flight(), "low_latency_dispatch");
}

void LowLatency::validate(const LowLatencyCombineArgs& args) const {
  for (const auto& [name, view] :
       {std::pair("x", &args.x), std::pair("topk_idx", &args.topk_idx), std::pair("topk_weights", &args.topk_weights),
        std::pair("handle.recv_pos", &args.handle.recv_pos), std::pair("out", &args.out),
        std::pair("combine_wait_recv_cost_stats", &args.wait_recv_cost_stats)})
    check_device(name, *view, world_.device());
  deep_moe::validate(args, world_.rank(), world_.num_ranks(), false);
  check_in_flight(num_in_flight(), "low_latency_combine");
}

void LowLatency::mask(int peer, Stream stream) {
  go_behind(stream);
  kernels::mask_ranks(world_.domain(), std::uint64_t{1} << peer, stream);
  world_.domain().host_words.masked(world_.host_words())[peer] = 1;
}

void LowLatency::query_mask(std::int32_t* status, Stream stream) {
  go_behind(stream);
  kernels::query_masked(world_.domain(), status, stream);
}

std::uint64_t LowLatency::masked_by_host() const {
  std::uint64_t bits = 0;
  std::uint32_t* const masked = world_.domain().host_words.masked(world_.host_words());
  for (int peer = 0; options_.shrink && peer < world_.num_ranks(); ++peer)
    if (std::atomic_ref<std::uint32_t>(masked[peer]).load(std::memory_order_relaxed) != 0)
      bits |= std::uint64_t{1} << peer;
  return bits;
}

int LowLatency::num_in_flight() const {
  return static_cast<int>(std::count_if(std::begin(slots_), std::end(slots_), [](const Slot& slot) {
    return slot.call && slot.call->launch && !slot.hook.expired();
  }));
}

void LowLatency::receive(InFlight& call, bool with_stats, Stream stream) {
  if (!call.launch) return;
  const Launch half = std::exchange(call.launch, nullptr);
  half(LowLatencyHalf::kReceive, with_stats, stream);
  if (call.complete != nullptr) *call.complete = 1;
  if (stream == call.streams.work && stream == call.streams.user) return;
  for (char* block : call.blocks) world_.heap().record_stream(block, stream);
}

// Receives what might still be in the slot of the next call, which nobody here knows: it is that of the epoch, which
// other calls and replayed graphs take as well. Where the hook has been dropped, the caller's statistics may be gone. A
// call that went into a graph without its hook has not run.
void LowLatency::settle(const LowLatencyStreams& streams) {
  for (Slot& slot : slots_) {
    if (!slot.call || (streams.captured && !slot.call->streams.captured)) continue;
    const bool is_old = sequence_ - slot.sequence >= layout::kLowLatencySlots || slot.sequence < other_call_;
    if (slot.call->launch && !is_old && !slot.hook.expired()) continue;
    if (slot.call->streams.captured == streams.captured) receive(*slot.call, !slot.hook.expired(), streams.work);
    slot = {};
  }
}

void LowLatency::before_other_call(Stream stream) {
  go_behind(stream);
  other_call_ = sequence_;
}

void LowLatency::refuse(const layout::CallSignature& signature, const std::string& reason, Stream stream) {
  LowLatencyStreams streams{stream, stream};
  streams.captured = capture_of(stream).active;
  go_behind(stream);
  settle(streams);
  kernels::internode::DirectRefusal refusal;
  refusal.call = kernel_call(signature);
  refusal.num_reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(refusal.reason)));
  std::memcpy(refusal.reason, reason.data(), refusal.num_reason_bytes);
  direct_->low_latency_refuse(direct_->direct_domain(world_.domain()), refusal, stream);
}

void LowLatency::depart(Stream stream) noexcept {
  try {
    go_behind(stream);
  } catch (const Error&) {  // the user's stream is gone
  }
}

// Epochs are taken in the order in which kernels run, so that has to be the order of the calls. What a stream outside
// of a capture has to do is over before the graph runs.
void LowLatency::go_behind(Stream stream) {
  if (has_stream_ && last_stream_ != stream && capture_of(last_stream_).active == capture_of(stream).active) {
    const auto event = static_cast<cudaEvent_t>(event_);
    check_runtime(cudaEventRecord(event, as_cuda(last_stream_)), "cudaEventRecord");
    check_runtime(cudaStreamWaitEvent(as_cuda(stream), event, 0), "cudaStreamWaitEvent");
  }
  if (staging_owner_ && (!has_stream_ || last_stream_ != stream) && stream != world_.comm_stream())
    world_.heap().record_stream(staging_.bases[world_.rank()], stream);
  last_stream_ = stream;
  has_stream_ = true;
}

void LowLatency::make_parts(std::initializer_list<Part> parts, LowLatencyStreams streams,
                            const layout::CallSignature& signature, std::vector<char*>* blocks) {
  std::size_t total = 0;
  for (const Part& part : parts) {
    part.tensor->view = checked_shape(part.dtype, part.shape);
    part.tensor->view.device = world_.device();
    total += layout::align_up(part.tensor->view.num_bytes(), layout::kAlign);
  }
  if (total == 0) return;
  std::string reason;
  const Block block = world_.allocate_or_grow(total, streams.work, &reason);
  if (!block) {
    const std::string text = std::to_string(total) + " bytes of heap needed: " + reason;
    refuse_(signature, text);
    throw BufferTooSmallError(call_name(signature.kind) + (": " + text));
  }
  const std::shared_ptr<void> owner = world_.heap().own(block, streams.user, streams.user == streams.work);
  blocks->push_back(block.ptr);
  char* at = block.ptr;
  for (const Part& part : parts) {
    const std::size_t bytes = part.tensor->view.num_bytes();
    if (bytes == 0) continue;
    part.tensor->view.data = at;
    part.tensor->owner = owner;
    at += layout::align_up(bytes, layout::kAlign);
  }
}

kernels::LowLatencyCall LowLatency::kernel_call(const layout::CallSignature& signature) const {
  kernels::LowLatencyCall call;
  call.staging = staging_;
  call.signature = signature;
  call.signature.flags |= num_growths_ << kFlagStagingShift;
  call.max_tokens = signature.max_tokens;
  call.num_experts = static_cast<int>(signature.num_experts);
  call.num_blocks = num_blocks_;
  call.early = is_alone_;
  call.shrink = options_.shrink;
  return call;
}

std::function<void()> LowLatency::make_hook(std::shared_ptr<InFlight> call, std::uint64_t sequence,
                                            const Enter& enter) {
  call->staging = staging_owner_;
  call->generation = generation_;
  struct Hook {
    LowLatency& low_latency;
    Enter enter;  // keeps the Buffer
    std::shared_ptr<InFlight> call;
  };
  auto hook = std::make_shared<Hook>(Hook{*this, enter, call});
  Slot& slot = slots_[sequence % layout::kLowLatencySlots];
  slot.call = std::move(call);
  slot.hook = hook;
  slot.sequence = sequence;
  return [hook] {
    const std::shared_ptr<void> entered = hook->enter();
    LowLatency& mine = hook->low_latency;
    InFlight& open = *hook->call;
    if (open.generation != mine.generation_)
      throw Error("this hook belongs to a call from before reset(): what it waited for is gone");
    if (std::exchange(open.hook_called, true))
      throw Error("the hook of " + std::string(open.name) + " has been called before; it may be called once");
    const Stream current = mine.options_.current_stream ? mine.options_.current_stream() : nullptr;
    if (open.streams.captured && !capture_of(current).active)
      throw Error("the hook of a captured " + std::string(open.name) + " belongs into the same capture");
    mine.go_behind(current);
    mine.receive(open, true, current);
  };
}

}  // namespace deep_moe::cuda
