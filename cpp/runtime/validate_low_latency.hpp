// Checks of what users pass to the low-latency calls, on every kind of device, and what all ranks of a call must agree
// on. See validate.hpp.
#pragma once

#include <cstdint>

#include <deep_moe/buffer.hpp>

#include "layout/blocks.hpp"
#include "layout/words.hpp"

namespace deep_moe {

// Bits of CallSignature::flags. What decides about sizes is in the signature's other fields.
enum LowLatencyFlag : std::int64_t {
  kFlagFp8 = 1,
  kFlagRoundScale = 2,
  kFlagUe8m0 = 4,
  kFlagWeights = 8,    // dispatch: given; combine: known from the dispatch
  kFlagByExpert = 16,  // combine: a row for each expert
  kFlagLogfmt = 32,
  kFlagOpaque = 64,  // dispatch: with scales, no cast
  kFlagShrink = 128,
};
inline constexpr int kFlagSlotShift = 8;        // two bits: the slot
inline constexpr int kFlagScaleTypeShift = 12;  // DType of opaque scales
inline constexpr int kFlagStagingShift = 32;    // on GPUs: how often the staging has been made

inline constexpr int kMaxInFlight = layout::kLowLatencySlots - 1;  // calls whose hooks are still to be called

// Throws Error if no more calls may be sent.
void check_in_flight(int num_in_flight, const char* call);

// `on_host`: tensors can be read here, so that ids and weights are checked as well. On GPUs handles hold a row more
// behind the positions of each source's tokens: how many those are.
void validate(const LowLatencyDispatchArgs& args, int rank, int num_ranks, bool on_host);
void validate(const LowLatencyCombineArgs& args, int rank, int num_ranks, bool on_host);
layout::CallSignature signature(const LowLatencyDispatchArgs& args);
layout::CallSignature signature(const LowLatencyCombineArgs& args);

// FNV-1a of what the ids (whatever their type) or the weights say.
std::int64_t hash_ids(const TensorView& topk_idx);
std::int64_t hash_weights(const TensorView& topk_weights);

}  // namespace deep_moe
