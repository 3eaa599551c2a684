// The messages between ranks, for the files that make up DeviceWorld.
#pragma once

#include <cstdint>

namespace deep_moe::cuda {

enum MessageKind : std::uint32_t {
  kSegment = 1,   // id, bytes; text: a Ticket; with an fd where the kind has one
  kMapped,        // id: I have mapped your segment; text: why not
  kRetired,       // id: my segment will not be used
  kSaid,          // id: round of exchange(); value, text: what I say in it
  kResetTo,       // value: generation; id: round; text: epoch; none of my kernels runs
  kResetReached,  // value: generation
  kDeparted,      // value 1: none of my kernels runs; text: what has failed me
  kSaidInCall,    // id: of exchange_in_call(); value, text: what I say in it
};

// Indices of the pinned words.
enum MirrorWord : int {
  kMirrorLost = 0,
  kMirrorNodesLost,
  kMirrorOne,
  kMirrorEpoch,
  kMirrorNodesEpoch,
  kNumMirrorWords
};

}  // namespace deep_moe::cuda
