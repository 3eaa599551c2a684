// The low-latency calls of Buffers on GPUs, against the same scalar model as on the CPU: ranks are threads of this
// process that share one GPU.
#include "gpu_world.cuh"
#include "low_latency_model.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

// A rank: its Buffer, its stream, and copies between that and the host. The stream is waited for before each copy: one
// from or to pageable memory holds the driver while it waits.
class LowBuffer {
 public:
  LowBuffer(const Bootstrap& bootstrap, std::int64_t staging_bytes, double timeout_seconds = 30.0) {
    cuda(cudaSetDevice(0));
    cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BufferOptions options;
    options.device = 0;
    options.num_nvl_bytes = 256 << 20;
    options.num_rdma_bytes = staging_bytes;
    options.low_latency_mode = true;
    options.timeout_seconds = timeout_seconds;
    options.current_stream = [stream = stream_] { return static_cast<void*>(stream); };
    buffer_ = std::make_unique<Buffer>(bootstrap, options);
  }
  ~LowBuffer() {
    cudaStreamSynchronize(stream_);
    buffer_.reset();
    cudaStreamDestroy(stream_);
  }
  LowBuffer(const LowBuffer&) = delete;
  LowBuffer& operator=(const LowBuffer&) = delete;

  Buffer* operator->() { return buffer_.get(); }
  void sync() { cuda(cudaStreamSynchronize(stream_)); }

  // The view's tensor on the GPU; kept until clear().
  TensorView upload(const TensorView& view) {
    if (!view.defined()) return view;
    std::vector<std::int64_t> shape(view.shape, view.shape + view.num_dims);
    Tensor tensor = buffer_->empty(view.dtype, shape);
    sync();
    if (view.numel() > 0)
      cuda(cudaMemcpyAsync(tensor.view.data, view.data, view.num_bytes(), cudaMemcpyHostToDevice, stream_));
    sync();
    kept_.push_back(tensor);
    return tensor.view;
  }
  Tensor download(const Tensor& tensor) {
    Tensor host;
    host.view = tensor.view;
    host.view.device = kCpuDevice;
    auto bytes = std::make_shared<std::vector<char>>(tensor.view.num_bytes() + 1);
    sync();
    if (tensor.view.numel() > 0)
      cuda(cudaMemcpyAsync(bytes->data(), tensor.view.data, tensor.view.num_bytes(), cudaMemcpyDeviceToHost, stream_));
    sync();
    host.view.data = bytes->data();
    host.owner = bytes;
    return host;
  }
  void clear() { kept_.clear(); }

 private:
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Buffer> buffer_;
  std::vector<Tensor> kept_;
};

struct Mode {
  bool weights = true, hook = false, fp8 = false, ue8m0 = false;
};

LowLatencyDispatchArgs on_gpu(LowBuffer& buffer, LowLatencyDispatchArgs args, const Mode& mode) {
  args.x.data = buffer.upload(args.x.data);
  args.topk_idx = buffer.upload(args.topk_idx);
  args.topk_weights = buffer.upload(args.topk_weights);
  args.use_fp8 = mode.fp8;
  args.use_ue8m0 = mode.ue8m0;
  args.return_recv_hook = mode.hook;
  return args;
}

void check_rows(LowBuffer& buffer, LowModel& model, int rank, const LowLatencyDispatchResult& result,
                const Mode& mode) {
  LowLatencyDispatchResult host;
  host.recv_count = buffer.download(result.recv_count);
  host.handle.src_info = buffer.download(result.handle.src_info);
  host.handle.layout_range = buffer.download(result.handle.layout_range);
  host.recv_x.data = buffer.download(result.recv_x.data);
  if (!mode.fp8) return model.check_plain_rows(rank, host);
  host.recv_x.scales = buffer.download(result.recv_x.scales);
  model.check_fp8_rows(rank, host, mode.ue8m0, mode.ue8m0);
}

void check_combine(LowBuffer& buffer, LowModel& model, int rank, const LowLatencyDispatchResult& dispatched,
                   const Mode& mode) {
  std::vector<char> y = model.outputs(rank);
  LowLatencyCombineArgs args = model.combine_args(rank, y, dispatched.handle.view());
  args.x = buffer.upload(args.x);
  args.topk_idx = buffer.upload(args.topk_idx);
  args.topk_weights = buffer.upload(args.topk_weights);
  args.return_recv_hook = mode.hook;
  const LowLatencyCombineResult result = buffer->low_latency_combine(args);
  if (result.hook) result.hook();
  model.check_combined(rank, buffer.download(result.combined_x).view, mode.weights || !mode.hook);
}

void on_ranks(int num_ranks, const std::function<void(const Bootstrap&)>& body) {
  check_all(run_threads(num_ranks, body));
}

}  // namespace

TEST_CASE("low latency on GPU Buffers: all modes equal the scalar model" * doctest::skip(no_gpu())) {
  for (const int num_ranks : {1, 2, 3})
    for (const std::int64_t staging : {std::int64_t{0}, std::int64_t{32} << 20}) {
      CAPTURE(num_ranks);
      on_ranks(num_ranks, [&](const Bootstrap& bootstrap) {
        const int rank = bootstrap.rank;
        LowBuffer buffer(bootstrap, staging);
        LowShape shape;
        shape.num_ranks = num_ranks;
        shape.num_tokens.assign(static_cast<std::size_t>(num_ranks), 16);
        shape.num_tokens.back() = 5;
        shape.hidden = 1024;
        for (const bool hook : {false, true})
          for (const bool weights : {true, false})
            for (const int kind : {0, 1, 2}) {
              ++shape.seed;
              LowModel model(shape);
              const Mode mode{weights, hook, kind > 0, kind == 2};
              const LowLatencyDispatchResult result =
                  buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, weights), mode));
              expect(static_cast<bool>(result.hook) == hook, "a hook if asked for");
              if (result.hook) result.hook();
              check_rows(buffer, model, rank, result, mode);
              check_combine(buffer, model, rank, result, mode);
              buffer.clear();
            }
      });
    }
}

TEST_CASE("low latency on GPU Buffers: three in flight, a fourth is refused, hooks in any order" *
          doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20);
    const Mode mode{true, true, false, false};
    for (int round = 0; round < 20; ++round) {
      std::vector<std::unique_ptr<LowModel>> models;
      std::vector<LowLatencyDispatchResult> results;
      for (int i = 0; i < 3; ++i) {
        LowShape shape;
        shape.seed = static_cast<std::uint64_t>(3 * round + i + 1);
        models.push_back(std::make_unique<LowModel>(shape));
        results.push_back(buffer->low_latency_dispatch(on_gpu(buffer, models.back()->dispatch_args(rank, true), mode)));
      }
      const int first = rank == 0 ? 2 : 1;
      for (int i = 0; i < 3; ++i) results[static_cast<std::size_t>((first + i) % 3)].hook();
      for (std::size_t i = 0; i < 3; ++i) {
        check_rows(buffer, *models[i], rank, results[i], mode);
        check_combine(buffer, *models[i], rank, results[i], mode);
      }
      buffer.clear();
    }
  });
}

TEST_CASE("low latency on GPU Buffers: a refused call names the reason to the peers, and the next one works" *
          doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20);
    LowModel model{LowShape{}};
    const Mode mode;
    for (int round = 0; round < 6; ++round) {
      LowLatencyDispatchArgs args = on_gpu(buffer, model.dispatch_args(rank, true), mode);
      if (rank == 1) {
        args.num_max_dispatch_tokens_per_rank = 3;
        expect_throw<ArgumentError>([&] { buffer->low_latency_dispatch(args); }, "16");
      } else {
        const LowLatencyDispatchResult lost = buffer->low_latency_dispatch(args);
        buffer.sync();
        expect_throw<PeerRefusedError>([&] { buffer->check(); }, "num_max_dispatch_tokens_per_rank");
      }
      const LowLatencyDispatchResult result =
          buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, true), mode));
      check_rows(buffer, model, rank, result, mode);
      check_combine(buffer, model, rank, result, mode);
      buffer.clear();
    }
  });
}

TEST_CASE("low latency on GPU Buffers: a late rank is named" * doctest::skip(no_gpu())) {
  on_ranks(2, [&](const Bootstrap& bootstrap) {
    const int rank = bootstrap.rank;
    LowBuffer buffer(bootstrap, 32 << 20, 2.0);
    LowModel model{LowShape{}};
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(5));
      return;
    }
    const LowLatencyDispatchResult lost =
        buffer->low_latency_dispatch(on_gpu(buffer, model.dispatch_args(rank, true), Mode{}));
    buffer.sync();
    expect_throw<TimeoutError>([&] { buffer->check(); }, "rank 1");
  });
}
