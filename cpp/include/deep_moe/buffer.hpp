// The Buffer: expert-parallel dispatch and combine for one rank of a group.
//
// Every call is collective: all ranks of the group make the same calls on their Buffer in the same order. A call that
// refuses its arguments throws on its own rank and makes every peer throw PeerRefusedError with the reason; the next
// call works. A time-out or a lost peer fails the Buffer: each call throws the same error until reset() or destroy().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <deep_moe/bootstrap.hpp>
#include <deep_moe/config.hpp>
#include <deep_moe/error.hpp>
#include <deep_moe/tensor.hpp>

namespace deep_moe {

struct BufferOptions {
  std::int64_t num_nvl_bytes = 0;  // starting capacity of the heap; it grows to what a call needs
  // Low latency: starting capacity of the staging. Between nodes: what the rings may take (its largest value on any
  // rank counts); 0: room for rows of 7168 bf16 elements, see Config::get_rdma_buffer_size_hint.
  std::int64_t num_rdma_bytes = 0;
  bool low_latency_mode = false;
  bool enable_shrink = false;      // low latency: mask a rank that does not answer instead of failing
  double timeout_seconds = 100.0;  // deadline of every wait
  int device = kCpuDevice;         // or the ordinal of a CUDA device: tensors of all calls are on it
  bool use_fabric = false;         // GPUs: share memory by fabric handles where the machine has a fabric
  // GPUs: the calling thread's current stream of the device (a cudaStream_t). Empty: the legacy default stream. Streams
  // that have used what a Buffer hands out have to outlive it and the Buffer.
  std::function<void*()> current_stream;
  // Called about every 50 ms of a wait, without locks that user code could need; may throw to give up the call.
  std::function<void()> interrupt_check;
};

// GPUs: a call runs on the caller's current stream; with either of these, or captured, on the Buffer's own comm stream,
// behind the current stream or behind `previous_event`, and the current stream waits for it unless `async_finish` (then
// record an event on comm_stream() after the call).
// Unused on the CPU, where a call is complete when it returns.
struct StreamOptions {
  void* previous_event = nullptr;  // a cudaEvent_t
  bool async_finish = false;
};

// x: a tensor, or data with scales (fp8 and the like; opaque bytes either way).
struct Payload {
  TensorView data;    // [T, H], inner stride 1
  TensorView scales;  // undefined, or [T] / [T, S] with any strides
};

struct OwnedPayload {
  Tensor data;    // [N, H]
  Tensor scales;  // undefined, or [N, S]; column-major where the input was
};

// What combine and a cached dispatch need of a dispatch. Holds indices, never addresses; copies share the memory.
struct DispatchHandle {
  TensorView rank_prefix_matrix;  // [R, R] i32, [src, dst] = rows at dst from ranks <= src
  TensorView recv_src_idx;        // [N] i32, source token of each received row; -1 past the end
  TensorView is_token_in_rank;    // [T, R] bool
  TensorView send_index;          // [T, R] i32, row index of the token at that rank, or -1
  // Between nodes only, D of S ranks each; on one node undefined. F rows came from this rank's peers on other nodes.
  TensorView send_rdma_index;            // [T, D] i32, which of this rank's rows for that node the token is, or -1
  TensorView recv_rdma_rank_prefix_sum;  // [D] i32, rows from the peers on nodes up to this one; on GPUs [2, D], with
                                         // the rows to the peer on each node below
  TensorView send_nvl_index;             // [F, S] i32, final index at each rank of this node, or -1
  // Of expert-major rows only: P of them, L local experts. N stays the number of rows that crossed the links.
  TensorView expert_offsets;  // [L + 1] i32, where each expert's group begins; the last is P
  TensorView expert_counts;   // [L] i32, rows of each group; its padding is behind them
  TensorView expert_rows;     // [N, K] i32, which of the P rows each entry of a received row became, or -1
  TensorView meta;            // [9] i64, on GPUs [9] or [9 + R], between nodes [10] or [10 + R], see
                              // layout/handle.hpp
};

// The tensors of a DispatchHandle with what keeps their memory alive.
struct OwnedDispatchHandle {
  Tensor rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_index, send_rdma_index, recv_rdma_rank_prefix_sum,
      send_nvl_index, expert_offsets, expert_counts, expert_rows, meta;
  DispatchHandle view() const;
};

struct LayoutResult {
  Tensor num_tokens_per_rank;       // [R] i32
  Tensor num_tokens_per_rdma_rank;  // [D] i32, tokens for each of D nodes; undefined on one node
  Tensor num_tokens_per_expert;     // [E] i32
  Tensor is_token_in_rank;          // [T, R] bool
};

// One of: topk_idx and num_experts; a handle; is_token_in_rank and num_tokens_per_expert.
struct DispatchArgs {
  Payload x;
  TensorView topk_idx;      // [T, K] i64 or i32; undefined in cached mode. GPUs look for ids that are no experts with
                            // DEEP_MOE_CHECK=1 alone
  TensorView topk_weights;  // [T, K] f32, or undefined
  std::int64_t num_experts = 0;
  // Only read where topk_idx is undefined and there is no handle: rows go where is_token_in_rank [T, R] bool says, and
  // num_tokens_per_expert [E] i32 gives the counts.
  TensorView is_token_in_rank, num_tokens_per_expert;
  const DispatchHandle* handle = nullptr;  // cached mode
  std::int64_t expert_alignment = 1;
  std::int64_t num_worst_tokens = 0;
  // Rows grouped by local expert, see DispatchResult; needs topk_idx. With a handle, that dispatch's order is kept, and
  // this may be left out.
  bool expert_major = false;
  int num_sms = 0;  // GPUs: multiprocessors to use; 0: the default, 20
  StreamOptions streams;
};

// N received rows, ordered by source rank, then source token. Tensors live as long as they are held.
//
// Expert-major: P rows in L groups, one a local expert. Each entry of topk_idx that names a local expert has a row in
// its group, ordered as the received rows, then by k. A group is padded with zero rows to a multiple of
// expert_alignment; its scales are zero there, its ids -1, its weights 0. Each rank may choose for itself. With
// num_worst_tokens P is that times K plus L * (expert_alignment - 1), rounded up to the alignment, whatever arrives:
// behind the last group ids are -1, weights 0, and rows hold anything.
struct DispatchResult {
  OwnedPayload recv_x;
  Tensor recv_topk_idx;      // [N, K], dtype of topk_idx, local ids, -1 elsewhere; undefined in cached mode;
                             // expert-major [P] i32, the row's local expert
  Tensor recv_topk_weights;  // [N, K] f32, 0 where the id is -1; undefined if no weights were given; expert-major [P]
  std::vector<std::int64_t> num_recv_tokens_per_expert;  // [L], rounded up to the alignment; empty with worst tokens
  OwnedDispatchHandle handle;                            // undefined members in cached mode
};

// Sums are fp32: the biases, then the ranks in ascending order, rounded once to x's dtype. With the handle of an
// expert-major dispatch, the rows of a received row are first summed here, in the order of k, and rounded to x's dtype.
struct CombineArgs {
  TensorView x;  // [N, H] bf16, fp16 or fp32; expert-major [P, H]
  DispatchHandle handle;
  TensorView topk_weights;  // [N, K] f32, or undefined; expert-major [P]
  TensorView row_weights;   // expert-major: [P] f32 that multiply the rows in fp32, or undefined
  TensorView bias0, bias1;  // [T, H] of x's dtype, or undefined
  TensorView out;           // [T, H] of x's dtype, or undefined
  int num_sms = 0;          // GPUs: as for dispatch
  StreamOptions streams;
};

struct CombineResult {
  Tensor combined_x;             // [T, H]; owner is empty where `out` was given
  Tensor combined_topk_weights;  // [T, K] f32, or undefined
};

struct LowLatencyHandle {
  TensorView src_info;      // [L, R * M] i32, source token of each packed row
  TensorView layout_range;  // [L, R] i64, begin << 32 | count
  TensorView recv_pos;      // [R, M, K] i32, packed row l * R * M + p of (source, row, k), or -1; on GPUs [R, M + 1, K]
  TensorView recv_weights;  // [R, M, K] f32, or [0]: the weights given at dispatch
  TensorView meta;          // [12] i64, see layout/handle.hpp
};

// The tensors of a LowLatencyHandle with what keeps their memory alive.
struct OwnedLowLatencyHandle {
  Tensor src_info, layout_range, recv_pos, recv_weights, meta;
  Tensor words;  // GPUs: [bytes] u8, the memory of all of them but meta
  LowLatencyHandle view() const;
};

// GPUs: the handle whose `words` and `meta` these are; throws ArgumentError if they cannot be.
LowLatencyHandle low_latency_handle(const TensorView& words, const TensorView& meta, int rank);

// fp8: data cast to float8_e4m3fn with a float32 scale for 128 elements; H a multiple of 128.
struct LowLatencyDispatchArgs {
  Payload x;                // [T, H]; with scales: opaque, no cast
  TensorView topk_idx;      // [T, K] i64 or i32
  TensorView topk_weights;  // [T, K] f32, or undefined: allows the pre-reduced combine with a hook
  std::int64_t num_max_dispatch_tokens_per_rank = 0;
  std::int64_t num_experts = 0;
  bool use_fp8 = true;
  bool round_scale = false;                       // fp8 scales are powers of two
  bool use_ue8m0 = false;                         // and packed exponents, four in an int32; H a multiple of 512
  bool return_recv_hook = false;                  // only send; the hook receives
  TensorView cumulative_local_expert_recv_stats;  // [L] i32, or undefined
  TensorView wait_recv_cost_stats;                // [R] i64 nanoseconds, or undefined
  bool async_finish = false;                      // GPUs, without a hook: as in StreamOptions
};

// Tensors are complete once the call (or its hook) has returned. With a hook, the statistics tensors must stay valid
// until the hook has been called or destroyed: a later call that needs the slot may fill them. x, ids and weights are
// read in the call alone. GPUs: calls and hooks run on the caller's current stream, which has them behind it, and
// return at once; with `async_finish` on the comm stream. What goes wrong in their kernels is thrown by a later call,
// which is made all the same, or by check().
struct LowLatencyDispatchResult {
  OwnedPayload recv_x;  // [L, R*M, H]; scales [L, R*M, H/128] (or H/512), last two dims column-major
  Tensor recv_count;    // [L] i32
  OwnedLowLatencyHandle handle;
  std::function<void()> hook;  // empty unless asked for; call it exactly once
};

// Sums with the tokens' weights.
struct LowLatencyCombineArgs {
  TensorView x;             // [L, R*M, H] bf16, fp16 or fp32
  TensorView topk_idx;      // [T, K], as given to dispatch
  TensorView topk_weights;  // [T, K] f32
  LowLatencyHandle handle;
  bool use_logfmt = false;
  bool return_recv_hook = false;
  TensorView out;                   // [T, H], or undefined
  TensorView wait_recv_cost_stats;  // [R] i64 nanoseconds, or undefined
  bool async_finish = false;        // as for dispatch
};

// With a hook, `out` and the statistics must stay valid until the hook has been called or destroyed.
struct LowLatencyCombineResult {
  Tensor combined_x;  // [T, H]
  std::function<void()> hook;
};

// Of this rank's heap. Quarantined: a peer that is late may still write there; free again after reset().
struct MemoryStats {
  std::int64_t heap_bytes = 0, live_bytes = 0, live_blocks = 0, quarantined_bytes = 0, peak_bytes = 0, free_bytes = 0;
  std::int64_t segments = 0, largest_free_bytes = 0, ll_staging_bytes = 0;
};

// One rank's end. Calls from several threads are serialised; Buffers are independent of each other.
class Buffer {
 public:
  // Collective over the bootstrap's ranks.
  Buffer(const Bootstrap& bootstrap, const BufferOptions& options);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  int rank() const;
  int num_ranks() const;
  int num_nodes() const;
  int node() const;  // this rank's
  const BufferOptions& options() const;

  // Local: no other rank is involved.
  LayoutResult get_dispatch_layout(const TensorView& topk_idx, std::int64_t num_experts,
                                   const StreamOptions& streams = {});

  DispatchResult dispatch(const DispatchArgs& args);
  CombineResult combine(const CombineArgs& args);

  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArgs& args);
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArgs& args);
  void clean_low_latency_buffer(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden,
                                std::int64_t num_experts);
  // Need enable_shrink. Masking is local; unmasking (masked = false, or clean_mask) is collective over all ranks, the
  // masked ones included, and unmasks all of them. GPUs: masking and queries take effect in the order of the caller's
  // current stream, unmasking is a reset() of the Buffer, and a reset unmasks.
  void update_mask(int rank, bool masked);
  void query_mask(std::int32_t* status) const;  // [R] on the Buffer's device, 1 = masked
  void clean_mask();

  // A tensor in the heap: as input of combine it is read in place by the peers.
  Tensor empty(DType dtype, const std::vector<std::int64_t>& shape);
  // Scratch memory of this rank that no call uses: [num_bytes] at `offset`, of the heap or of the low-latency kind.
  Tensor local_buffer(std::int64_t offset, std::int64_t num_bytes, bool use_rdma_buffer);
  MemoryStats memory_stats() const;
  // How ranks share memory: "memfd" on the CPU, "fd", "fabric" or "ipc" on GPUs.
  std::string memory_kind() const;

  // A refusal found before the arguments reached this class (say, in a binding): consumes this call's epoch and tells
  // the peers, exactly as a refusal inside does. Does not throw for the refusal itself.
  void refuse(const std::string& call, const std::string& reason);
  // GPUs: the private high-priority stream (a cudaStream_t); null on the CPU.
  void* comm_stream() const;
  // Adds `stream` to those whose work keeps the memory of a handed-out tensor from being reused. Nothing to do on the
  // CPU.
  void record_stream(const TensorView& tensor, void* stream);
  void check();    // throws what has failed the Buffer, if anything
  void reset();    // collective, after a failure: a new generation
  void destroy();  // local, idempotent; tensors stay valid

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

// True where this build has Buffers on GPUs.
bool cuda_transport_compiled();

// SIMD level chosen at run time: "avx512", "avx2", "generic".
const char* simd_level();

}  // namespace deep_moe
