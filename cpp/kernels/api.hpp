// The CUDA kernels as the runtime sees them: plain structs and functions, no CUDA and no framework header. In a build
// without CUDA the same functions throw UnavailableError.
//
// Pointers are device addresses unless said otherwise. Functions launch on `stream` and return; a launch that the
// driver refuses throws Error, wrong arguments throw ArgumentError. Nothing here allocates.
#pragma once

#include <cstdint>
#include <string>

#include "layout/notify_words.hpp"

namespace deep_moe::kernels {

using Stream = void*;  // a cudaStream_t

// True where the kernels are part of this build.
bool compiled();

// Loads the kernels on the current device and sets their attributes. Call it once a device, before any kernel waits for
// a peer: loading a kernel later could wait for the one that waits.
void prepare();

// The ranks of one Buffer as a kernel of one of them sees them. Filled once by the host, passed by value.
struct DeviceDomain {
  int rank = 0;
  int num_ranks = 1;  // up to layout::kMaxKernelRanks
  layout::DeviceLayout words;
  layout::HostLayout host_words;
  char* workspaces[layout::kMaxKernelRanks] = {};  // by rank, as mapped here; layout::device_workspace_bytes(R) each
  char* host = nullptr;                            // mapped host memory of this rank, layout::host_words_bytes(R)
  std::uint64_t timeout_ns = 0;                    // deadline of every wait, from its start
};

// topk_idx [num_tokens, topk] int32 or int64. Ids outside [0, num_experts) are counted nowhere.
struct TopkIds {
  const void* data = nullptr;
  int id_bytes = 8;  // of one id: 4 or 8
  int topk = 0;      // 1 .. layout::kMaxTopk
  std::int64_t num_tokens = 0;
  std::int64_t row_stride = 0;  // ids from one row to the next, at least topk
};

struct LayoutArgs {
  TopkIds ids;
  int num_experts = 0;
  int num_blocks = 0;  // 0: chosen by the number of tokens
  // Out.
  std::int32_t* num_tokens_per_rank = nullptr;    // [R]
  std::int32_t* num_tokens_per_expert = nullptr;  // [E]
  bool* is_token_in_rank = nullptr;               // [T, R]
};

// Local: no other rank is involved. Two of these on one domain must not run at the same time.
void get_dispatch_layout(const DeviceDomain& domain, const LayoutArgs& args, Stream stream);

// Layout of this rank's tokens, counts to every peer, counts of every peer; one launch. Takes the domain's next epoch.
// See intranode/README.md.
struct NotifyArgs {
  TopkIds ids;                                  // topk 0: num_tokens alone counts, and the next two say where tokens go
  const bool* token_in_rank = nullptr;          // [T, R]
  const std::int32_t* expert_counts = nullptr;  // [E] entries of this rank's tokens for each expert
  int num_experts = 0;
  int num_blocks = 0;  // blocks that read ids, up to layout::kMaxNotifyBlocks; 0: chosen by the number of tokens
  layout::CallSignature signature;
  std::uint64_t hash = 0;                // layout::signature_hash(signature); notify() sets it
  layout::Place place;                   // where this rank takes its rows
  char* const* segment_bases = nullptr;  // as for dispatch, which then need not look them up itself; may be null
  std::uint32_t sequence = 0;            // tag of what goes to mapped memory; 0: no counts for the host
  bool alone = false;                    // no dispatch comes behind, which would end the call: notify does
  // Out; any may be null.
  std::int32_t* send_position = nullptr;        // [T, R] index of the token among this rank's rows for that rank, or -1
  bool* is_token_in_rank = nullptr;             // [T, R]
  std::int32_t* num_tokens_per_rank = nullptr;  // [R]
  std::int32_t* num_tokens_per_expert = nullptr;  // [E]
  std::int32_t* rank_matrix = nullptr;            // [R, R] rows from source to destination
  std::int32_t* rank_prefix_matrix = nullptr;     // [R, R] the same, inclusive over sources
  std::int32_t* recv_per_expert = nullptr;        // [L] entries for each of this rank's experts, all sources
};
void notify(const DeviceDomain& domain, NotifyArgs args, Stream stream);

// What a call that no notify precedes announces to every peer.
struct CallStart {
  layout::CallSignature signature;
  std::uint64_t hash = 0;      // layout::signature_hash(signature); set by the function called
  layout::Place place;         // dispatch: where this rank takes its rows; combine: its input, 16-byte aligned
  layout::Place weight_place;  // combine: its top-k weights
  std::uint32_t sequence = 0;  // tag of the outcome in mapped memory; 0: none for the host
};

// Scales that travel with rows: num_items a row, of item_bytes (1, 2, 4 or 8) each. Strides in bytes. num_items 0:
// none.
struct ScaleRows {
  const void* data = nullptr;
  int item_bytes = 0;
  std::int64_t num_items = 0;
  std::int64_t row_stride = 0;
  std::int64_t item_stride = 0;
};

// Moves rows to their final place at every destination, and ends when all rows for this rank have arrived.
//
// Behind notify, on the same stream and with no other call of the domain between: takes over its epoch; if its outcome
// is not kRowsFit, nothing moves on any rank. With `cached` there is no notify: counts and positions are those of an
// earlier call, the launch takes the next epoch itself and announces `start`. Then a place may be a window
// (layout::kPlaceWindow): rows with a final index in [first_row, first_row + capacity) are stored at index - first_row
// of a block that is laid out for `capacity` rows, all others are not stored. Ranks need not open windows alike.
struct DispatchArgs {
  const void* x = nullptr;  // num_tokens rows of row_bytes (a multiple of 16), row_stride bytes apart
  std::int64_t num_tokens = 0;
  std::int64_t row_bytes = 0;
  std::int64_t row_stride = 0;
  ScaleRows scales;
  TopkIds ids;                                       // topk 0: none; else of the same tokens
  int num_experts = 0;                               // read with ids alone
  const float* topk_weights = nullptr;               // [num_tokens, topk] or null
  bool has_weights = false;                          // rows have them; topk_weights may be null without tokens
  std::int64_t weight_stride = 0;                    // weights from one row to the next
  const std::int32_t* send_position = nullptr;       // [T, R] of notify
  const std::int32_t* rank_prefix_matrix = nullptr;  // [R, R] of notify
  char* const* segment_bases = nullptr;  // [R, layout::kMaxSegments] where each rank's segments are mapped here
  int num_sms = 0;                       // blocks, at least 1; more than layout::kMaxRowBlocks are not launched
  bool use_vector_path = false;          // plain loads and stores also where the copy engine is there
  bool cached = false;
  CallStart start;  // cached alone
};
void dispatch(const DeviceDomain& domain, DispatchArgs args, Stream stream);

enum class SumType : int { kBf16, kFp16, kFp32 };

// Reads each token's rows from the ranks that hold them, sums them in fp32 in rank order, and rounds once. Takes the
// next epoch, and ends when no peer will read this rank's input any more.
struct CombineArgs {
  SumType type = SumType::kBf16;
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;                           // elements; row bytes are a multiple of 16
  const std::int32_t* send_position = nullptr;       // [T, R] of the dispatch
  const std::int32_t* rank_prefix_matrix = nullptr;  // [R, R] of the dispatch
  char* const* segment_bases = nullptr;              // as for dispatch
  const void* bias[2] = {};                          // [T, hidden] of `type`, or null
  std::int64_t bias_stride[2] = {};                  // bytes from one row to the next
  void* out = nullptr;                               // [T, hidden] of `type`
  std::int64_t out_stride = 0;                       // bytes
  int topk = 0;                                      // of the weights; 0: none
  float* combined_topk_weights = nullptr;            // [T, topk]
  int num_sms = 0;
  bool use_vector_path = false;
  CallStart start;  // place: rows without gaps; weight_place: [N, topk]
  // Where this rank itself reads its input, rows without gaps; null: at the place. Then the place need not hold the
  // rows that this rank has sent to itself.
  const void* own_rows = nullptr;
};
void combine(const DeviceDomain& domain, CombineArgs args, Stream stream);

// ---- Received rows grouped by local expert, on this rank alone; see intranode/README.md.

inline constexpr int kMaxGroupedExperts = 4096;

// Each entry of the ids of a received row that names a local expert has a row in that expert's group, in the order of
// the entries; a group ends with padding.
struct ExpertGroups {
  int num_experts = 0;              // L, up to kMaxGroupedExperts
  int topk = 0;                     // K
  std::int64_t num_received = 0;    // N; where that is a bound, ids are -1 past what has arrived
  std::int64_t num_rows = 0;        // P, padding included, or a bound of it
  std::int32_t* offsets = nullptr;  // [L + 1]
  std::int32_t* counts = nullptr;   // [L] rows of a group before its padding
  std::int32_t* rows = nullptr;     // [N, K] row of an entry, or -1
};

// Writes the groups of received rows.
struct PlaceByExpertArgs {
  ExpertGroups groups;
  const void* ids = nullptr;  // [N, K] local ids, or -1
  int id_bytes = 8;
  const float* weights = nullptr;   // [N, K] or null
  std::int64_t alignment = 1;       // of groups; they end at num_rows or before it
  std::int32_t* scratch = nullptr;  // [place_by_expert_words(groups)]
  // Out.
  std::int32_t* experts = nullptr;  // [P], -1 in padding and behind the groups
  float* row_weights = nullptr;     // [P], 0 there; with weights
};
void place_by_expert(const PlaceByExpertArgs& args, Stream stream);
std::int64_t place_by_expert_words(const ExpertGroups& groups);

// Copies received rows, which have no gaps, to their groups. Padding becomes zero; what is behind the groups stays.
struct GroupRowsArgs {
  ExpertGroups groups;
  const void* x = nullptr;
  void* out = nullptr;
  std::int64_t row_bytes = 0;  // a multiple of 16; x and out are 16-byte aligned
  ScaleRows scales;
  void* out_scales = nullptr;
  std::int64_t out_row_stride = 0, out_item_stride = 0;  // of scales, bytes
};
void group_rows(const GroupRowsArgs& args, Stream stream);

// One row for each received one: the sum of its rows in the groups, in fp32, in the order of its entries, rounded once.
// Received rows without entries are passed over.
struct SumGroupsArgs {
  ExpertGroups groups;
  SumType type = SumType::kBf16;
  const void* x = nullptr;  // [P, hidden], row_stride bytes apart
  std::int64_t row_stride = 0;
  std::int64_t hidden = 0;             // row bytes are a multiple of 16
  const float* row_weights = nullptr;  // [P] factors, or null
  void* out = nullptr;                 // [N, hidden] without gaps, 16-byte aligned
  const float* weights = nullptr;      // [P] or null
  float* out_weights = nullptr;        // [N, K] the weight of each entry, 0 where it has no row
};
void sum_groups(const SumGroupsArgs& args, Stream stream);

// Takes the next epoch for a call whose arguments this rank refuses, and tells every peer why. Reasons longer than
// layout::kReasonBytes are cut.
void post_refusal(const DeviceDomain& domain, const layout::CallSignature& signature, const std::string& reason,
                  Stream stream);

// After the host has read the error record: the next error may be recorded. `host` is the host's address of the
// domain's mapped memory. `failures`: the record of failures too, for a reset. Stream-ordered; no kernel of the domain
// may be running on another stream.
void clear_error(const DeviceDomain& domain, char* host, Stream stream, bool failures = true);

// After a failure and clear_error, once no kernel of any rank of the domain runs: this rank's state is as new, and
// `epoch` calls count as done. All ranks take the same number, not below any epoch that a rank has started.
void reset_state(const DeviceDomain& domain, std::uint64_t epoch, Stream stream);

// ---- Low latency; see low_latency/README.md. Ranks that take part in a call pass the same signature.

// A call as one launch, or its two halves, which need not follow each other: up to layout::kLowLatencySlots - 1 calls
// may have been sent and not received.
enum class LowLatencyHalf : int { kBoth, kSend, kReceive };

// Memory of every rank for rows on their way, as mapped here: layout::kLowLatencySlots slots of slot_bytes each, a
// multiple of 128, equal on all ranks. Needs no preparation, but must not be memory in which 16 bytes may hold the low
// 32 bits of a coming epoch at their end by chance: zeroed memory is right.
struct LowLatencyStaging {
  char* bases[layout::kMaxKernelRanks] = {};
  std::int64_t slot_bytes = 0;
};

// What both calls share.
struct LowLatencyCall {
  LowLatencyHalf half = LowLatencyHalf::kBoth;
  LowLatencyStaging staging;
  layout::CallSignature signature;
  std::uint64_t hash = 0;              // layout::signature_hash(signature); set by the function called
  std::uint64_t* epoch = nullptr;      // [1], with halves: written by the first, read by the second
  std::int64_t* wait_stats = nullptr;  // [R] nanoseconds waited for each peer are added, or null; with the second half
  std::int64_t max_tokens = 0;         // M, up to layout::kMostLowLatencyTokens
  int num_experts = 0;
  int num_blocks = 0;  // most that may be used: as many SMs, for blocks of one launch may not share one
  bool early = false;  // the launch behind may start when this one does: for a rank that shares its GPU with no other
  std::uint64_t live_ranks =
      ~std::uint64_t{0};  // bits of the ranks that take part: nothing goes to the others, nothing
                          // of theirs is waited for or summed; masked ranks are left out too
  bool shrink = false;    // a rank that does not come within the deadline is masked; else that fails the Buffer
};

// Rows to the experts' ranks, each once a rank, and from there to packed blocks of M * R rows an expert, in the order
// of (source rank, token). The first half reads x, ids and weights alone, the second none of them.
struct LowLatencyDispatchArgs {
  LowLatencyCall call;
  const void* x = nullptr;      // rows of row_bytes, or to be cast, row_stride bytes apart
  std::int64_t num_tokens = 0;  // up to M
  std::int64_t row_bytes = 0;   // as received, a multiple of 16
  std::int64_t row_stride = 0;
  bool cast = false;  // from x_type to fp8 e4m3 with an fp32 scale each 128 elements
  SumType x_type = SumType::kBf16;
  bool round_scale = false;  // scales are powers of two
  bool ue8m0 = false;        // and received as their exponents, a byte each
  ScaleRows scales;          // of rows that are not cast
  TopkIds ids;
  bool with_weights = false;            // the same on all ranks
  const float* topk_weights = nullptr;  // [T, K], with weights
  std::int64_t weight_stride = 0;
  // Out, by the second half. L local experts.
  void* recv_x = nullptr;                // [L, R*M] rows
  void* recv_scales = nullptr;           // [L, R*M, scales], last two dimensions column-major
  std::int32_t* recv_count = nullptr;    // [L]
  std::int32_t* src_info = nullptr;      // [L, R*M] source token
  std::int64_t* layout_range = nullptr;  // [L, R] begin << 32 | count
  std::int32_t* recv_pos = nullptr;  // [R, M+1, K]: packed row of (source, token, k) or -1; [src, M, 0]: tokens of src
  float* recv_weights = nullptr;     // [R, M, K], with weights
  std::int32_t* recv_stats = nullptr;  // [L] counts are added, or null
};
void low_latency_dispatch(const DeviceDomain& domain, LowLatencyDispatchArgs args, Stream stream);
std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyDispatchArgs& args);

// The weighted sum of the experts' outputs, in fp32, in the order (holder rank, k).
//  - Reduced by the holders: each rank sums the rows of its experts, rounds, and sends one row a token. The weights are
//    known from the dispatch, or are sent ahead (LowLatencyHalf::kBoth alone).
//  - By expert: a row for each expert, summed by the owner of the token. As halves alone.
struct LowLatencyCombineArgs {
  LowLatencyCall call;
  bool by_expert = false;
  bool logfmt = false;  // rows travel as 10-bit logarithms, this rank's own as well
  SumType type = SumType::kBf16;
  const void* x = nullptr;                 // [L, R*M, hidden]
  std::int64_t hidden = 0;                 // elements; row bytes are a multiple of 16, with logfmt elements one of 128
  std::int64_t expert_stride = 0;          // bytes from one expert's block to the next
  std::int64_t row_stride = 0;             // bytes
  const std::int32_t* recv_pos = nullptr;  // of the dispatch
  const float* recv_weights = nullptr;     // of the dispatch; null: sent ahead
  TopkIds ids;                             // as in the dispatch
  const float* topk_weights = nullptr;
  std::int64_t weight_stride = 0;
  // With halves: where the first keeps ids and weights for the second.
  std::int32_t* kept_ids = nullptr;  // [T, K]
  float* kept_weights = nullptr;     // [T, K]
  void* out = nullptr;               // [T, hidden]
  std::int64_t out_stride = 0;       // bytes
};
void low_latency_combine(const DeviceDomain& domain, LowLatencyCombineArgs args, Stream stream);
std::int64_t low_latency_slot_bytes(const DeviceDomain& domain, const LowLatencyCombineArgs& args);

// This rank neither sends to the ranks of these bits nor waits for them any more, until a reset_state.
void mask_ranks(const DeviceDomain& domain, std::uint64_t ranks, Stream stream);
// [R] 1 for each masked rank, else 0.
void query_masked(const DeviceDomain& domain, std::int32_t* status, Stream stream);

}  // namespace deep_moe::kernels
