// What a Buffer forwards to: one implementation a kind of device. Shared with the hooks of low-latency calls, which may
// outlive the Buffer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <deep_moe/buffer.hpp>
#include <deep_moe/error.hpp>

namespace deep_moe {

struct Buffer::Impl {
  Impl(const Bootstrap& bootstrap, const BufferOptions& options);
  virtual ~Impl() = default;

  const int rank, num_ranks;
  int num_nodes = 1, node = 0;  // constant once made
  const BufferOptions options;
  const std::uint64_t forks;  // fork_count() where this was made

  void check_process() const;  // throws ForkedProcessError in a forked child
  // Bytes of the scratch memory that local_buffer() shows; throws ArgumentError unless the range lies in it.
  std::int64_t check_scratch_range(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) const;

  virtual LayoutResult get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                           const StreamOptions& streams) = 0;
  virtual DispatchResult dispatch(const DispatchArgs& args) = 0;
  virtual CombineResult combine(const CombineArgs& args) = 0;
  virtual LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArgs& args) = 0;
  virtual LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArgs& args) = 0;
  virtual void clean_low_latency_buffer(std::int64_t max_tokens, std::int64_t hidden, std::int64_t num_experts) = 0;
  virtual void update_mask(int peer, bool masked) = 0;
  virtual void query_mask(std::int32_t* status) = 0;
  virtual void clean_mask() = 0;
  virtual Tensor empty(DType dtype, const std::vector<std::int64_t>& shape) = 0;
  virtual Tensor local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer) = 0;
  virtual MemoryStats memory_stats() = 0;
  virtual std::string memory_kind() = 0;
  virtual void refuse(const std::string& call, const std::string& reason) = 0;
  virtual void* comm_stream() const { return nullptr; }
  virtual void record_stream(const TensorView&, void*) {}
  virtual void check() = 0;
  virtual void reset() = 0;
  virtual void destroy() = 0;
};

namespace cuda {
// On options.device; throws UnavailableError in builds without CUDA.
std::shared_ptr<Buffer::Impl> make_buffer(const Bootstrap& bootstrap, const BufferOptions& options);
}  // namespace cuda

// Runs the body of a call. Errors that all ranks meet alike leave the Buffer usable; at any other `fail` is called,
// with the exception in flight.
template <typename Body, typename Fail>
auto run_guarded(const Body& body, const Fail& fail) {
  try {
    return body();
  } catch (const ArgumentError&) {
    throw;
  } catch (const PeerRefusedError&) {
    throw;
  } catch (const CallMismatchError&) {
    throw;
  } catch (const BufferTooSmallError&) {
    throw;
  } catch (...) {
    fail();
    throw;
  }
}

// Throws ArgumentError unless `view` is undefined or on `device`.
void check_device(const char* name, const TensorView& view, int device);
// Row-major view of a shape that a user gave; throws ArgumentError or ArgumentTypeError.
TensorView checked_shape(DType dtype, const std::vector<std::int64_t>& shape);
// The call that `name` means, for the announcement of a refusal.
std::uint32_t call_kind(const std::string& name);

}  // namespace deep_moe
