// The CPU implementation of a Buffer: shared memory and threads.
#pragma once

#include <memory>
#include <mutex>

#include "cpu/low_latency.hpp"
#include "cpu/protocol.hpp"
#include "runtime/buffer_impl.hpp"
#include "runtime/call_gate.hpp"
#include "runtime/domain.hpp"

namespace deep_moe::cpu {

class CpuBuffer final : public Buffer::Impl, public std::enable_shared_from_this<CpuBuffer> {
 public:
  CpuBuffer(const Bootstrap& bootstrap, const BufferOptions& options);
  ~CpuBuffer() override;
  void start();  // the rest of the construction, which needs shared_from_this

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
  std::string memory_kind() override { return "memfd"; }
  void refuse(const std::string& call, const std::string& reason) override;
  void check() override;
  void reset() override;
  void destroy() override;

 private:
  // A call on a Buffer that has not failed; throws what failed it.
  struct ReadyLock {
    explicit ReadyLock(CpuBuffer& buffer);
    CallGate::Pass pass;
  };
  CallGate& open_gate();  // in the process that made the Buffer

  void check_usable() const;                      // check_process(), and not destroyed
  std::shared_ptr<Domain> usable_domain() const;  // without the call lock
  void check_unmasked(const char* call) const;
  void release() noexcept;
  void check_shrink(const char* call) const;
  // Runs the checks, then the call, with the error handling that the Buffer promises.
  template <typename Check, typename Body>
  auto run(const layout::CallSignature& signature, const Check& check, const Body& body);
  // Errors that all ranks meet alike leave the Buffer usable; any other fails it.
  template <typename Body>
  auto guarded(const Body& body);
  Context context() { return {*domain_, *pool_, rails_.get()}; }
  LowLatencyContext low_latency_context();
  void start_over(bool unmask);  // a new generation
  void unmask();

  CallGate gate_;
  mutable std::mutex domain_mutex_;  // of the pointer
  std::shared_ptr<Domain> domain_;
  std::unique_ptr<Rails> rails_;  // null on one node
  std::unique_ptr<WorkerPool> pool_;
  LowLatencyState low_latency_;
  std::uint64_t generation_ = 1;
  std::mutex scratch_mutex_;
  Tensor scratch_[2];  // what local_buffer() shows: heap kind, low-latency kind
};

}  // namespace deep_moe::cpu
