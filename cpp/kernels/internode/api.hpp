// The kernels between nodes as the runtime sees them: plain structs, no CUDA header. Each function exists once a
// network: here over memory that is mapped, in the plug-in over NVSHMEM.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"
#include "layout/direct_words.hpp"
#include "layout/rail_words.hpp"

namespace deep_moe::kernels::internode {

// The network memory of every rank of the group, as mapped here: layout::RailLayout::bytes() each.
struct MappedBlocks {
  char* blocks[layout::kMaxKernelRanks] = {};
};

// The ranks of a Buffer on N > 1 nodes of L ranks, as a kernel of one of them sees them.
struct RailDomain {
  // The ranks of this node, by local index: words, waits and errors. Mapped words of the host are laid out for the
  // group. In waits a number from L on is L + a rank of the group. What a refused call and another call (both in phase
  // kRelay), too few rows and unknown segments name is a rank of the group.
  DeviceDomain node;
  int num_nodes = 0;
  int own_node = 0;
  layout::RailLayout rail;  // of network memory
  layout::RailWords words;
  char* workspaces[layout::kMaxKernelRanks] = {};         // rail words of each mate, by local index, as mapped here
  std::uint8_t rank_table[layout::kMaxKernelRanks] = {};  // [N][L] ranks of the group

  DM_HOST_DEVICE int in_errors(int of_group) const { return node.num_ranks + of_group; }
  DM_HOST_DEVICE int num_local_ranks() const { return node.num_ranks; }
  DM_HOST_DEVICE int num_ranks() const { return num_nodes * node.num_ranks; }
  DM_HOST_DEVICE int rank_at(int of_node, int local) const { return rank_table[of_node * node.num_ranks + local]; }
  DM_HOST_DEVICE int rank() const { return rank_at(own_node, node.rank); }
  DM_HOST_DEVICE int peer(int of_node) const { return rank_at(of_node, node.rank); }
  DM_HOST_DEVICE layout::RailState& state() const { return words.state(workspaces[node.rank]); }
};

// Before every call: all ranks of the group make the same one (X1 to X5), and with counts, how many rows go where, and
// whether they fit what every rank offers. Takes the next epoch; the outcome is the same on all ranks. The calls below
// are launched behind it and move nothing where it is not kRowsFit.
struct NotifyArgs {
  layout::CallSignature signature;
  std::uint64_t hash = 0;      // layout::signature_hash(signature); set by the function called
  layout::Place place;         // of dispatch: where this rank takes rows; of combine: its input
  layout::Place weight_place;  // of combine
  bool refused = false;        // this rank does not make the call: it says so and why, and ends
  std::uint32_t num_reason_bytes = 0;
  char reason[layout::kReasonBytes] = {};
  std::uint32_t sequence = 0;  // tag of outcome and counts in mapped memory; 0: none for the host
  // With counts: ids, or with topk 0 a mask and entries for each expert; neither: routes are known.
  TopkIds ids;                                  // num_tokens in either case
  const bool* token_in_rank = nullptr;          // [T, R]
  const std::int32_t* expert_counts = nullptr;  // [E]
  int num_experts = 0;
  // Out. A token's position for a rank counts this rank's rows there, that for a node its rows in the ring to it; -1:
  // none, and at this rank's own node.
  std::int32_t* position = nullptr;            // [T, R + N]
  bool* is_token_in_rank = nullptr;            // [T, R + N] likewise, or null
  std::int32_t* rank_prefix_matrix = nullptr;  // [R, R] rows from source to destination, inclusive over sources
  std::int32_t* rows_out = nullptr;            // [N] rows to each peer
  std::int32_t* rows_in_prefix = nullptr;      // [N] rows from the peers on nodes up to this one
  std::int32_t* recv_per_expert = nullptr;     // [experts of this rank], or null

  DM_HOST_DEVICE bool with_counts() const { return ids.topk > 0 || expert_counts != nullptr; }
};
void notify(const RailDomain& domain, const MappedBlocks& network, NotifyArgs args, Stream stream);

// Local: tokens that go to each node, [N], of a mask [T, R].
void count_nodes(const RailDomain& domain, const bool* token_in_rank, std::int64_t num_tokens,
                 std::int32_t* num_tokens_per_node, Stream stream);

// In stream order, while no call of any rank is on its way: the rings are as new, and the tags of their chunks name
// this generation. In fresh memory they are, with generation 0.
void restart_rings(const RailDomain& domain, std::uint64_t generation, Stream stream);

// What the row calls share: results of a notify with counts. Strides from one token to the next.
struct Routes {
  const std::int32_t* position = nullptr;       // [T, R]
  const std::int32_t* node_position = nullptr;  // [T, N]
  std::int64_t position_stride = 0, node_stride = 0;
  const std::int32_t* rank_prefix_matrix = nullptr;
  const std::int32_t* rows_out = nullptr;
  const std::int32_t* rows_in_prefix = nullptr;
  char* const* segment_bases = nullptr;  // [R, layout::kMaxSegments] where each rank's segments are mapped here
  int num_sms = 0;
};

struct DispatchArgs {
  Routes routes;
  const void* x = nullptr;  // num_tokens rows of row_bytes (a multiple of 16), row_stride bytes apart, 16-byte aligned
  std::int64_t num_tokens = 0;
  std::int64_t row_bytes = 0;
  std::int64_t row_stride = 0;
  ScaleRows scales;
  TopkIds ids;  // topk 0: none travel
  int num_experts = 0;
  const float* topk_weights = nullptr;
  bool has_weights = false;
  std::int64_t weight_stride = 0;
  std::int32_t* send_nvl_index = nullptr;  // [rows in, L] final index at each mate, or -1; null: a handle has it
  std::int64_t map_rows = 0;               // that it has room for; where more come in, this launch moves nothing
};
void dispatch(const RailDomain& domain, const MappedBlocks& network, const DispatchArgs& args, Stream stream);

struct CombineArgs {
  Routes routes;
  SumType type = SumType::kBf16;
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  const std::int32_t* send_nvl_index = nullptr;
  const void* bias[2] = {};
  std::int64_t bias_stride[2] = {};  // bytes, multiples of 16
  void* out = nullptr;
  std::int64_t out_stride = 0;
  int topk = 0;  // of the weights; 0: none
  float* combined_topk_weights = nullptr;
};
void combine(const RailDomain& domain, const MappedBlocks& network, const CombineArgs& args, Stream stream);

// ---- Low latency, every rank to every other (P1 to P5); the arguments are those of one node. A call is two launches,
// its halves, also where the caller asks for both at once: call.epoch is always needed. Staging is that of node mates,
// layout::DirectLayout::mates_slot_bytes() a slot.
struct DirectDomain {
  DeviceDomain group;  // words, waits and errors by rank of the group; the workspaces of node mates alone are touched
  layout::DirectLayout layout;
  layout::DirectRanks ranks;
};
void low_latency_dispatch(const DirectDomain& domain, const MappedBlocks& network, const LowLatencyDispatchArgs& args,
                          Stream stream);
// Without by_expert: a row a holder where the dispatch has brought weights, else rows by expert that the owner sums as
// the holders would have done; with logfmt just as with by_expert, for the holders' sums are not what travels.
void low_latency_combine(const DirectDomain& domain, const MappedBlocks& network, const LowLatencyCombineArgs& args,
                         Stream stream);
// Takes the epoch of a call that this rank does not make, and tells all others why. Of `call` staging, signature and
// num_blocks count.
struct DirectRefusal {
  LowLatencyCall call;
  std::uint32_t num_reason_bytes = 0;
  char reason[layout::kReasonBytes] = {};
};
void low_latency_refuse(const DirectDomain& domain, const MappedBlocks& network, const DirectRefusal& args,
                        Stream stream);
// What a call needs of the layout's part_bytes; a combine's rows go by expert, or one a token.
std::int64_t direct_part_bytes(int num_ranks, const LowLatencyDispatchArgs& args);
std::int64_t direct_part_bytes(int num_ranks, const LowLatencyCombineArgs& args, bool by_expert);
inline bool direct_by_expert(const LowLatencyCombineArgs& args) {
  return args.by_expert || args.recv_weights == nullptr;
}

// Loads the kernels on the current device, as kernels::prepare().
void prepare();

}  // namespace deep_moe::kernels::internode
