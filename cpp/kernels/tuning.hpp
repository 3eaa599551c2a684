// Launch numbers of the kernels, apart from their code. Measured on H200; intranode/README.md has the figures.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/notify_words.hpp"

namespace deep_moe::kernels {

struct NotifyTuning {
  static constexpr int kThreads = 256;  // a block: one token a thread
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kAutoBlocks = 32;  // most blocks that read ids, if the caller does not say
  static constexpr int kKeptChunks = 4;   // chunks of tokens whose ranks a block remembers instead of reading ids again
  static constexpr int kIdsInFlight = 8;  // ids of a token loaded before the first is used
  static constexpr int kWordsInFlight = 4;  // words of peers loaded before the first is checked
  static constexpr int kSumsInFlight = 4;   // sums added to before the first answer is used
};

static_assert(NotifyTuning::kThreads >= layout::kMaxKernelRanks, "one thread a rank");

struct DispatchTuning {
  static constexpr int kChunkBytes = 3584;  // of a row, moved as one
  static constexpr int kStages = 4;         // chunks of a warp in shared memory
  static constexpr int kWarps = 12;
  static constexpr int kVectorWarps = 16;     // without the copy engine
  static constexpr int kVectorsInFlight = 4;  // 16-byte loads of a lane
  static constexpr int num_warps(bool tma) { return tma ? kWarps : kVectorWarps; }
};

struct CombineTuning {
  static constexpr int kVectors = 7;  // most 16-byte vectors of a chunk that a lane sums
  static constexpr int kChunkBytes = kVectors * 32 * 16;
  static constexpr int kMaxWarps = 14;
  // Lists of addresses take the room of some warps' rings where there are many ranks.
  static constexpr int num_warps(int num_ranks) { return num_ranks <= 32 ? kMaxWarps : 12; }
  static constexpr int kRingBytes = 4 * kChunkBytes;  // chunks of a warp in shared memory
  static constexpr int kMaxStages = 16;
  static constexpr int kVectorsInFlight = 4;  // 16-byte loads of a lane without the copy engine
  static constexpr int kWeightsInFlight = 4;  // holders of a token whose weights are loaded ahead
  // The ring is cut into 1 << stage_shift chunks: room for one of each holder's, shorter where there are more ranks.
  static constexpr int stage_shift(int num_ranks) { return num_ranks <= 4 ? 2 : num_ranks <= 8 ? 3 : 4; }
};

// Blocks that read ids: none without tokens but the first. `wanted` 0: as tuned.
inline int num_layout_blocks(std::int64_t num_tokens, int wanted) {
  const std::int64_t chunks =
      std::max<std::int64_t>(1, (num_tokens + NotifyTuning::kThreads - 1) / NotifyTuning::kThreads);
  const std::int64_t most = wanted > 0 ? wanted : NotifyTuning::kAutoBlocks;
  const std::int64_t chunks_per_block = (chunks + most - 1) / most;
  return static_cast<int>((chunks + chunks_per_block - 1) / chunks_per_block);
}

}  // namespace deep_moe::kernels
