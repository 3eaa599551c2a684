// The messages between ranks, for the files that make up DeviceWorld.
#pragma once

#include <cstdint>

#include "runtime/rank_talk.hpp"

namespace deep_moe::cuda {

// Between near ranks.
enum MessageKind : std::uint32_t {
  kSegment = RankTalk::kOther,  // id, bytes; text: a Ticket; with an fd where the kind has one
  kMapped,                      // id: I have mapped your segment; text: why not
  kRetired,                     // id: my segment will not be used
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
