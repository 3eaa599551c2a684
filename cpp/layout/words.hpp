// Control words that ranks write into each other's workspaces. Plain structs: host, CPU and CUDA code agree on them.
#pragma once

#include <cstdint>

#include "layout/hash.hpp"
#include "layout/host_device.hpp"

namespace deep_moe::layout {

inline constexpr int kAnnounceDepth = 8;    // calls a rank may be ahead of a peer that it has not heard from
inline constexpr int kLowLatencySlots = 4;  // calls in flight + 1
inline constexpr int kMaxExperts = 16384;   // of a Buffer's high-throughput calls
inline constexpr int kMaxTopk = 64;
inline constexpr int kReasonBytes = 320;
inline constexpr int kAlign = 256;  // of regions and of tensors in the heap

enum class CallKind : std::uint32_t {
  kNone = 0,
  kDispatch,
  kCachedDispatch,
  kCombine,
  kLowLatencyDispatch,
  kLowLatencyCombine,
};

// What all ranks of a call must agree on. Compared by hash; the fields are there for the error's text.
struct CallSignature {
  std::uint32_t kind = 0;
  std::uint32_t x_dtype = 0;
  std::int64_t row_bytes = 0;
  std::int64_t scale_bytes = 0;  // of one row
  std::int64_t num_experts = 0;
  std::int64_t topk = 0;
  std::int64_t max_tokens = 0;  // low latency: M
  std::int64_t flags = 0;       // kind-specific switches that change what crosses the link
  std::uint64_t handle_hash = 0;
};

// FNV-1a over the words of a signature.
DM_HOST_DEVICE std::uint64_t signature_hash(const CallSignature& signature) {
  const std::uint64_t words[] = {
      (static_cast<std::uint64_t>(signature.kind) << 32) | signature.x_dtype,
      static_cast<std::uint64_t>(signature.row_bytes),
      static_cast<std::uint64_t>(signature.scale_bytes),
      static_cast<std::uint64_t>(signature.num_experts),
      static_cast<std::uint64_t>(signature.topk),
      static_cast<std::uint64_t>(signature.max_tokens),
      static_cast<std::uint64_t>(signature.flags),
      signature.handle_hash,
  };
  std::uint64_t hash = kFnvStart;
  for (const std::uint64_t word : words) {
    for (int byte = 0; byte < 8; ++byte) hash = fnv_step(hash, (word >> (8 * byte)) & 0xff);
  }
  return hash;
}

enum PlaceFlags : std::int32_t {
  kPlaceHard = 1,          // the capacity cannot grow (num_worst_tokens)
  kPlaceColumnScales = 2,  // scales are stored column-major
  kPlaceWindow = 4,        // takes the rows from first_row on alone; for launches whose counts are known (waves)
};

// Where a rank offers memory to its peers, in its own segments.
struct Place {
  std::int32_t segment = -1;  // -1: none
  std::int32_t flags = 0;     // PlaceFlags
  std::int64_t offset = 0;
  std::int64_t capacity = 0;   // rows
  std::int64_t first_row = 0;  // of a window: the final index of the row that it takes first
};

enum class CallStatus : std::uint32_t { kOk = 0, kRefused = 1, kFailed = 2 };

// One a (ring slot, source) in every rank's workspace, written by the source at the start of each call.
struct alignas(64) Announce {
  std::uint64_t epoch;  // written last, release: everything below (and the counts) belongs to this epoch
  std::uint32_t status;
  std::uint32_t num_reason_bytes;
  std::uint64_t hash;
  CallSignature signature;
  std::int64_t num_tokens;
  Place place;         // rows
  Place weight_place;  // combine: top-k weights
  char reason[kReasonBytes];
};

// After the counts are known: a rank whose place was too small says what it got instead.
struct alignas(64) Regrow {
  std::uint64_t epoch;  // written last, release
  std::uint32_t status;
  std::uint32_t num_reason_bytes;
  Place place;
  char reason[kReasonBytes];
};

// A rank that has failed says so to every peer, once a generation.
struct alignas(64) Abort {
  std::uint64_t generation;  // written last, release
  std::uint32_t error_kind;
  std::uint32_t num_reason_bytes;
  char reason[2 * kReasonBytes];
};

// One word a cache line, so that polled words do not share lines with their neighbours.
struct alignas(64) Word {
  std::uint64_t value;
};

// Progress inside one call: the epoch's low 20 bits tag a 44-bit count, so that stale words never look current.
inline constexpr int kCountBits = 44;
DM_HOST_DEVICE std::uint64_t pack_count(std::uint64_t epoch, std::uint64_t count) {
  return (epoch << kCountBits) | count;
}
// The count of `word` if it belongs to `epoch`, else 0.
DM_HOST_DEVICE std::uint64_t unpack_count(std::uint64_t word, std::uint64_t epoch) {
  const std::uint64_t tag_mask = ~((std::uint64_t{1} << kCountBits) - 1);
  return (word & tag_mask) == (epoch << kCountBits) ? word & ~tag_mask : 0;
}

// What a reset goes to: the generation above the epoch, so that the larger word wins both.
DM_HOST_DEVICE std::uint64_t pack_reset(std::uint64_t generation, std::uint64_t epoch) {
  return (generation << kCountBits) | epoch;
}
DM_HOST_DEVICE std::uint64_t reset_generation(std::uint64_t word) { return word >> kCountBits; }
DM_HOST_DEVICE std::uint64_t reset_epoch(std::uint64_t word) { return word & ((std::uint64_t{1} << kCountBits) - 1); }

}  // namespace deep_moe::layout
