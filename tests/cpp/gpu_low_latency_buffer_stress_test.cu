// Low-latency calls of GPU Buffers one after another without a rest, each result checked; and what a call costs its
// host.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "gpu_low_latency_buffer.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

int num_calls(int usual) {
  const char* text = std::getenv("DEEP_MOE_GPU_STRESS_CALLS");
  return text == nullptr ? usual : std::min(usual, std::atoi(text));
}

// A dispatch and its combine.
struct Exchange {
  std::unique_ptr<LowModel> model;
  LowBufferMode mode;
  bool combine_hook = false;
  LowLatencyDispatchArgs args;
  TensorView y, ids, weights;
  LowLatencyDispatchResult rows;
  LowLatencyCombineResult sums;
};

LowShape draw_shape(Random& random, int num_ranks, std::uint64_t seed) {
  LowShape shape;
  shape.num_ranks = num_ranks;
  shape.max_tokens = 1 + random.below(24);
  shape.num_tokens.clear();
  for (int rank = 0; rank < num_ranks; ++rank) shape.num_tokens.push_back(random.below(shape.max_tokens + 1));
  shape.hidden = 128 * (1 + random.below(3));
  shape.num_experts = 1 + random.below(24);
  shape.topk = 1 + random.below(8);
  const DType types[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  shape.dtype = types[random.below(3)];
  shape.seed = seed;
  return shape;
}

Exchange draw_exchange(LowBuffer& buffer, Random& random, int rank, int num_ranks, std::uint64_t seed) {
  Exchange exchange;
  exchange.model = std::make_unique<LowModel>(draw_shape(random, num_ranks, seed));
  exchange.mode.weights = random.below(2) == 0;
  exchange.mode.hook = random.below(2) == 0;
  exchange.mode.fp8 = random.below(2) == 0;
  exchange.combine_hook = random.below(2) == 0;
  const bool short_ids = random.below(2) == 0;
  LowModel& model = *exchange.model;
  exchange.args = on_gpu(buffer, model.dispatch_args(rank, exchange.mode.weights, short_ids), exchange.mode);
  std::vector<char> y = model.outputs(rank);
  const LowLatencyCombineArgs back = model.combine_args(rank, y, {});
  exchange.y = buffer.upload(back.x);
  exchange.ids = exchange.args.topk_idx;
  exchange.weights = buffer.upload(back.topk_weights);
  return exchange;
}

// Calls what has a hook, in an order of this rank's own.
void call_hooks(std::vector<std::function<void()>>& hooks, Random& own) {
  for (std::size_t i = hooks.size(); i > 1; --i)
    std::swap(hooks[i - 1], hooks[static_cast<std::size_t>(own.below(static_cast<std::int64_t>(i)))]);
  for (const auto& hook : hooks) hook();
  hooks.clear();
}

void sometimes_sleep(Random& own) {
  if (own.below(5) == 0) std::this_thread::sleep_for(std::chrono::microseconds(own.below(400)));
}

// Rounds of up to three exchanges: all inputs first, then all calls without a wait of the host, then all checks.
void random_exchanges(const Bootstrap& bootstrap, int calls, std::uint64_t seed, std::int64_t staging_bytes) {
  const int rank = bootstrap.rank;
  LowBuffer buffer(bootstrap, staging_bytes);
  Random same(seed), own(seed * 31 + static_cast<std::uint64_t>(rank) + 1);
  for (int done = 0; done < calls;) {
    std::vector<Exchange> open(static_cast<std::size_t>(1 + same.below(3)));
    for (Exchange& exchange : open)
      exchange = draw_exchange(buffer, same, rank, bootstrap.size, seed * 100000 + static_cast<std::uint64_t>(++done));
    done += static_cast<int>(open.size());
    std::vector<std::function<void()>> hooks;
    for (Exchange& exchange : open) {
      sometimes_sleep(own);
      exchange.rows = buffer->low_latency_dispatch(exchange.args);
      if (exchange.rows.hook) hooks.push_back(exchange.rows.hook);
    }
    call_hooks(hooks, own);
    for (Exchange& exchange : open) {
      sometimes_sleep(own);
      LowLatencyCombineArgs args;
      args.x = exchange.y;
      args.topk_idx = exchange.ids;
      args.topk_weights = exchange.weights;
      args.handle = exchange.rows.handle.view();
      args.return_recv_hook = exchange.combine_hook;
      exchange.sums = buffer->low_latency_combine(args);
      if (exchange.sums.hook) hooks.push_back(exchange.sums.hook);
    }
    call_hooks(hooks, own);
    for (Exchange& exchange : open) {
      check_rows(buffer, *exchange.model, rank, exchange.rows, exchange.mode);
      exchange.model->check_combined(rank, buffer.download(exchange.sums.combined_x).view,
                                     exchange.mode.weights || !exchange.combine_hook);
    }
    buffer->check();
    buffer.clear();
  }
}

// ---- Large calls whose rows are made and compared on the GPU.

// Whole numbers from -64 to 63, which eight times are exact in bf16.
__device__ int value_of(int call, int rank, std::int64_t token, std::int64_t h) {
  std::uint64_t mix = (static_cast<std::uint64_t>(call) * 8 + static_cast<std::uint64_t>(rank)) << 40;
  mix = (mix ^ static_cast<std::uint64_t>(token) << 20 ^ static_cast<std::uint64_t>(h)) * 0x9e3779b97f4a7c15ull;
  return static_cast<int>((mix ^ (mix >> 29)) >> 20 & 127) - 64;
}
__device__ std::uint16_t bf16_of(int value) {
  return static_cast<std::uint16_t>(__float_as_uint(static_cast<float>(value)) >> 16);
}

__global__ void fill_kernel(std::uint16_t* x, int call, int rank, std::int64_t tokens, std::int64_t hidden) {
  for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < tokens * hidden; i += gridDim.x * blockDim.x)
    x[i] = bf16_of(value_of(call, rank, i / hidden, i % hidden));
}

// Rows [experts, sources * tokens, hidden], each source's tokens in order; or the sums of one rank's (`rank` >= 0),
// `times` each value.
__global__ void compare_kernel(const std::uint16_t* rows, int call, int rank, int times, std::int64_t blocks,
                               std::int64_t sources, std::int64_t tokens, std::int64_t hidden,
                               unsigned long long* bad) {
  const std::int64_t total = blocks * sources * tokens * hidden;
  unsigned long long mine = 0;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t row = i / hidden % (sources * tokens);
    const int src = rank >= 0 ? rank : static_cast<int>(row / tokens);
    mine += rows[i] != bf16_of(times * value_of(call, src, row % tokens, i % hidden));
  }
  if (mine != 0) atomicAdd(bad, mine);
}

void large_calls(const Bootstrap& bootstrap, int calls, std::int64_t tokens, std::int64_t hidden) {
  constexpr std::int64_t kTopk = 8, kExperts = 16;
  const int rank = bootstrap.rank, ranks = bootstrap.size;
  LowBuffer buffer(bootstrap, 0, 30.0, std::int64_t{2} << 30);
  const std::int64_t num_local = kExperts / ranks;
  const Tensor x = buffer->empty(DType::kBFloat16, {tokens, hidden});
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens * kTopk));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) % kTopk;
  std::vector<float> ones(ids.size(), 1.0f);
  LowLatencyDispatchArgs args;
  args.x.data = x.view;
  args.topk_idx = buffer.upload(TensorView::contiguous(ids.data(), DType::kInt64, {tokens, kTopk}));
  args.num_max_dispatch_tokens_per_rank = tokens;
  args.num_experts = kExperts;
  args.use_fp8 = false;
  const TensorView weights = buffer.upload(TensorView::contiguous(ones.data(), DType::kFloat32, {tokens, kTopk}));
  const Tensor bad = buffer->empty(DType::kInt64, {1});
  const cudaStream_t stream = buffer.stream();
  cuda(cudaMemsetAsync(bad.view.data, 0, 8, stream));
  for (int call = 0; call < calls; ++call) {
    fill_kernel<<<16, 512, 0, stream>>>(x.as<std::uint16_t>(), call, rank, tokens, hidden);
    const LowLatencyDispatchResult rows = buffer->low_latency_dispatch(args);
    const std::int64_t full = std::min(num_local, std::max<std::int64_t>(0, kTopk - rank * num_local));
    compare_kernel<<<32, 512, 0, stream>>>(rows.recv_x.data.as<std::uint16_t>(), call, -1, 1, full, ranks, tokens,
                                           hidden, bad.as<unsigned long long>());
    LowLatencyCombineArgs back;
    back.x = rows.recv_x.data.view;
    back.topk_idx = args.topk_idx;
    back.topk_weights = weights;
    back.handle = rows.handle.view();
    const LowLatencyCombineResult sums = buffer->low_latency_combine(back);
    compare_kernel<<<32, 512, 0, stream>>>(sums.combined_x.as<std::uint16_t>(), call, rank, static_cast<int>(kTopk), 1,
                                           1, tokens, hidden, bad.as<unsigned long long>());
    if (call % 100 != 99 && call != calls - 1) continue;
    const Tensor counts = buffer.download(rows.recv_count);
    for (std::int64_t local = 0; local < num_local; ++local)
      expect(counts.as<std::int32_t>()[local] == (local < full ? ranks * tokens : 0), "rows of each expert");
    const std::int64_t wrong = buffer.download(bad).as<std::int64_t>()[0];
    expect(wrong == 0, std::to_string(wrong) + " wrong elements by call " + std::to_string(call));
  }
  buffer->check();
}

// Microseconds of wall time a pair of one token, from one thread a rank, results dropped at once.
void eager_pairs(const Bootstrap& bootstrap, std::int64_t num_tokens, bool with_weights) {
  constexpr int kPairs = 1000, kRepeats = 5;
  LowBuffer buffer(bootstrap, 0, 30.0, std::int64_t{3} << 30);
  LowShape shape;
  shape.num_ranks = bootstrap.size;
  shape.num_tokens.assign(static_cast<std::size_t>(bootstrap.size), num_tokens);
  shape.max_tokens = 128;
  shape.hidden = 7168;
  shape.num_experts = 256;
  shape.topk = 8;
  LowModel model(shape);
  LowLatencyDispatchArgs args = on_gpu(buffer, model.dispatch_args(bootstrap.rank, with_weights),
                                       LowBufferMode{with_weights, false, true, false});
  const Tensor y = buffer->empty(DType::kBFloat16, {256 / bootstrap.size, bootstrap.size * 128, 7168});
  cuda(cudaMemsetAsync(y.view.data, 0, y.view.num_bytes(), buffer.stream()));
  std::vector<float>& raw = model.inputs[static_cast<std::size_t>(bootstrap.rank)].weights;
  const TensorView weights = buffer.upload(TensorView::contiguous(raw.data(), DType::kFloat32, {num_tokens, 8}));
  const auto pair = [&] {
    const LowLatencyDispatchResult rows = buffer->low_latency_dispatch(args);
    LowLatencyCombineArgs back;
    back.x = y.view;
    back.topk_idx = args.topk_idx;
    back.topk_weights = weights;
    back.handle = rows.handle.view();
    buffer->low_latency_combine(back);
  };
  std::vector<double> whole, issued;
  char none[8] = {}, all[8 * 16];
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    buffer.sync();
    bootstrap.all_gather(none, all, 8);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kPairs; ++i) pair();
    const auto end = std::chrono::steady_clock::now();
    buffer.sync();
    const auto idle = std::chrono::steady_clock::now();
    if (repeat == 0) continue;
    issued.push_back(std::chrono::duration<double>(end - begin).count() * 1e6 / kPairs);
    whole.push_back(std::chrono::duration<double>(idle - begin).count() * 1e6 / kPairs);
  }
  std::sort(whole.begin(), whole.end());
  std::sort(issued.begin(), issued.end());
  if (bootstrap.rank == 0)
    std::printf("eager pair, R=%d, %d GPUs, T=%lld%s | %.1f us (calls returned after %.1f)\n", bootstrap.size,
                num_gpus_of(bootstrap.size), static_cast<long long>(num_tokens),
                with_weights ? ", weights at dispatch" : "", whole[whole.size() / 2], issued[issued.size() / 2]);
  buffer->check();
}

}  // namespace

TEST_CASE("low latency on GPU Buffers: stress of ten thousand random calls on two ranks" * doctest::skip(no_gpu())) {
  check_all(run_threads(2, [](const Bootstrap& b) { random_exchanges(b, num_calls(10000), 1, 16 << 20); }));
}

TEST_CASE("low latency on GPU Buffers: stress of one rank and more than two, with staging that grows from nothing" *
          doctest::skip(no_gpu())) {
  for (const int num_ranks : {1, 3, 4, 8})
    check_all(run_threads(num_ranks, [](const Bootstrap& b) { random_exchanges(b, num_calls(300), 2, 0); }));
}

TEST_CASE("low latency on GPU Buffers: stress of rows that all go to the first experts, a thousand times" *
          doctest::skip(no_gpu())) {
  check_all(run_threads(2, [](const Bootstrap& b) { large_calls(b, num_calls(1000), 1024, 7168); }));
}

TEST_CASE("timing: eager low-latency pairs of GPU Buffers" * doctest::skip(no_gpu())) {
  for (const std::int64_t tokens : {1, 128})
    for (const int num_ranks : {1, 2})
      for (const bool weights : {true, false})
        check_all(run_threads(num_ranks, [&](const Bootstrap& b) { eager_pairs(b, tokens, weights); }));
}
