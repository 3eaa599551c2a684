// What the CUDA protocol adds to the workspace: words that are their own flag, the counters and state that only a
// rank's own kernels touch, and the words in mapped memory through which a kernel speaks to its host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.hpp"
#include "layout/workspace.hpp"

namespace deep_moe::layout {

inline constexpr int kMaxKernelRanks = 64;   // the ranks of a token are the bits of one word
inline constexpr int kMaxNotifyBlocks = 64;  // blocks of one launch that read ids
inline constexpr int kMaxRowBlocks = 256;    // blocks of one launch that move rows
inline constexpr std::size_t kLowLatencyStateBytes = 256;
inline constexpr int kMaxSegments = 64;  // of one rank, in the tables of addresses that kernels read

// A word that is its own flag: the low 32 bits of the epoch (or of a sequence number) above a 32-bit count. Nothing
// else has to be ordered with it, so relaxed loads and stores do.
DM_HOST_DEVICE std::uint64_t tag_count(std::uint64_t tag, std::uint32_t count) { return (tag << 32) | count; }
DM_HOST_DEVICE bool has_tag(std::uint64_t word, std::uint64_t tag) { return (word >> 32) == (tag & 0xffffffffull); }
DM_HOST_DEVICE std::uint32_t tagged_count(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

// A sum that several blocks add to: arrivals above a 32-bit sum. Whoever completes the arrivals owns the total.
DM_HOST_DEVICE std::uint64_t arrive_with(std::uint32_t count) { return (std::uint64_t{1} << 32) | count; }
DM_HOST_DEVICE std::uint32_t arrivals(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }

// Blocks of a low-latency launch add to the upper bits of NotifyState::epoch once they have read it; the last of them
// takes that away. What a launch which left early has left there is no part of the epoch.
inline constexpr int kArrivalShift = 48;
DM_HOST_DEVICE std::uint64_t epoch_of(std::uint64_t word) { return word & ((std::uint64_t{1} << kArrivalShift) - 1); }

// Of one rank, for its own kernels.
struct alignas(64) NotifyState {
  std::uint64_t epoch;             // calls finished; the next call is epoch + 1
  std::uint64_t reset_epoch;       // the same at the last reset: no peer will announce this epoch or an earlier one
  std::uint64_t outcome;           // tag_count(epoch, NotifyOutcome) of the last call, for the kernels behind it
  std::uint32_t failed;            // 1 after a time-out, until the reset: every kernel leaves at once
  std::uint32_t error_claimed[2];  // by fails_buffer(): 1 while that record holds what the host has not taken
  std::uint64_t lost_peers;        // bit p: rank p will never write again, as the host has found out
};

// Of one rank, for its own launches of dispatch and combine; all zero between them.
struct alignas(64) RowState {
  std::uint64_t next_unit;  // pieces of work handed out to warps
};

// What notify has found out for the dispatch behind it, one a destination: its place, and this rank's rows there.
struct alignas(16) Route {
  Place place;
  std::uint64_t base = 0;       // of the place's segment, as mapped here; 0: not looked up
  std::int32_t first_row = 0;   // in the order of the destination's rows
  std::int32_t end_row = 0;     // behind the last
  std::int32_t total_rows = 0;  // of all sources
  std::int32_t reserved = 0;
};
static_assert(sizeof(Route) == 64);

// Regions in a rank's device memory, in order, behind those of workspace.hpp. Sizes and addresses derive from this
// list.
enum class NotifyRegion : int {
  kState,            // NotifyState, one
  kRowState,         // RowState, one
  kRoutes,           // Route[R]                by destination
  kBlockWords,       // u64[blocks][R]          rows of the tokens of each block, by destination
  kPositionWords,    // u64[blocks]             tag_count(epoch, blocks) once a block's positions are written
  kExpertSums,       // u64[kMaxExperts + R]    notify's sums over blocks, by expert, then by rank; zero between calls
  kLayoutSums,       // u64[kMaxExperts + R]    the same for get_dispatch_layout
  kLowLatencyState,  // LowLatencyState, one (low_latency_words.hpp)
  kCountWords,  // u64[depth][R][R + Lmax] by source: its rows for every rank, then its entries for each of my experts
  kBlocksDone,  // u64[R][row blocks]      by source: tag_count(epoch, its blocks) from each block that is through
  kCount,
};

inline constexpr std::size_t region_bytes(NotifyRegion region, int num_ranks) {
  const std::size_t r = static_cast<std::size_t>(num_ranks);
  const std::size_t word = sizeof(std::uint64_t);
  switch (region) {
    case NotifyRegion::kState: return sizeof(NotifyState);
    case NotifyRegion::kRowState: return sizeof(RowState);
    case NotifyRegion::kRoutes: return sizeof(Route) * r;
    case NotifyRegion::kBlockWords: return word * kMaxNotifyBlocks * r;
    case NotifyRegion::kPositionWords: return word * kMaxNotifyBlocks;
    case NotifyRegion::kExpertSums:
    case NotifyRegion::kLayoutSums: return word * (kMaxExperts + r);
    case NotifyRegion::kLowLatencyState: return kLowLatencyStateBytes;
    case NotifyRegion::kCountWords:
      return word * kAnnounceDepth * r * (r + static_cast<std::size_t>(expert_count_stride(num_ranks)));
    case NotifyRegion::kBlocksDone: return word * r * kMaxRowBlocks;
    default: return 0;
  }
}

inline constexpr std::size_t region_offset(NotifyRegion region, int num_ranks) {
  std::size_t offset = align_up(workspace_bytes(num_ranks), kAlign);
  for (int i = 0; i < static_cast<int>(region); ++i)
    offset = align_up(offset + region_bytes(static_cast<NotifyRegion>(i), num_ranks), kAlign);
  return offset;
}

// Device memory that a rank's control words need, those of workspace.hpp included; zeroed before first use.
inline constexpr std::size_t device_workspace_bytes(int num_ranks) {
  return region_offset(NotifyRegion::kCount, num_ranks);
}

// Accessors for any rank's device workspace, given its base. Made by the host, used on either side.
class DeviceLayout {
 public:
  DeviceLayout() = default;
  explicit DeviceLayout(int num_ranks)
      : num_ranks_(num_ranks),
        words_per_src_(num_ranks + expert_count_stride(num_ranks)),
        announce_(region_offset(Region::kAnnounce, num_ranks)),
        consumed_(region_offset(Region::kConsumed, num_ranks)) {
    for (int i = 0; i < static_cast<int>(NotifyRegion::kCount); ++i)
      offsets_[i] = region_offset(static_cast<NotifyRegion>(i), num_ranks);
  }

  // The same record as Workspace::announce.
  DM_HOST_DEVICE Announce& announce(char* base, std::uint64_t epoch, int src) const {
    return reinterpret_cast<Announce*>(base + announce_)[ring_slot(epoch) * num_ranks_ + src];
  }
  // The same word as Workspace::slot_word(Region::kConsumed, slot, receiver).
  DM_HOST_DEVICE std::uint64_t* consumed(char* base, int slot, int receiver) const {
    return &reinterpret_cast<Word*>(base + consumed_)[slot * num_ranks_ + receiver].value;
  }
  DM_HOST_DEVICE char* low_latency_state(char* base) const { return at<char>(base, NotifyRegion::kLowLatencyState); }
  DM_HOST_DEVICE RowState& row_state(char* base) const { return *at<RowState>(base, NotifyRegion::kRowState); }
  DM_HOST_DEVICE Route& route(char* base, int dst) const { return at<Route>(base, NotifyRegion::kRoutes)[dst]; }
  DM_HOST_DEVICE std::uint64_t* blocks_done(char* base, int src) const {  // [kMaxRowBlocks]
    return at<std::uint64_t>(base, NotifyRegion::kBlocksDone) + src * kMaxRowBlocks;
  }
  DM_HOST_DEVICE NotifyState& state(char* base) const { return *at<NotifyState>(base, NotifyRegion::kState); }
  DM_HOST_DEVICE std::uint64_t* block_words(char* base, int block) const {  // [R] over destinations
    return at<std::uint64_t>(base, NotifyRegion::kBlockWords) + block * num_ranks_;
  }
  DM_HOST_DEVICE std::uint64_t* position_words(char* base) const {  // [kMaxNotifyBlocks]
    return at<std::uint64_t>(base, NotifyRegion::kPositionWords);
  }
  DM_HOST_DEVICE std::uint64_t* expert_sums(char* base) const {  // [E]
    return at<std::uint64_t>(base, NotifyRegion::kExpertSums);
  }
  DM_HOST_DEVICE std::uint64_t* rank_sums(char* base) const { return expert_sums(base) + kMaxExperts; }  // [R]
  DM_HOST_DEVICE std::uint64_t* layout_sums(char* base) const {                                          // [E + R]
    return at<std::uint64_t>(base, NotifyRegion::kLayoutSums);
  }
  DM_HOST_DEVICE std::uint64_t* rank_words(char* base, std::uint64_t epoch, int src) const {  // [R] over destinations
    return at<std::uint64_t>(base, NotifyRegion::kCountWords) +
           static_cast<std::ptrdiff_t>(ring_slot(epoch) * num_ranks_ + src) * words_per_src_;
  }
  DM_HOST_DEVICE std::uint64_t* expert_words(char* base, std::uint64_t epoch, int src) const {  // [L] of the reader
    return rank_words(base, epoch, src) + num_ranks_;
  }

 private:
  DM_HOST_DEVICE static int ring_slot(std::uint64_t epoch) { return static_cast<int>(epoch % kAnnounceDepth); }
  template <typename T>
  DM_HOST_DEVICE T* at(char* base, NotifyRegion region) const {
    return reinterpret_cast<T*>(base + offsets_[static_cast<int>(region)]);
  }

  int num_ranks_ = 0;
  int words_per_src_ = 0;
  std::size_t announce_ = 0, consumed_ = 0;
  std::size_t offsets_[static_cast<int>(NotifyRegion::kCount)] = {};
};

// ---- What kernels tell their host, in mapped memory.

// How a notify ended. All ranks of a call come to the same one of the first three.
enum class NotifyOutcome : std::uint32_t {
  kNone = 0,
  kRowsFit,       // every rank's rows fit its place: they may move
  kTooSmall,      // some rank's place is too small; it may offer a larger one
  kTooSmallHard,  // the same, and a rank whose place is too small cannot grow it
  kRefused,       // a peer refused its arguments
  kMismatch,      // a peer makes another call
  kFailed,        // a wait passed its deadline, in this call or an earlier one
};

// How the rows of one rank fit its place.
enum class PlaceFit : std::uint32_t { kFits = 0, kTooSmall, kTooSmallHard };

enum class WaitPhase : std::uint32_t {
  kNone = 0,
  kBlockWords,
  kAnnounce,
  kCountWords,
  kRingSpace,
  kRowLoad,
  kRowsDone,
  kPullDone,
  kSlotSpace,
  kRouting,
  kUnits,
  kWeights,
  kRecord,
  kRelay,
  kCredit,
  kChunk,
};

inline constexpr const char* wait_phase_name(WaitPhase phase) {
  switch (phase) {
    case WaitPhase::kBlockWords: return "notify: counts of this rank's other blocks";
    case WaitPhase::kAnnounce: return "announcement of the call";
    case WaitPhase::kCountWords: return "notify: counts of rows and experts";
    case WaitPhase::kRowLoad: return "rows on their way into shared memory";
    case WaitPhase::kRowsDone: return "dispatch: rows of a peer";
    case WaitPhase::kPullDone: return "combine: a peer's word that it has read this rank's rows";
    case WaitPhase::kSlotSpace: return "low latency: a peer that still has to read the slot's last rows (its hook)";
    case WaitPhase::kRouting: return "low latency: what a peer sends";
    case WaitPhase::kUnits: return "low latency: rows of a peer";
    case WaitPhase::kWeights: return "low latency: weights of a peer";
    case WaitPhase::kRecord: return "notify: the record of a peer on another node";
    case WaitPhase::kRelay: return "notify: a record of another node that a rank of this one relays";
    case WaitPhase::kCredit: return "ring between nodes: a slot that the peer has yet to read";
    case WaitPhase::kChunk: return "ring between nodes: rows of a peer";
    case WaitPhase::kRingSpace: return "refusal: space in the ring of announcements";
    default: return "none";
  }
}

enum class KernelErrorKind : std::uint32_t {
  kNone = 0,
  kTimeout,
  kPeerRefused,
  kCallMismatch,
  kUnknownSegment,  // a peer's place lies in a segment that has no address here; `seen` is its number
  kPeerLost,        // waited for a peer of `lost_peers`
  kTooFewRows,      // `peer` takes `expected` rows, a fixed number, and `seen` arrive there; nothing was sent
};

// Whether the Buffer is failed from then on, until a reset. After the others its next call works.
DM_HOST_DEVICE constexpr bool fails_buffer(KernelErrorKind kind) {
  return kind == KernelErrorKind::kTimeout || kind == KernelErrorKind::kPeerLost ||
         kind == KernelErrorKind::kUnknownSegment;
}

// The first failure, or the first other error, since the host took the last one. Filled by one thread; `kind` is
// written last, release.
struct alignas(64) ErrorRecord {
  std::uint32_t kind;   // KernelErrorKind
  std::uint32_t phase;  // WaitPhase
  std::int32_t rank;    // who waited ...
  std::int32_t peer;    // ... for whom
  std::uint64_t epoch;
  std::uint64_t expected;
  std::uint64_t seen;
  CallSignature peer_signature;  // refused or other call: what the peer announced
  std::uint32_t peer_status;     // CallStatus
  std::uint32_t num_reason_bytes;
  char reason[kReasonBytes];
};

// Regions in mapped host memory, in order. Every count is tagged with the sequence number of the host's call, so the
// host needs no order among them: it reads each word until its tag is right.
enum class HostRegion : int {
  kError,       // ErrorRecord[2], by fails_buffer(): a failure is never lost for want of room
  kStarted,     // u64      tag_count(sequence, 1) once the kernel runs, one
  kOutcome,     // u64      tag_count(sequence, NotifyOutcome), one
  kRankRows,    // u64[R]   rows that each rank receives
  kRankFit,     // u64[R]   PlaceFit
  kSourceRows,  // u64[R]   rows that this rank receives from each
  kExpertRows,  // u64[Lmax] entries for each of my experts, all sources
  kMasked,      // u32[R]   low latency: 1 once this rank has masked that one
  kNodeRows,    // u64[R]   between nodes, by node: rows that this rank's peer there sends over the network
  kCount,
};

inline constexpr std::size_t region_bytes(HostRegion region, int num_ranks) {
  const std::size_t word = sizeof(std::uint64_t);
  switch (region) {
    case HostRegion::kError: return 2 * sizeof(ErrorRecord);
    case HostRegion::kStarted:
    case HostRegion::kOutcome: return word;
    case HostRegion::kRankRows:
    case HostRegion::kRankFit:
    case HostRegion::kNodeRows:
    case HostRegion::kSourceRows: return word * static_cast<std::size_t>(num_ranks);
    case HostRegion::kExpertRows: return word * static_cast<std::size_t>(expert_count_stride(num_ranks));
    case HostRegion::kMasked: return sizeof(std::uint32_t) * static_cast<std::size_t>(num_ranks);
    default: return 0;
  }
}

inline constexpr std::size_t region_offset(HostRegion region, int num_ranks) {
  std::size_t offset = 0;
  for (int i = 0; i < static_cast<int>(region); ++i)
    offset = align_up(offset + region_bytes(static_cast<HostRegion>(i), num_ranks), kAlign);
  return offset;
}

inline constexpr std::size_t host_words_bytes(int num_ranks) { return region_offset(HostRegion::kCount, num_ranks); }

// Accessors; `base` is the memory as seen by whoever asks (host and device may map it at different addresses).
class HostLayout {
 public:
  HostLayout() = default;
  explicit HostLayout(int num_ranks) {
    for (int i = 0; i < static_cast<int>(HostRegion::kCount); ++i)
      offsets_[i] = region_offset(static_cast<HostRegion>(i), num_ranks);
  }

  DM_HOST_DEVICE ErrorRecord& error(char* base, bool failure) const {
    return at<ErrorRecord>(base, HostRegion::kError)[failure ? 1 : 0];
  }
  DM_HOST_DEVICE std::uint64_t& started(char* base) const { return *at<std::uint64_t>(base, HostRegion::kStarted); }
  DM_HOST_DEVICE std::uint64_t& outcome(char* base) const { return *at<std::uint64_t>(base, HostRegion::kOutcome); }
  DM_HOST_DEVICE std::uint64_t* rank_rows(char* base) const { return at<std::uint64_t>(base, HostRegion::kRankRows); }
  DM_HOST_DEVICE std::uint64_t* rank_fit(char* base) const { return at<std::uint64_t>(base, HostRegion::kRankFit); }
  DM_HOST_DEVICE std::uint64_t* source_rows(char* base) const {
    return at<std::uint64_t>(base, HostRegion::kSourceRows);
  }
  DM_HOST_DEVICE std::uint64_t* expert_rows(char* base) const {
    return at<std::uint64_t>(base, HostRegion::kExpertRows);
  }
  DM_HOST_DEVICE std::uint64_t* node_rows(char* base) const { return at<std::uint64_t>(base, HostRegion::kNodeRows); }
  DM_HOST_DEVICE std::uint32_t* masked(char* base) const { return at<std::uint32_t>(base, HostRegion::kMasked); }

 private:
  template <typename T>
  DM_HOST_DEVICE T* at(char* base, HostRegion region) const {
    return reinterpret_cast<T*>(base + offsets_[static_cast<int>(region)]);
  }

  std::size_t offsets_[static_cast<int>(HostRegion::kCount)] = {};
};

}  // namespace deep_moe::layout
