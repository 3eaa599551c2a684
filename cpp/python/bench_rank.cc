#include "bench_rank.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <deep_moe/error.hpp>

#include "kernels/bench/copy_bound.hpp"
#include "kernels/bench/hold.hpp"
#include "kernels/protocol/cuda_check.hpp"

namespace deep_moe::bench {
namespace {

using kernels::check_cuda;

constexpr int kCopyChunkBytes = 3584;

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  double micros_until(const Event& end) const {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, event_, end.event_), "cudaEventElapsedTime");
    return 1000.0 * ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph {
 public:
  template <typename Body>
  Graph(cudaStream_t stream, Body body) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(made, "cudaGraphInstantiate");
    check_cuda(cudaGraphUpload(executable_, stream), "cudaGraphUpload");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) { check_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// The device of the thread, put back at the end.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

struct Received {
  Tensor rows, weights;
  OwnedDispatchHandle handle;  // undefined after a dispatch by handle
};

// Kernels of the current device reach `memory`, which may lie on another one.
void reach(const void* memory) {
  cudaPointerAttributes attributes;
  check_cuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (attributes.type != cudaMemoryTypeDevice || attributes.device == device) return;
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(attributes.device, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check_cuda(enabled, "cudaDeviceEnablePeerAccess");
  }
}

bool is_summable(DType type) { return type == DType::kBFloat16 || type == DType::kFloat16 || type == DType::kFloat32; }

}  // namespace

struct Rank::State {
  Inputs inputs;
  Received first;  // of set_inputs()
  Received last;
  Tensor combined;
  Tensor others;   // [R * T, H] in the heap: what combine sums in place of rows that it cannot
  Tensor sums;     // where plain copies for combine go
  Tensor tickets;  // of plain copies
  Chain chain;
  std::optional<Graph> graph;
  std::optional<bool> can_copy;  // known once the kernels are loaded

  std::int64_t num_tokens() const { return inputs.x.data.shape[0]; }

  DispatchArgs dispatch_args(const Buffer& buffer, bool by_handle) const {
    DispatchArgs args;
    args.x = inputs.x;
    args.num_sms = chain.num_sms;
    if (by_handle) return args;
    args.topk_idx = inputs.topk_idx;
    args.topk_weights = inputs.topk_weights;
    args.num_experts = inputs.num_experts;
    if (chain.graph_repeats > 0) args.num_worst_tokens = buffer.num_ranks() * num_tokens();
    return args;
  }

  void keep(DispatchResult result) {
    last.rows = std::move(result.recv_x.data);
    last.weights = std::move(result.recv_topk_weights);
    last.handle = std::move(result.handle);
  }

  void dispatch(Buffer& buffer, bool v1) {
    last = {};
    DispatchArgs args = dispatch_args(buffer, false);
    LayoutResult layout;
    if (v1) {
      layout = buffer.get_dispatch_layout(inputs.topk_idx, inputs.num_experts);
      args.is_token_in_rank = layout.is_token_in_rank.view;
      args.num_tokens_per_expert = layout.num_tokens_per_expert.view;
    }
    keep(buffer.dispatch(args));
  }

  void dispatch_by_handle(Buffer& buffer) {
    last = {};
    DispatchArgs args = dispatch_args(buffer, true);
    const DispatchHandle handle = first.handle.view();
    args.handle = &handle;
    keep(buffer.dispatch(args));
  }

  void combine(Buffer& buffer, bool with_weights, bool ordinary) {
    combined = {};
    const Received& from = last.rows.defined() ? last : first;
    CombineArgs args;
    args.num_sms = chain.num_sms;
    args.handle = (from.handle.meta.defined() ? from : first).handle.view();
    if (with_weights) args.topk_weights = (from.weights.defined() ? from : first).weights.view;
    args.x = from.rows.view;
    if (ordinary || !is_summable(args.x.dtype)) {
      args.x = ordinary ? inputs.ordinary : others.view;
      args.x.shape[0] = from.rows.view.shape[0];
    }
    combined = std::move(buffer.combine(args).combined_x);
  }

  void copy(const Buffer& buffer, bool for_combine, cudaStream_t stream) {
    if (inputs.landing.empty()) throw ArgumentError("landing: none was given; plain copies need it");
    if (!can_copy.value_or(false)) throw UnavailableError("plain copies: they need the copy engine (sm_90 or later)");
    const TensorView& x = inputs.x.data;
    CopyBound args;
    args.num_tokens = num_tokens();
    args.chunk_bytes = kCopyChunkBytes;
    args.wanted = first.handle.is_token_in_rank.as<bool>();
    args.tickets = chain.copy_tickets ? tickets.as<std::uint64_t>() : nullptr;
    const std::vector<char*>& landing = inputs.landing;
    if (for_combine) {
      args.row_bytes = static_cast<int>(inputs.ordinary.shape[1] * dtype_bytes(inputs.ordinary.dtype));
      args.num_loads = buffer.num_ranks();
      for (std::size_t peer = 0; peer < landing.size(); ++peer) args.from[peer] = landing[peer];
      args.to[0] = sums.as<char>();
    } else {
      args.row_bytes = static_cast<int>(x.shape[1] * dtype_bytes(x.dtype));
      args.num_stores = buffer.num_ranks();
      args.from[0] = x.as<char>();
      if (const TensorView& scales = inputs.x.scales; scales.defined()) {
        const std::size_t bytes = static_cast<std::size_t>(scales.shape[1]) * dtype_bytes(scales.dtype);
        args.extra_bytes = bytes % 16 == 0 ? static_cast<int>(bytes) : 0;  // else the engine cannot copy them
        args.extra_from = scales.as<char>();
      }
      for (std::size_t peer = 0; peer < landing.size(); ++peer) {
        args.to[peer] = landing[peer];
        args.extra_to[peer] = landing[peer] + args.num_tokens * args.row_bytes;
      }
    }
    launch_copy_bound(args, {chain.num_sms, chain.copy_warps, chain.copy_stages}, stream);
  }

  void call(Buffer& buffer, cudaStream_t stream) {
    last = {};
    for (const Step step : chain.steps) {
      switch (step) {
        case Step::kLayout: buffer.get_dispatch_layout(inputs.topk_idx, inputs.num_experts); break;
        case Step::kDispatch: dispatch(buffer, false); break;
        case Step::kDispatchV1: dispatch(buffer, true); break;
        case Step::kDispatchByHandle: dispatch_by_handle(buffer); break;
        case Step::kCombine: combine(buffer, false, false); break;
        case Step::kCombineWithWeights: combine(buffer, true, false); break;
        case Step::kCombineOrdinary: combine(buffer, false, true); break;
        case Step::kCopyForDispatch: copy(buffer, false, stream); break;
        case Step::kCopyForCombine: copy(buffer, true, stream); break;
      }
    }
  }
};

Rank::Rank() : state_(std::make_unique<State>()) {}
Rank::~Rank() = default;

void Rank::set_inputs(Buffer& buffer, const Inputs& inputs, void* stream) {
  const OnDevice on(buffer.options().device);
  State& state = *state_;
  state.graph.reset();
  if (!state.can_copy) state.can_copy = prepare_copy_bound();
  const int num_ranks = buffer.num_ranks();
  if (!inputs.landing.empty() && (static_cast<int>(inputs.landing.size()) != num_ranks || num_ranks > kMaxCopyRanks))
    throw ArgumentError("landing: got " + std::to_string(inputs.landing.size()) +
                        " places; allowed: one a rank, or "
                        "none, for at most " +
                        std::to_string(kMaxCopyRanks) + " ranks");
  for (const char* place : inputs.landing) reach(place);
  state.first = state.last = {};
  state.combined = state.others = state.sums = state.tickets = {};
  state.inputs = inputs;
  state.chain = Chain{{}, 0};  // the Buffer's own number of SMs
  state.dispatch(buffer, false);
  state.first = std::exchange(state.last, {});
  const DType type = inputs.ordinary.dtype;
  const std::int64_t hidden = inputs.ordinary.shape[1], tokens = state.num_tokens();
  if (!is_summable(state.first.rows.view.dtype)) state.others = buffer.empty(type, {num_ranks * tokens, hidden});
  state.sums = buffer.empty(type, {tokens, hidden});
  state.tickets = buffer.empty(DType::kInt64, {2});
  const auto clear = [&](const Tensor& tensor) {
    if (tensor.defined() && tensor.view.numel() > 0)
      check_cuda(cudaMemsetAsync(tensor.view.data, 0, tensor.view.num_bytes(), static_cast<cudaStream_t>(stream)),
                 "cudaMemsetAsync");
  };
  clear(state.others);
  clear(state.tickets);
  check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

void Rank::prepare(Buffer& buffer, const Chain& chain, void* stream) {
  const OnDevice on(buffer.options().device);
  State& state = *state_;
  if (!state.first.handle.meta.defined()) throw ArgumentError("set_inputs must come before prepare");
  state.graph.reset();
  state.last = {};
  state.combined = {};
  state.chain = chain;
  if (chain.graph_repeats == 0) return;
  const auto on_stream = static_cast<cudaStream_t>(stream);
  state.graph.emplace(on_stream, [&] {
    for (int i = 0; i < chain.graph_repeats; ++i) state.call(buffer, on_stream);
  });
}

Times Rank::run(Buffer& buffer, int count, void* stream) {
  const OnDevice on(buffer.options().device);
  if (count < 1) throw ArgumentError("count is " + std::to_string(count) + "; allowed: 1 or more");
  State& state = *state_;
  const auto on_stream = static_cast<cudaStream_t>(stream);
  Event begin, end;
  const auto call = [&] {
    if (state.graph) {
      state.graph->launch(on_stream);
    } else {
      state.call(buffer, on_stream);
    }
  };
  const auto micros = [](auto duration) { return std::chrono::duration<double, std::micro>(duration).count(); };
  call();
  begin.record(on_stream);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) call();
  const auto issued = std::chrono::steady_clock::now();
  end.record(on_stream);
  check_cuda(cudaStreamSynchronize(on_stream), "cudaStreamSynchronize");
  const auto idle = std::chrono::steady_clock::now();
  const double chains = static_cast<double>(count) * std::max(1, state.chain.graph_repeats);
  return {begin.micros_until(end) / chains, micros(issued - start) / chains, micros(idle - start) / chains};
}

bool Rank::can_copy() const { return state_->can_copy.value_or(false); }
Tensor Rank::received() const { return state_->last.rows; }
Tensor Rank::combined() const { return state_->combined; }

void hold(int device, int num_sms, int num_ranks, std::int64_t nanoseconds, void* stream) {
  const OnDevice on(device);
  prepare_hold();
  launch_hold(num_sms, num_ranks, nanoseconds, stream);
}

}  // namespace deep_moe::bench
