// The calls of the stress of random calls.
#include "gpu_stress.hpp"

namespace deep_moe::test {

StressRank::StressRank(const Bootstrap& bootstrap, std::uint64_t seed, std::int64_t heap_bytes)
    : bootstrap_(bootstrap), shared_(seed), own_(mix(seed, bootstrap.rank)) {
  cuda(cudaSetDevice(gpu_of(bootstrap.rank)));
  cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  up_ = std::make_unique<Arena>(std::size_t{64} << 20);
  down_ = std::make_unique<Arena>(std::size_t{64} << 20);
  fixed_ = std::make_unique<Arena>(std::size_t{1} << 20);
  meet();  // nobody allocates any more when the first kernel waits
  BufferOptions options;
  options.device = gpu_of(bootstrap.rank);
  options.num_nvl_bytes = heap_bytes;
  options.timeout_seconds = 30;
  options.current_stream = [stream = stream_] { return static_cast<void*>(stream); };
  buffer_ = std::make_unique<Buffer>(bootstrap_, options);
}

StressRank::~StressRank() {
  cudaStreamSynchronize(stream_);
  live_.clear();
  held_.clear();
  buffer_.reset();
  cudaEventDestroy(event_);
  cudaStreamDestroy(stream_);
}

Plan StressRank::draw_plan() {
  Plan plan;
  plan.seed = shared_.next();
  const bool large = shared_.below(150) == 0;
  for (int rank = 0; rank < bootstrap_.size; ++rank) {
    const std::int64_t most = large ? 1500 : std::int64_t{1} << shared_.below(7);
    plan.tokens.push_back(shared_.below(8) == 0 ? 0 : shared_.below(most + 1));
  }
  plan.hidden = 16 * (1 + shared_.below(24));
  plan.num_experts = 1 + shared_.below(30);
  plan.topk = 1 + shared_.below(9);
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3};
  plan.dtype = kTypes[shared_.below(4)];
  if (plan.dtype == DType::kFloat8E4M3) plan.num_scales = (plan.hidden + 127) / 128;
  plan.narrow_ids = shared_.below(3) == 0;
  plan.by_mask = shared_.below(5) == 0;
  plan.weights = !plan.by_mask && shared_.below(4) != 0;
  if (shared_.below(3) == 0) {
    const Routes routes(plan);
    for (const auto& rows : routes.rows) plan.worst = std::max<std::int64_t>(plan.worst, rows.size());
    plan.worst += 1 + shared_.below(20);
  }
  return plan;
}

void StressRank::settle() {
  cuda(cudaStreamSynchronize(stream_));
  for (const auto& check : checks_) check();
  checks_.clear();
  held_.clear();
  up_->give_back();
  down_->give_back();
  buffer_->check();
}

StressRank::Live StressRank::dispatch(const Plan& plan, const Inputs& inputs, bool layout_first) {
  Live live{plan, std::make_shared<const Routes>(plan), {}};
  LayoutResult first;
  if (layout_first || plan.by_mask) first = layout(plan, live.routes, inputs.ids);
  DispatchArgs args;
  args.x.data = inputs.x;
  args.x.scales = inputs.scales;
  if (plan.by_mask) {
    args.is_token_in_rank = first.is_token_in_rank.view;
    args.num_tokens_per_expert = first.num_tokens_per_expert.view;
  } else {
    args.topk_idx = inputs.ids;
    args.topk_weights = inputs.weights;
    args.num_experts = plan.num_experts;
  }
  args.num_worst_tokens = plan.worst;
  args.num_sms = static_cast<int>(1 + own_.below(24));
  live.result = on_streams(&args.streams, [&] { return buffer_->dispatch(args); });
  check_rows(plan, live.routes, plan.seed, live.result.recv_x);
  check_ids(plan, live.routes, live.result);
  return live;
}

void StressRank::cached(const Live& live) {
  const std::uint64_t seed = shared_.next();
  const Plan& plan = live.plan;
  const std::int64_t tokens = plan.tokens[me()], scale_bytes = 4 * plan.num_scales;
  const Arena::Piece x = up_->take(static_cast<std::size_t>(tokens * plan.row_bytes()));
  const Arena::Piece scales = up_->take(static_cast<std::size_t>(tokens * scale_bytes));
  for (std::int64_t token = 0; token < tokens; ++token) {
    fill_row(x.host + token * plan.row_bytes(), plan.row_bytes(), seed, me(), token);
    fill_row(scales.host + token * scale_bytes, scale_bytes, seed + 1, me(), token);
  }
  DispatchArgs args;
  args.x.data = upload(x, plan.dtype, {tokens, plan.hidden});
  if (plan.num_scales > 0) args.x.scales = upload(scales, DType::kFloat32, {tokens, plan.num_scales});
  const DispatchHandle handle = live.result.handle.view();
  args.handle = &handle;
  args.num_sms = static_cast<int>(1 + own_.below(24));
  const DispatchResult result = on_streams(&args.streams, [&] { return buffer_->dispatch(args); });
  check_rows(plan, live.routes, seed, result.recv_x);
}

// `simple`: as the graph of replay_beside_eager has it.
void StressRank::combine(const Live& live, std::uint64_t seed, bool simple) {
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  const Plan& plan = live.plan;
  const DType dtype = simple ? DType::kBFloat16 : kTypes[of(mix(seed, 1), 3)];
  const bool weights = plan.weights && (simple || of(mix(seed, 2), 2) == 0);
  const int num_biases = simple ? 1 : static_cast<int>(own_.below(3));
  CombineArgs args;
  args.x = make_y(live, seed, dtype);
  Tensor in_heap;
  if (own_.below(2) == 0) {  // read in place by the peers
    in_heap = buffer_->empty(dtype, {args.x.shape[0], args.x.shape[1]});
    if (args.x.numel() > 0)
      cuda(cudaMemcpyAsync(in_heap.view.data, args.x.data, args.x.num_bytes(), cudaMemcpyDeviceToDevice, stream_));
    args.x = in_heap.view;
  }
  args.handle = live.result.handle.view();
  if (weights) args.topk_weights = live.result.recv_topk_weights.view;
  if (num_biases > 0) args.bias0 = make_bias(plan, seed, 0, dtype);
  if (num_biases > 1) args.bias1 = make_bias(plan, seed, 1, dtype);
  if (own_.below(3) == 0) {
    const std::int64_t bytes = plan.tokens[me()] * plan.hidden * static_cast<std::int64_t>(dtype_bytes(dtype));
    args.out = TensorView::contiguous(up_->take(static_cast<std::size_t>(bytes)).device, dtype,
                                      {plan.tokens[me()], plan.hidden});
    args.out.device = gpu_of(me());
  }
  args.num_sms = static_cast<int>(1 + own_.below(24));
  const CombineResult result = on_streams(&args.streams, [&] { return buffer_->combine(args); });
  check_sums(plan, live.routes, seed, dtype, num_biases, result.combined_x.view,
             weights ? result.combined_topk_weights.view : TensorView{});
  if (own_.below(2) == 0) held_.push_back(std::move(in_heap));  // else dropped at once
}

void StressRank::random_calls(int count) {
  for (int i = 0; i < count; ++i) {
    const std::int64_t choice = shared_.below(10);
    if (live_.empty() || choice < 4) {
      const Plan plan = draw_plan();
      live_.push_back(dispatch(plan, make_inputs(plan), own_.below(3) == 0));
    } else {
      auto live = live_.begin();
      std::advance(live, shared_.below(static_cast<std::int64_t>(live_.size())));
      if (choice < 8) {
        combine(*live, shared_.next(), false);
      } else {
        cached(*live);
      }
    }
    if (live_.size() > 5 || shared_.below(6) == 0) {
      auto live = live_.begin();
      std::advance(live, shared_.below(static_cast<std::int64_t>(live_.size())));
      live_.erase(live);
    }
    if (own_.below(3) == 0 || up_->nearly_full() || down_->nearly_full()) settle();
  }
  settle();
}

void StressRank::replay_beside_eager(int replaying, int rounds) {
  constexpr std::int64_t kTokens = 48;
  live_.clear();
  settle();
  Plan plan;
  plan.hidden = 256, plan.num_experts = 13, plan.topk = 4;
  plan.worst = kTokens * bootstrap_.size + 9;
  plan.tokens.assign(static_cast<std::size_t>(bootstrap_.size), kTokens);

  fixed_->give_back();
  const auto like = [&](const TensorView& view) {
    TensorView place = view;
    place.data = fixed_->take(view.num_bytes()).device;
    return place;
  };
  const auto put = [&](const TensorView& place, const TensorView& view) {
    cuda(cudaMemcpyAsync(place.data, view.data, view.num_bytes(), cudaMemcpyDeviceToDevice, stream_));
  };
  Inputs places;
  TensorView y_place, bias_place;
  Live captured{plan, nullptr, {}};
  CombineResult sums;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (me() == replaying) {
    const Inputs inputs = make_inputs(plan);
    places = {like(inputs.x), {}, like(inputs.ids), like(inputs.weights)};
    TensorView y = TensorView::contiguous(nullptr, DType::kBFloat16, {plan.worst, plan.hidden});
    y.device = gpu_of(me());
    y_place = like(y);
    bias_place = like(make_bias(plan, 0, 0, DType::kBFloat16));
    cuda(cudaStreamSynchronize(stream_));
    cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    DispatchArgs args;
    args.x.data = places.x;
    args.topk_idx = places.ids;
    args.topk_weights = places.weights;
    args.num_experts = plan.num_experts;
    args.num_worst_tokens = plan.worst;
    args.num_sms = 9;
    captured.result = buffer_->dispatch(args);
    CombineArgs back;
    back.x = y_place;
    back.handle = captured.result.handle.view();
    back.topk_weights = captured.result.recv_topk_weights.view;
    back.bias0 = bias_place;
    back.num_sms = 7;
    sums = buffer_->combine(back);
    cuda(cudaStreamEndCapture(stream_, &graph));
    cuda(cudaGraphInstantiate(&executable, graph, 0));
    cuda(cudaGraphUpload(executable, stream_));
    cuda(cudaStreamSynchronize(stream_));
  }
  meet();
  for (int round = 0; round < rounds; ++round) {
    plan.seed = shared_.next();
    for (int rank = 0; rank < bootstrap_.size; ++rank) {
      const std::int64_t tokens = shared_.below(6) == 0 ? 0 : shared_.below(kTokens + 1);
      plan.tokens[static_cast<std::size_t>(rank)] = rank == replaying ? kTokens : tokens;
    }
    const std::uint64_t seed = shared_.next();
    const Inputs inputs = make_inputs(plan);
    if (me() == replaying) {
      put(places.x, inputs.x);
      put(places.ids, inputs.ids);
      put(places.weights, inputs.weights);
      captured.plan = plan;
      captured.routes = std::make_shared<const Routes>(plan);
      put(y_place, make_y(captured, seed, DType::kBFloat16));
      put(bias_place, make_bias(plan, seed, 0, DType::kBFloat16));
      cuda(cudaGraphLaunch(executable, stream_));
      calls_ += 2;
      check_rows(plan, captured.routes, plan.seed, captured.result.recv_x);
      check_ids(plan, captured.routes, captured.result);
      check_sums(plan, captured.routes, seed, DType::kBFloat16, 1, sums.combined_x.view,
                 sums.combined_topk_weights.view);
    } else {
      combine(dispatch(plan, inputs, false), seed, true);
    }
    if (own_.below(3) == 0 || up_->nearly_full() || down_->nearly_full()) settle();
  }
  settle();
  if (executable != nullptr) cuda(cudaGraphExecDestroy(executable));
  if (graph != nullptr) cuda(cudaGraphDestroy(graph));
  captured = {};
  sums = {};
  finish();
}

void StressRank::finish() {
  settle();
  meet();
}

void StressRank::meet() {
  const char mine = 0;
  std::vector<char> all(static_cast<std::size_t>(bootstrap_.size));
  bootstrap_.all_gather(&mine, all.data(), 1);
}

}  // namespace deep_moe::test
