// The GPU implementation of a Buffer: high-throughput calls between GPUs that reach each other's memory.
//
// A call runs on the private comm stream, behind the caller's stream. Dispatch launches layout + notify and the kernel
// that moves rows back to back, into the block that this rank has offered; the host reads the counts from mapped memory
// while rows move, shrinks the block and hands out its parts. Where some rank's offer was too small all ranks learn it
// from the same words, grow together, and launch the second kernel again.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "cuda/device_world.hpp"
#include "runtime/buffer_impl.hpp"

namespace deep_moe::cuda {

class CudaBuffer final : public Buffer::Impl {
 public:
  CudaBuffer(const Bootstrap& bootstrap, const BufferOptions& options);
  ~CudaBuffer() override;

  LayoutResult get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                   const StreamOptions& streams) override;
  DispatchResult dispatch(const DispatchArgs& args) override;
  CombineResult combine(const CombineArgs& args) override;
  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArgs& args) override;
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArgs& args) override;
  void clean_low_latency_buffer(std::int64_t max_tokens, std::int64_t hidden, std::int64_t num_experts) override;
  void update_mask(int peer, bool masked) override;
  void query_mask(std::int32_t* status) override;
  void clean_mask() override;
  Tensor empty(DType dtype, const std::vector<std::int64_t>& shape) override;
  Tensor local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) override;
  MemoryStats memory_stats() override;
  void refuse(const std::string& call, const std::string& reason) override;
  void* comm_stream() const override;
  void record_stream(const TensorView& tensor, void* stream) override;
  void check() override;
  void reset() override;
  void destroy() override;

 private:
  class Streams;       // joins the caller's stream and the comm stream around a call
  struct RowMovement;  // what one dispatch works with

  std::unique_lock<std::mutex> lock_call();
  Stream current_stream() const;
  // Throws what kernels have reported since the last look.
  void take_kernel_error();
  void check_or_refuse(const layout::CallSignature& signature, const std::function<void()>& checks);
  [[noreturn]] void refuse_and_throw(const layout::CallSignature& signature, std::exception_ptr error);
  Tensor device_tensor(DType dtype, const std::vector<std::int64_t>& shape, Stream user);

  void prepare_route(const DispatchArgs& args, RowMovement* move);
  void offer_block(const DispatchArgs& args, RowMovement* move);
  void launch_notified(const DispatchArgs& args, RowMovement* move);
  void launch_placed(const DispatchArgs& args, RowMovement* move);
  void read_counts(const DispatchArgs& args, RowMovement* move);
  void grow_and_move(const DispatchArgs& args, RowMovement* move);
  DispatchResult hand_out(const DispatchArgs& args, RowMovement* move);
  void check_device_ids(const TensorView& topk_idx, std::int64_t num_experts) const;
  kernels::DispatchArgs row_arguments(const DispatchArgs& args, const RowMovement& move) const;
  Block shared_block(std::size_t bytes, Stream user, const char* call);
  layout::Place stage(const TensorView& rows, std::int64_t num_rows, Stream comm, std::vector<Block>* staging);

  std::mutex call_mutex_;
  std::atomic<bool> destroyed_{false};
  std::shared_ptr<DeviceWorld> world_;
  std::exception_ptr failure_;
  std::uint32_t sequence_ = 0;
  layout::CallSignature last_signature_;  // of the newest call, for the text of a mismatch
  bool check_ids_ = false;                // DEEP_MOE_CHECK=1
  std::mutex scratch_mutex_;
  Tensor scratch_[2];
};

}  // namespace deep_moe::cuda
