// The GPU implementation of a Buffer: high-throughput calls between GPUs that reach each other's memory.
//
// A call runs on the caller's stream, or on the private comm stream behind it (call_streams.hpp). Dispatch launches
// layout + notify and the kernel that moves rows back to back, into the block that this rank has offered; the host
// reads the counts from mapped memory while rows move, shrinks the block and hands out its parts. Where some rank's
// offer was too small all ranks learn it from the same words and grow together; what still does not fit goes in waves.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "cuda/call_streams.hpp"
#include "cuda/cuda_low_latency.hpp"
#include "cuda/device_world.hpp"
#include "cuda/spill.hpp"
#include "layout/rows.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/call_gate.hpp"

namespace deep_moe::cuda {

class CudaBuffer final : public Buffer::Impl, public std::enable_shared_from_this<CudaBuffer> {
 public:
  struct RowRange {
    std::int64_t first = 0, count = 0;
  };

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
  std::string memory_kind() override;
  void refuse(const std::string& call, const std::string& reason) override;
  void* comm_stream() const override;
  void record_stream(const TensorView& tensor, void* stream) override;
  void check() override;
  void reset() override;
  void destroy() override;

 private:
  static constexpr int kDefaultNumSms = 20;

  struct Call;         // a call under way
  struct RowMovement;  // what one dispatch works with

  CallGate& open_gate();  // in the process that made the Buffer
  Stream current_stream() const;
  std::string failure_text() const noexcept;  // empty: has not failed
  int num_blocks(int num_sms) const { return std::min(num_sms > 0 ? num_sms : kDefaultNumSms, most_blocks_); }
  bool is_captured() const;  // what this thread does on its stream or the comm stream
  void check_shrink(const char* call) const;
  void check_unmasked(const char* call) const;
  CallStreams join_streams(const StreamOptions& options);
  // Throws what kernels have reported since the last look, or what a call before has found and not thrown.
  void take_kernel_error();
  // Runs the checks, then the call; a refusal is told to the peers. Errors that all ranks meet alike leave the Buffer
  // usable, any other fails it.
  template <typename Check, typename Body>
  auto run(const layout::CallSignature& signature, const Check& checks, const Body& body);
  // The same for calls whose peers learn of a refusal only later: what an earlier one reports is thrown behind this
  // one, for a refusal in its place would be reported in the next, and so on without end.
  template <typename Check, typename Body>
  auto run_low_latency(const layout::CallSignature& signature, bool async, const Check& checks, const Body& body);
  void post_refusal(const layout::CallSignature& signature, const std::string& reason);
  LowLatency::Enter hook_entry();
  // Used first on one stream, and handed out on another.
  Tensor device_tensor(DType dtype, const std::vector<std::int64_t>& shape, Stream first_user, Stream user);
  // `behind_calls`: those under way come to their end first, as they do on the other ranks.
  void reset_state(bool behind_calls);
  void release() noexcept;

  DispatchResult dispatch_rows(const layout::CallSignature& signature, const DispatchArgs& args);
  CombineResult combine_rows(const layout::CallSignature& signature, const CombineArgs& args);
  void prepare_route(const DispatchArgs& args, RowMovement* move);
  void offer_block(RowMovement* move);
  void launch_notified(const DispatchArgs& args, RowMovement* move);
  void launch_placed(const DispatchArgs& args, RowMovement* move);
  void read_counts(const DispatchArgs& args, RowMovement* move);
  void grow_and_move(const DispatchArgs& args, RowMovement* move);
  std::string offer_window(RowMovement* move);
  std::int64_t count_waves(RowMovement* move, const std::string& reason);
  void move_in_waves(const DispatchArgs& args, RowMovement* move, std::int64_t num_waves);
  void copy_out(const RowMovement& move, std::int64_t num_rows);
  void free_block(RowMovement* move);
  DispatchResult hand_out(const DispatchArgs& args, RowMovement* move);
  // Rows by local expert (cuda_expert_major.cc).
  DispatchResult group_by_expert(const DispatchArgs& args, RowMovement* move, DispatchResult received);
  CombineArgs sum_by_row(const CombineArgs& args, Stream work, std::vector<Block>* staging);
  Tensor tensor_behind(RowMovement* move, std::size_t bytes);
  void check_grouped_experts(std::int64_t num_experts) const;
  void check_device_ids(const TensorView& topk_idx, std::int64_t num_experts, const StreamOptions& streams) const;
  kernels::DispatchArgs row_arguments(const DispatchArgs& args, const RowMovement& move) const;
  // Ranks on several nodes (cuda_nodes_calls.cc).
  void check_rail_row(const char* call, const layout::RowFormat& format) const;
  void make_rail_handle(RowMovement* move);
  void make_forward_map(std::int64_t num_rows, RowMovement* move);
  void notify_nodes(const kernels::NotifyArgs& args, RowMovement* move);
  void move_rows_between(const kernels::DispatchArgs& args, RowMovement* move);
  void start_between(const kernels::CallStart& start, Stream stream);
  void combine_between(const CombineArgs& args, const kernels::CombineArgs& rows, Stream stream);
  void refuse_between(const layout::CallSignature& signature, const std::string& reason, Stream stream);
  // Of the high-throughput mode: the domain whose kernels make its calls, and its mapped words as the host sees them.
  const kernels::DeviceDomain& rows_domain() const;
  char* rows_host_words() const;
  Block shared_block(std::size_t bytes, Stream first_user, const char* call);
  layout::Place stage(const TensorView& rows, std::int64_t num_rows, RowRange own, Stream work,
                      std::vector<Block>* staging, const void** own_rows);

  CallGate gate_;
  std::shared_ptr<DeviceWorld> world_;
  Stream comm_stream_ = nullptr;  // lives as long as the process
  int most_blocks_ = 0;           // of a call; more might not run at the same time as those of other ranks
  std::unique_ptr<CallOrder> order_;
  Spills spills_;
  std::unique_ptr<LowLatency> low_latency_;
  std::exception_ptr failure_;
  std::exception_ptr late_error_;  // of an earlier call, still to be thrown
  std::uint64_t num_calls_ = 0;    // collective ones, refused ones included, since the last reset
  std::uint32_t sequence_ = 0;
  layout::CallSignature last_signature_;  // of the newest call, for the text of a mismatch
  bool check_ids_ = false;                // DEEP_MOE_CHECK=1
  bool has_captured_ = false;             // some call went into a graph
  bool waves_logged_ = false;
  std::mutex scratch_mutex_;
  Tensor scratch_[2];
};

}  // namespace deep_moe::cuda
