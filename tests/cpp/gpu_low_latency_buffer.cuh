// A rank of GPU Buffers whose low-latency calls are checked against the scalar model of the CPU's tests.
#pragma once

#include <deep_moe/buffer.hpp>

#include <memory>
#include <vector>

#include "gpu_world.cuh"
#include "low_latency_model.hpp"

namespace deep_moe::test {

// A rank: its Buffer, its stream, and copies between that and the host. The stream is waited for before each copy: one
// from or to pageable memory holds the driver while it waits.
class LowBuffer {
 public:
  LowBuffer(const Bootstrap& bootstrap, std::int64_t staging_bytes, double timeout_seconds = 30.0,
            std::int64_t heap_bytes = 256 << 20) {
    cuda(cudaSetDevice(gpu_of(bootstrap.rank)));
    cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BufferOptions options;
    options.device = gpu_of(bootstrap.rank);
    options.num_nvl_bytes = heap_bytes;
    options.num_rdma_bytes = staging_bytes;
    options.low_latency_mode = true;
    options.timeout_seconds = timeout_seconds;
    options.current_stream = [stream = stream_] { return static_cast<void*>(stream); };
    buffer_ = std::make_unique<Buffer>(bootstrap, options);
  }
  ~LowBuffer() {
    cudaStreamSynchronize(stream_);
    kept_.clear();  // the stream has to outlive what was handed out
    buffer_.reset();
    cudaStreamDestroy(stream_);
  }
  LowBuffer(const LowBuffer&) = delete;
  LowBuffer& operator=(const LowBuffer&) = delete;

  Buffer* operator->() { return buffer_.get(); }
  cudaStream_t stream() const { return stream_; }
  void sync() { wait_for(stream_); }

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

struct LowBufferMode {
  bool weights = true, hook = false, fp8 = false, ue8m0 = false;
};

inline LowLatencyDispatchArgs on_gpu(LowBuffer& buffer, LowLatencyDispatchArgs args, const LowBufferMode& mode) {
  args.x.data = buffer.upload(args.x.data);
  args.topk_idx = buffer.upload(args.topk_idx);
  args.topk_weights = buffer.upload(args.topk_weights);
  args.use_fp8 = mode.fp8;
  args.use_ue8m0 = mode.ue8m0;
  args.return_recv_hook = mode.hook;
  return args;
}

inline void check_rows(LowBuffer& buffer, LowModel& model, int rank, const LowLatencyDispatchResult& result,
                       const LowBufferMode& mode) {
  LowLatencyDispatchResult host;
  host.recv_count = buffer.download(result.recv_count);
  host.handle.src_info = buffer.download(result.handle.src_info);
  host.handle.layout_range = buffer.download(result.handle.layout_range);
  host.recv_x.data = buffer.download(result.recv_x.data);
  if (!mode.fp8) return model.check_plain_rows(rank, host);
  host.recv_x.scales = buffer.download(result.recv_x.scales);
  model.check_fp8_rows(rank, host, mode.ue8m0, mode.ue8m0);
}

// The combine of what was dispatched, with outputs `y` of this rank's experts on the GPU.
inline LowLatencyCombineArgs combine_args(LowBuffer& buffer, LowModel& model, int rank,
                                          const LowLatencyDispatchResult& dispatched, const LowBufferMode& mode) {
  std::vector<char> y = model.outputs(rank);
  LowLatencyCombineArgs args = model.combine_args(rank, y, dispatched.handle.view());
  args.x = buffer.upload(args.x);
  args.topk_idx = buffer.upload(args.topk_idx);
  args.topk_weights = buffer.upload(args.topk_weights);
  args.return_recv_hook = mode.hook;
  return args;
}

inline void check_combine(LowBuffer& buffer, LowModel& model, int rank, const LowLatencyDispatchResult& dispatched,
                          const LowBufferMode& mode) {
  const LowLatencyCombineResult result =
      buffer->low_latency_combine(combine_args(buffer, model, rank, dispatched, mode));
  if (result.hook) result.hook();
  model.check_combined(rank, buffer.download(result.combined_x).view, mode.weights || !mode.hook);
}

}  // namespace deep_moe::test
