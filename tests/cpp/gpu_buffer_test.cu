// The Buffer on a GPU against the same scalar model as on the
// CPU: ranks are threads of this process that go round its GPUs.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <chrono>

#include "gpu_world.cuh"
#include "high_throughput_model.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

// A rank's own stream. Copies from and to pageable memory hold the driver while they wait for the work before them,
// which may be a kernel that waits for a rank that is about to launch: so the stream is waited for first.
class OwnStreams {
 public:
  OwnStreams() { cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OwnStreams() { cudaStreamDestroy(stream_); }

  BufferOptions options(std::int64_t heap_bytes, double timeout_seconds) const {
    BufferOptions options;
    cuda(cudaGetDevice(&options.device));
    options.num_nvl_bytes = heap_bytes;
    options.timeout_seconds = timeout_seconds;
    options.current_stream = [stream = stream_] { return static_cast<void*>(stream); };
    return options;
  }

  Memory memory() const {
    Memory memory;
    memory.upload = memory.upload_into_heap = [stream = stream_](Buffer& buffer, const TensorView& view) {
      Tensor tensor = buffer.empty(view.dtype, {view.shape[0], view.shape[1]});
      wait_for(stream);
      if (view.numel() > 0)
        cuda(cudaMemcpyAsync(tensor.view.data, view.data, view.num_bytes(), cudaMemcpyHostToDevice, stream));
      wait_for(stream);
      return tensor;
    };
    memory.download = [stream = stream_](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      wait_for(stream);
      Tensor host = make_host_tensor(DType::kUInt8, {static_cast<std::int64_t>(tensor.view.num_bytes())});
      if (tensor.view.numel() > 0)
        cuda(
            cudaMemcpyAsync(host.view.data, tensor.view.data, tensor.view.num_bytes(), cudaMemcpyDeviceToHost, stream));
      wait_for(stream);
      return host;
    };
    return memory;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

void on_ranks(int num_ranks, const std::function<void(const Bootstrap&, const OwnStreams&)>& body) {
  reserve_local_memory_of_tools();
  check_all(run_threads(num_ranks, [&](const Bootstrap& bootstrap) {
    cuda(cudaSetDevice(gpu_of(bootstrap.rank)));
    const OwnStreams streams;
    body(bootstrap, streams);
  }));
}

const Shape kShapes[] = {
    {1, {5}, 64, 4, 2},         {2, {16, 0}, 512, 16, 4},          {2, {0, 0}, 512, 16, 4},
    {3, {7, 33, 1}, 72, 10, 3}, {4, {100, 65, 63, 5}, 256, 30, 8},
};

}  // namespace

TEST_CASE("GPU Buffer: dispatch and combine equal the scalar model") {
  if (no_gpu()) return;
  for (const Shape& shape : kShapes) {
    CAPTURE(shape.num_ranks);
    on_ranks(shape.num_ranks, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
      // Under compute-sanitizer a copy waits for the kernels of all ranks, which may wait for what comes behind the
      // copy.
      Memory memory = streams.memory();
      memory.meet = [&bootstrap] {
        char none[8] = {};
        std::vector<char> all(sizeof(none) * static_cast<std::size_t>(bootstrap.size));
        bootstrap.all_gather(none, all.data(), sizeof(none));
      };
      round_trips(bootstrap, shape, 3, -1, streams.options(64 << 20, 30), memory);
    });
  }
}

TEST_CASE("GPU Buffer: the heap grows from nothing") {
  if (no_gpu()) return;
  const Shape shape{2, {}, 1024, 24, 4};
  on_ranks(2, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
    round_trips(bootstrap, shape, 10, 900, streams.options(0, 20), streams.memory());
  });
}

TEST_CASE("GPU Buffer: many calls, memory is reused") {
  if (no_gpu()) return;
  const Shape shape{2, {64, 80}, 256, 16, 4};
  on_ranks(2, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
    BufferOptions options = streams.options(64 << 20, 20);
    Buffer buffer(bootstrap, options);
    for (std::uint64_t step = 0; step < 60; ++step) round_trip(buffer, shape, step, -1, streams.memory());
    expect(buffer.memory_stats().heap_bytes <= (65 << 20), "the heap has not grown");
  });
}

TEST_CASE("GPU Buffer: a rank that leaves is noticed long before the deadline") {
  if (no_gpu()) return;
  const Shape shape{2, {24, 24}, 256, 16, 4};
  on_ranks(2, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
    Buffer buffer(bootstrap, streams.options(64 << 20, 60));
    const Memory memory = streams.memory();
    round_trip(buffer, shape, 1, -1, memory);
    Input input = make_input(shape, buffer.rank(), 1);
    const Uploaded uploaded = upload(buffer, memory, input, shape);
    char none[8] = {}, all[16];
    bootstrap.all_gather(none, all, 8);
    const auto start = std::chrono::steady_clock::now();
    if (buffer.rank() == 1) {
      buffer.destroy();
    } else {
      expect_throw<PeerLostError>([&] { buffer.dispatch(dispatch_args(uploaded, shape)); }, "rank 1");
      expect_throw<PeerLostError>([&] { buffer.check(); }, "destroyed");
    }
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "noticed soon");
    bootstrap.all_gather(none, all, 8);
  });
}

TEST_CASE("GPU Buffer: refusals, different calls and a silent rank are named") {
  if (no_gpu()) return;
  const Shape shape{2, {24, 24}, 256, 16, 4};
  on_ranks(2, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
    Buffer buffer(bootstrap, streams.options(64 << 20, 3));
    const Memory memory = streams.memory();
    round_trip(buffer, shape, 1, -1, memory);
    Input input = make_input(shape, buffer.rank(), 1);
    const Uploaded uploaded = upload(buffer, memory, input, shape);
    DispatchArgs args = dispatch_args(uploaded, shape);
    if (buffer.rank() == 1) {
      args.expert_alignment = 0;
      expect_throw<ArgumentError>([&] { buffer.dispatch(args); }, "expert_alignment");
      args.expert_alignment = 1;
    } else {
      expect_throw<PeerRefusedError>([&] { buffer.dispatch(args); }, "expert_alignment");
    }
    round_trip(buffer, shape, 2, -1, memory);
    if (buffer.rank() == 1) args.num_experts = 32;
    expect_throw<CallMismatchError>([&] { buffer.dispatch(args); }, "num_experts=32");
    args.num_experts = shape.num_experts;
    args.num_worst_tokens = 0;
    round_trip(buffer, shape, 3, -1, memory);
    char none[8] = {}, all[16];
    bootstrap.all_gather(none, all, 8);
    if (buffer.rank() == 0) {
      expect_throw<TimeoutError>([&] { buffer.dispatch(args); }, "rank 1");
      expect_throw<TimeoutError>([&] { buffer.check(); }, "rank 1");
    }
    bootstrap.all_gather(none, all, 8);
    if (buffer.rank() == 0) expect_throw<TimeoutError>([&] { buffer.reset(); }, "rank 1");
    bootstrap.all_gather(none, all, 8);
    buffer.reset();
    buffer.check();
    for (std::uint64_t step = 4; step < 8; ++step) round_trip(buffer, shape, step, -1, memory);
    expect(buffer.memory_stats().quarantined_bytes == 0, "nothing is quarantined after the reset");
  });
  CHECK_NOTHROW(sync_gpus());
}

TEST_CASE("GPU Buffer: a failure behind a refusal that nobody has read yet is not lost") {
  if (no_gpu()) return;
  const Shape shape{2, {24, 24}, 256, 16, 4};
  on_ranks(2, [&](const Bootstrap& bootstrap, const OwnStreams& streams) {
    Buffer buffer(bootstrap, streams.options(64 << 20, 2));
    const Memory memory = streams.memory();
    Input input = make_input(shape, buffer.rank(), 1);
    const Uploaded uploaded = upload(buffer, memory, input, shape);
    const DispatchResult sent = buffer.dispatch(dispatch_args(uploaded, shape));
    CombineArgs args;
    args.x = sent.recv_x.data.view;
    args.handle = sent.handle.view();
    char none[8] = {}, all[16];
    if (buffer.rank() == 0) {
      const CombineResult refused = buffer.combine(args), alone = buffer.combine(args);
      bootstrap.all_gather(none, all, 8);
      cuda(cudaDeviceSynchronize());
      expect_throw<PeerRefusedError>([&] { buffer.check(); }, "rank 1");
      expect_throw<TimeoutError>([&] { buffer.check(); }, "rank 1");
      expect_throw<TimeoutError>([&] { buffer.combine(args); }, "rank 1");
    } else {
      bootstrap.all_gather(none, all, 8);
      args.x.shape[0] += 1;
      expect_throw<ArgumentError>([&] { buffer.combine(args); }, "x: got");
    }
    bootstrap.all_gather(none, all, 8);
    buffer.reset();
    round_trip(buffer, shape, 2, -1, memory);
  });
}
