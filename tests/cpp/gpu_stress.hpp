// One rank of a stress of random calls: what is called, with which inputs, and what must come of it.
#pragma once

#include <algorithm>
#include <functional>
#include <list>
#include <memory>

#include "gpu_stress_plan.hpp"
#include "gpu_world.cuh"

namespace deep_moe::test {

// Pinned host memory with device memory beside it; taken piece by piece, and all at once given back.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    cuda(cudaHostAlloc(reinterpret_cast<void**>(&host_), bytes, cudaHostAllocDefault));
    cuda(cudaMalloc(reinterpret_cast<void**>(&device_), bytes));
  }
  ~Arena() {
    cudaFreeHost(host_);
    cudaFree(device_);
  }
  struct Piece {
    char *host, *device;
    std::size_t bytes;
  };
  Piece take(std::size_t bytes) {
    const std::size_t at = used_;
    used_ += (bytes + 255) / 256 * 256;
    expect(used_ <= bytes_, "the arena is large enough");
    return {host_ + at, device_ + at, bytes};
  }
  bool nearly_full() const { return used_ > bytes_ / 2; }
  void give_back() { used_ = 0; }

 private:
  char *host_ = nullptr, *device_ = nullptr;
  std::size_t bytes_, used_ = 0;
};

class StressRank {
 public:
  StressRank(const Bootstrap& bootstrap, std::uint64_t seed, std::int64_t heap_bytes);
  ~StressRank();

  void random_calls(int count);
  // `rounds` of a dispatch with a fixed number of rows and a combine.
  void replay_beside_eager(int replaying, int rounds);
  // All results are right, no kernel has reported anything, and all ranks are here: memory may be freed.
  void finish();

 private:
  // A dispatch whose handle may still be used.
  struct Live {
    Plan plan;
    std::shared_ptr<const Routes> routes;
    DispatchResult result;
  };
  struct Inputs {
    TensorView x, scales, ids, weights;
  };

  Plan draw_plan();
  Inputs make_inputs(const Plan& plan);
  TensorView upload(const Arena::Piece& piece, DType dtype, std::initializer_list<std::int64_t> shape);
  const char* download(const TensorView& tensor);
  void later(std::function<void()> check) { checks_.push_back(std::move(check)); }
  void settle();
  void meet();
  template <typename Call>
  auto on_streams(StreamOptions* streams, const Call& call);

  Live dispatch(const Plan& plan, const Inputs& inputs, bool layout_first);
  LayoutResult layout(const Plan& plan, const std::shared_ptr<const Routes>& routes, const TensorView& ids);
  void check_rows(const Plan& plan, std::shared_ptr<const Routes> routes, std::uint64_t row_seed,
                  const OwnedPayload& rows);
  void check_ids(const Plan& plan, std::shared_ptr<const Routes> routes, const DispatchResult& result);
  void cached(const Live& live);
  void combine(const Live& live, std::uint64_t seed, bool simple);
  TensorView make_y(const Live& live, std::uint64_t seed, DType dtype);
  TensorView make_bias(const Plan& plan, std::uint64_t seed, int which, DType dtype);
  void check_sums(const Plan& plan, std::shared_ptr<const Routes> routes, std::uint64_t seed, DType dtype,
                  int num_biases, const TensorView& sums, const TensorView& weights);

  int me() const { return bootstrap_.rank; }

  Bootstrap bootstrap_;
  Random shared_, own_;  // drawn alike by all ranks; by this one alone
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  std::unique_ptr<Arena> up_, down_, fixed_;  // inputs; results; what a graph reads
  std::unique_ptr<Buffer> buffer_;
  std::list<Live> live_;
  std::vector<Tensor> held_;  // for a while
  std::vector<std::function<void()>> checks_;
  std::int64_t calls_ = 0;
};

// Makes the call behind the stream or behind an event of it, and has the stream wait for it, in one of two ways.
template <typename Call>
auto StressRank::on_streams(StreamOptions* streams, const Call& call) {
  if (own_.below(3) == 0) {
    cuda(cudaEventRecord(event_, stream_));
    streams->previous_event = event_;
  }
  streams->async_finish = own_.below(3) == 0;
  auto result = call();
  if (streams->async_finish) {
    cuda(cudaEventRecord(event_, static_cast<cudaStream_t>(buffer_->comm_stream())));
    cuda(cudaStreamWaitEvent(stream_, event_, 0));
  }
  ++calls_;
  return result;
}

}  // namespace deep_moe::test
