#include "cuda/cuda_low_latency.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cuda/call_streams.hpp"
#include "cuda/driver.hpp"
#include "layout/experts.hpp"
#include "layout/handle.hpp"
#include "layout/low_latency_words.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/text.hpp"
#include "runtime/validate.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cuda {

using kernels::LowLatencyHalf;

namespace {

cudaStream_t as_cuda(Stream stream) { return static_cast<cudaStream_t>(stream); }

kernels::SumType sum_type(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::SumType::kBf16
         : dtype == DType::kFloat16 ? kernels::SumType::kFp16
                                    : kernels::SumType::kFp32;
}

kernels::TopkIds ids_of(const TensorView& topk_idx) {
  kernels::TopkIds ids;
  ids.data = topk_idx.data;
  ids.id_bytes = static_cast<int>(dtype_bytes(topk_idx.dtype));
  ids.topk = static_cast<int>(topk_idx.shape[1]);
  ids.num_tokens = topk_idx.shape[0];
  ids.row_stride = topk_idx.shape[0] > 1 ? topk_idx.stride[0] : topk_idx.shape[1];
  return ids;
}

std::int64_t row_stride(const TensorView& rows) { return rows.shape[0] > 1 ? rows.stride[0] : rows.shape[1]; }

kernels::ScaleRows scale_rows(const TensorView& scales) {
  kernels::ScaleRows rows;
  if (!scales.defined()) return rows;
  rows.data = scales.data;
  rows.item_bytes = static_cast<int>(dtype_bytes(scales.dtype));
  rows.num_items = scales.num_dims == 2 ? scales.shape[1] : 1;
  rows.row_stride = scales.stride[0] * rows.item_bytes;
  rows.item_stride = scales.num_dims == 2 ? scales.stride[1] * rows.item_bytes : rows.item_bytes;
  return rows;
}

// Blocks that a call may take: an SM each, and room for the ranks that share the device.
int most_blocks(int device, int num_sharing) {
  int num_sms = 0;
  check_runtime(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return std::max(3, num_sharing > 1 ? num_sms / num_sharing - 2 : num_sms);
}

}  // namespace

struct LowLatency::InFlight {
  std::string name;
  Launch launch;               // empty once the receive half has been launched
  std::shared_ptr<void> keep;  // tensors
  std::shared_ptr<void> staging;
  std::int64_t* complete = nullptr;  // of the handle's meta
  std::uint64_t generation = 0;
  bool hook_called = false;

  void receive(bool with_stats, Stream stream) {
    if (!launch) return;
    const Launch half = std::exchange(launch, nullptr);
    half(LowLatencyHalf::kReceive, with_stats, stream);
    if (complete != nullptr) *complete = 1;
  }
};

LowLatency::LowLatency(DeviceWorld& world, std::int64_t staging_bytes, int num_sharing,
                       std::function<Stream()> current_stream, Refuse refuse)
    : world_(world), current_stream_(std::move(current_stream)), refuse_(std::move(refuse)) {
  num_blocks_ = most_blocks(world.device(), num_sharing);
  cudaEvent_t event;
  check_runtime(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_ = event;
  const std::vector<DeviceWorld::Said> wishes =
      world.exchange("constructor/low latency", static_cast<std::uint64_t>(staging_bytes), "");
  std::uint64_t most = 0;
  for (const DeviceWorld::Said& wish : wishes) most = std::max(most, wish.value);
  const std::int64_t slot_bytes = static_cast<std::int64_t>(most) / layout::kLowLatencySlots;
  if (slot_bytes == 0) return;
  try {
    ensure_staging(slot_bytes, world.comm_stream(), "constructor");
  } catch (const BufferTooSmallError&) {  // on all ranks; the first call says more
  }
}

LowLatency::~LowLatency() { cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

std::int64_t LowLatency::staging_bytes() const { return staging_.slot_bytes * layout::kLowLatencySlots; }

void LowLatency::restart() {
  for (Slot& slot : slots_) slot = {};
  ++generation_;
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
  if (args.use_logfmt) throw UnavailableError("use_logfmt: not on GPUs in this version");
  check_in_flight(num_in_flight(), "low_latency_combine");
}

int LowLatency::num_in_flight() const {
  return static_cast<int>(std::count_if(std::begin(slots_), std::end(slots_), [](const Slot& slot) {
    return slot.call && slot.call->launch && !slot.hook.expired();
  }));
}

// Receives what might still be in the slot of the next call, which nobody here knows: it is that of the epoch, which
// other calls and replayed graphs take as well. Where the hook has been dropped, the caller's statistics may be gone.
void LowLatency::settle(Stream stream) {
  for (Slot& slot : slots_) {
    if (!slot.call) continue;
    const bool is_old = sequence_ - slot.sequence >= layout::kLowLatencySlots || slot.sequence < other_call_;
    if (slot.call->launch && !is_old && !slot.hook.expired()) continue;
    slot.call->receive(!slot.hook.expired(), stream);
    slot = {};
  }
}

void LowLatency::before_other_call(Stream stream) {
  go_behind(stream);
  other_call_ = sequence_;
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

std::string LowLatency::take_staging(std::int64_t bytes, Block* block) {
  std::string reason;
  *block = world_.allocate_or_grow(static_cast<std::size_t>(bytes), world_.comm_stream(), &reason);
  if (!*block) return reason;
  try {
    world_.wait_until_shared(block->segment, "low latency/grow");
  } catch (const BufferTooSmallError& error) {
    world_.heap().free(*block);
    *block = {};
    return error.what();
  }
  check_runtime(cudaMemsetAsync(block->ptr, 0, static_cast<std::size_t>(bytes), as_cuda(world_.comm_stream())),
                "cudaMemsetAsync");
  world_.wait_idle("low latency/grow");
  return {};
}

// Collective where it grows: all ranks have the same staging and make the same call. Calls in flight keep the old one.
void LowLatency::ensure_staging(std::int64_t slot_bytes, Stream stream, const char* call) {
  if (slot_bytes <= staging_.slot_bytes) return;
  slot_bytes = static_cast<std::int64_t>(layout::align_up(static_cast<std::size_t>(slot_bytes), layout::kAlign));
  const std::int64_t bytes = slot_bytes * layout::kLowLatencySlots;
  const std::string needed = std::string(call) + ": " + std::to_string(bytes) +
                             " bytes of low-latency staging needed (" + std::to_string(staging_bytes()) + " are there)";
  if (capture_of(stream).active)
    throw BufferTooSmallError(needed + "; it cannot grow while a graph is captured: pass num_rdma_bytes");
  Block block;
  const std::string reason = take_staging(bytes, &block);
  const std::string place =
      block ? std::to_string(block.segment) + " " + std::to_string(block.offset) : "failed: " + reason;
  const std::vector<DeviceWorld::Said> said =
      world_.exchange("low latency/grow", static_cast<std::uint64_t>(bytes), place);
  std::string problem;
  bool same = true;
  kernels::LowLatencyStaging staging;
  staging.slot_bytes = slot_bytes;
  for (int peer = 0; peer < world_.num_ranks(); ++peer) {
    const DeviceWorld::Said& theirs = said[static_cast<std::size_t>(peer)];
    same = same && theirs.value == static_cast<std::uint64_t>(bytes);
    if (theirs.text.rfind("failed: ", 0) == 0) {
      problem += "; rank " + std::to_string(peer) + ": " + theirs.text.substr(8);
      continue;
    }
    char* end = nullptr;
    const long segment = std::strtol(theirs.text.c_str(), &end, 10);
    const unsigned long long offset = std::strtoull(end, nullptr, 10);
    staging.bases[peer] = world_.address(peer, static_cast<int>(segment), static_cast<std::size_t>(offset));
  }
  if (!problem.empty() || !same) {
    if (block) world_.heap().free(block);
    if (!same)
      throw CallMismatchError(std::string(call) +
                              ": the ranks need staging of different sizes: they did not make the same call");
    throw BufferTooSmallError(needed + problem);
  }
  staging_owner_ = world_.heap().own(block, stream);
  staging_ = staging;
}

// One block of the heap, cut into tensors. Where it cannot be had, the peers are told.
void LowLatency::make_parts(const std::vector<Part>& parts, Stream stream, const layout::CallSignature& signature) {
  std::vector<std::size_t> offsets;
  std::size_t total = 0;
  for (const Part& part : parts) {
    part.tensor->view = checked_shape(part.dtype, part.shape);
    part.tensor->view.device = world_.device();
    offsets.push_back(total);
    total = layout::align_up(total + part.tensor->view.num_bytes(), layout::kAlign);
  }
  if (total == 0) return;
  std::string reason;
  const Block block = world_.allocate_or_grow(total, stream, &reason);
  if (!block) {
    const std::string text = std::to_string(total) + " bytes of heap needed: " + reason;
    refuse_(signature, text);
    throw BufferTooSmallError(call_name(signature.kind) + (": " + text));
  }
  const std::vector<Block> blocks = world_.heap().split(block, offsets);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!blocks[i]) continue;
    parts[i].tensor->view.data = blocks[i].ptr;
    parts[i].tensor->owner = world_.heap().own(blocks[i], stream);
  }
}

kernels::LowLatencyCall LowLatency::kernel_call(const layout::CallSignature& signature) const {
  kernels::LowLatencyCall call;
  call.staging = staging_;
  call.signature = signature;
  call.max_tokens = signature.max_tokens;
  call.num_experts = static_cast<int>(signature.num_experts);
  call.num_blocks = num_blocks_;
  return call;
}

std::function<void()> LowLatency::launch_call(const char* name, const Launch& launch, bool halves,
                                              std::shared_ptr<void> keep, std::int64_t* complete, Stream stream,
                                              const Enter& enter) {
  const std::uint64_t sequence = sequence_++;
  launch(halves ? LowLatencyHalf::kSend : LowLatencyHalf::kBoth, true, stream);
  if (!halves) {
    if (complete != nullptr) *complete = 1;
    return nullptr;
  }
  auto call = std::make_shared<InFlight>();
  call->name = name;
  call->launch = launch;
  call->keep = std::move(keep);
  call->staging = staging_owner_;
  call->complete = complete;
  call->generation = generation_;
  struct Hook {
    LowLatency& low_latency;
    Enter enter;  // keeps the Buffer
    std::shared_ptr<InFlight> call;
  };
  auto hook = std::make_shared<Hook>(Hook{*this, enter, call});
  Slot& slot = slots_[sequence % layout::kLowLatencySlots];
  slot.call = call;
  slot.hook = hook;
  slot.sequence = sequence;
  return [hook] {
    const std::shared_ptr<void> entered = hook->enter();
    LowLatency& mine = hook->low_latency;
    InFlight& open = *hook->call;
    if (open.generation != mine.generation_)
      throw Error("this hook belongs to a call from before reset(): what it waited for is gone");
    if (std::exchange(open.hook_called, true))
      throw Error("the hook of " + open.name + " has been called before; it may be called once");
    const Stream current = mine.current_stream_ ? mine.current_stream_() : nullptr;
    mine.go_behind(current);
    open.receive(true, current);
  };
}

LowLatencyDispatchResult LowLatency::dispatch(const LowLatencyDispatchArgs& args,
                                              const layout::CallSignature& signature, Stream stream,
                                              const Enter& enter) {
  const char* const name = "low_latency_dispatch";
  const TensorView &data = args.x.data, &scales = args.x.scales;
  const int num_ranks = world_.num_ranks();
  const layout::ExpertBlocks experts(static_cast<int>(args.num_experts), num_ranks);
  const std::int64_t num_local = experts.num_local_experts(world_.rank()), hidden = data.shape[1];
  const std::int64_t max_tokens = signature.max_tokens, topk = signature.topk, rows = num_ranks * max_tokens;
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(data.dtype));
  const bool has_weights = args.topk_weights.defined();

  kernels::LowLatencyDispatchArgs out;
  out.cast = (signature.flags & kFlagFp8) != 0;
  out.x = data.data;
  out.num_tokens = data.shape[0];
  out.row_bytes = signature.row_bytes;
  out.row_stride = row_stride(data) * item;
  out.x_type = sum_type(data.dtype);
  out.round_scale = (signature.flags & kFlagRoundScale) != 0;
  out.ue8m0 = args.use_ue8m0;
  out.scales = scale_rows(scales);
  out.ids = ids_of(args.topk_idx);
  out.with_weights = has_weights;
  out.topk_weights = has_weights ? args.topk_weights.as<float>() : nullptr;
  out.weight_stride = has_weights ? row_stride(args.topk_weights) : 0;
  out.call = kernel_call(signature);

  // Room for the combine of rows of the same width as well, so that it need not grow the staging.
  kernels::LowLatencyCombineArgs back;
  back.call = out.call;
  back.ids = out.ids;
  back.type = item > 2 ? kernels::SumType::kFp32 : kernels::SumType::kBf16;
  back.hidden = hidden;
  back.by_expert = topk > num_ranks;
  go_behind(stream);
  settle(stream);
  ensure_staging(std::max(kernels::low_latency_slot_bytes(world_.domain(), out),
                          kernels::low_latency_slot_bytes(world_.domain(), back)),
                 stream, name);
  out.call.staging = staging_;

  LowLatencyDispatchResult result;
  OwnedLowLatencyHandle& handle = result.handle;
  Tensor epoch;
  std::vector<Part> parts = {
      {&result.recv_x.data, out.cast ? DType::kFloat8E4M3 : data.dtype, {num_local, rows, hidden}},
      {&result.recv_count, DType::kInt32, {num_local}},
      {&handle.src_info, DType::kInt32, {num_local, rows}},
      {&handle.layout_range, DType::kInt64, {num_local, num_ranks}},
      {&handle.recv_pos, DType::kInt32, {num_ranks, max_tokens + 1, topk}},
      {&handle.recv_weights, DType::kFloat32,
       has_weights ? std::vector<std::int64_t>{num_ranks, max_tokens, topk} : std::vector<std::int64_t>{0}},
      {&epoch, DType::kInt64, {1}},
  };
  const std::int64_t num_scales = out.cast ? hidden / kFp8Block / (args.use_ue8m0 ? 4 : 1) : out.scales.num_items;
  const DType scale_type = scales.defined() ? scales.dtype : args.use_ue8m0 ? DType::kInt32 : DType::kFloat32;
  if (num_scales > 0) parts.push_back({&result.recv_x.scales, scale_type, {num_local, num_scales, rows}});
  make_parts(parts, stream, signature);
  if (num_scales > 0) {  // column-major in the last two dimensions
    TensorView& view = result.recv_x.scales.view;
    void* const at = view.data;
    if (scales.defined() && scales.num_dims == 1) {
      view = TensorView::contiguous(at, scale_type, {num_local, rows});
    } else {
      view = TensorView::contiguous(at, scale_type, {num_local, rows, num_scales});
      view.stride[1] = 1;
      view.stride[2] = rows;
    }
    view.device = world_.device();
  }
  handle.meta = make_host_tensor(DType::kInt64, {layout::kLowLatencyMetaSize});
  std::int64_t* const meta = handle.meta.as<std::int64_t>();
  std::fill(meta, meta + layout::kLowLatencyMetaSize, 0);
  meta[layout::kLowMetaMaxTokens] = max_tokens;
  meta[layout::kLowMetaHidden] = hidden;
  meta[layout::kLowMetaNumExperts] = args.num_experts;
  meta[layout::kLowMetaTopk] = topk;
  meta[layout::kLowMetaNumRanks] = num_ranks;
  meta[layout::kLowMetaNumTokens] = data.shape[0];
  meta[layout::kLowMetaHasWeights] = has_weights ? 1 : 0;
  meta[layout::kLowMetaXDtype] = static_cast<std::int64_t>(data.dtype);
  // The count of calls tells this dispatch from every other one, on every rank.
  meta[layout::kLowMetaHash] =
      static_cast<std::int64_t>((layout::signature_hash(signature) ^ (sequence_ + 1)) * 0x9e3779b97f4a7c15ull);

  out.recv_x = result.recv_x.data.view.data;
  out.recv_scales = num_scales > 0 ? result.recv_x.scales.view.data : nullptr;
  out.recv_count = result.recv_count.as<std::int32_t>();
  out.src_info = handle.src_info.as<std::int32_t>();
  out.layout_range = handle.layout_range.as<std::int64_t>();
  out.recv_pos = handle.recv_pos.as<std::int32_t>();
  out.recv_weights = has_weights ? handle.recv_weights.as<float>() : nullptr;
  out.call.epoch = epoch.as<std::uint64_t>();
  const TensorView stats = args.cumulative_local_expert_recv_stats, waited = args.wait_recv_cost_stats;
  const Launch launch = [&world = world_, out, stats, waited](LowLatencyHalf half, bool with_stats, Stream on) mutable {
    out.call.half = half;
    out.recv_stats = with_stats && stats.defined() ? stats.as<std::int32_t>() : nullptr;
    out.call.wait_stats = with_stats && waited.defined() ? waited.as<std::int64_t>() : nullptr;
    kernels::low_latency_dispatch(world.domain(), out, on);
  };
  struct Keep {
    OwnedPayload recv_x;
    Tensor recv_count, epoch;
    OwnedLowLatencyHandle handle;
  };
  auto keep = std::make_shared<Keep>(Keep{result.recv_x, result.recv_count, epoch, handle});
  result.hook = launch_call(name, launch, args.return_recv_hook, keep, meta + layout::kLowMetaComplete, stream, enter);
  return result;
}

LowLatencyCombineResult LowLatency::combine(const LowLatencyCombineArgs& args, const layout::CallSignature& signature,
                                            Stream stream, const Enter& enter) {
  const char* const name = "low_latency_combine";
  const std::int64_t num_tokens = args.topk_idx.shape[0], topk = signature.topk, hidden = args.x.shape[2];
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.dtype));
  const bool halves = args.return_recv_hook;
  kernels::LowLatencyCombineArgs in;
  in.call = kernel_call(signature);
  in.by_expert = (signature.flags & kFlagByExpert) != 0;
  in.type = sum_type(args.x.dtype);
  in.x = args.x.data;
  in.hidden = hidden;
  in.row_stride = (args.x.shape[1] > 1 ? args.x.stride[1] : hidden) * item;
  in.expert_stride = (args.x.shape[0] > 1 ? args.x.stride[0] : 0) * item;
  in.recv_pos = args.handle.recv_pos.as<std::int32_t>();
  in.recv_weights = (signature.flags & kFlagWeights) != 0 ? args.handle.recv_weights.as<float>() : nullptr;
  in.ids = ids_of(args.topk_idx);
  in.topk_weights = args.topk_weights.as<float>();
  in.weight_stride = row_stride(args.topk_weights);
  go_behind(stream);
  settle(stream);
  ensure_staging(kernels::low_latency_slot_bytes(world_.domain(), in), stream, name);
  in.call.staging = staging_;

  LowLatencyCombineResult result;
  Tensor epoch, kept_ids, kept_weights;
  std::vector<Part> parts;
  if (args.out.defined())
    result.combined_x.view = args.out;
  else
    parts.push_back({&result.combined_x, args.x.dtype, {num_tokens, hidden}});
  if (halves) {
    parts.push_back({&epoch, DType::kInt64, {1}});
    parts.push_back({&kept_ids, DType::kInt32, {num_tokens, topk}});
    parts.push_back({&kept_weights, DType::kFloat32, {num_tokens, topk}});
  }
  make_parts(parts, stream, signature);
  in.out = result.combined_x.view.data;
  in.out_stride = row_stride(result.combined_x.view) * item;
  if (halves) {
    in.call.epoch = epoch.as<std::uint64_t>();
    in.kept_ids = kept_ids.as<std::int32_t>();
    in.kept_weights = kept_weights.as<float>();
  }
  const TensorView waited = args.wait_recv_cost_stats;
  const Launch launch = [&world = world_, in, waited](LowLatencyHalf half, bool with_stats, Stream on) mutable {
    in.call.half = half;
    in.call.wait_stats = with_stats && waited.defined() ? waited.as<std::int64_t>() : nullptr;
    kernels::low_latency_combine(world.domain(), in, on);
  };
  struct Keep {
    Tensor combined_x, epoch, kept_ids, kept_weights;
  };
  auto keep = std::make_shared<Keep>(Keep{result.combined_x, epoch, kept_ids, kept_weights});
  result.hook = launch_call(name, launch, halves, keep, nullptr, stream, enter);
  return result;
}

}  // namespace deep_moe::cuda
