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

// A warp's memory for rows on their way: sets of chunks, one chunk of each row that a sum takes.
struct CombineRing {
  int max_rows = 0;  // of a set; 0 without the copy engine
  int vectors = 4;   // 16-byte pieces of a chunk for each lane, so a chunk has vectors * 512 bytes
  int num_warps = 14;

  static constexpr int kSets = 2;
  DM_HOST_DEVICE constexpr int chunk_bytes() const { return vectors * 512; }
  DM_HOST_DEVICE constexpr int set_bytes() const { return max_rows * chunk_bytes(); }
  DM_HOST_DEVICE constexpr int bytes() const { return kSets * set_bytes(); }
};

struct CombineTuning {
  static constexpr int kMaxWarps = 15;        // that sum rows
  static constexpr int kWeightWarps = 1;      // that sum top-k weights; 16 in all, for registers go by four warps
  static constexpr int kWeightTokens = 4;     // whose weights a lane loads before it uses the first ...
  static constexpr int kWeightRanks = 2;      // ... of so many holders
  static constexpr int kVectorsInFlight = 4;  // 16-byte loads of a lane without the copy engine
  // By the number of rows that are summed at most. A lane has all its pieces of a set in registers: max_rows * vectors
  // of them.
  DM_HOST_DEVICE static constexpr CombineRing ring(int num_rows) {
    if (num_rows <= 2) return {2, 7, 15};
    if (num_rows == 3) return {3, 5, 14};
    if (num_rows == 4) return {4, 4, 13};
    if (num_rows <= 8) return {8, 2, 13};
    return {16, 1, 13};
  }
};

struct ExpertMajorTuning {
  static constexpr int kWarps = 8;
  static constexpr int kMaxPlaceBlocks = 64;
  static constexpr int kEntriesPerBlock = 1024;  // of a block that places entries, at least
  static constexpr int kVectors = 4;             // 16-byte pieces of a row that a lane has in flight
  static constexpr int kBlocksPerSm = 8;         // that copy or sum: they wait for nobody
  // Warps that place entries, for their counts are in shared memory, beside two numbers an expert.
  DM_HOST_DEVICE static constexpr int place_warps(int num_experts) {
    const int fit = 12288 / num_experts - 2;
    return fit < 1 ? 1 : fit < kWarps ? fit : kWarps;
  }
};

struct LowLatencyTuning {
  static constexpr int kDispatchCarriers = 14, kCombineCarriers = 15;  // warps of a block that carry rows, at most ...
  static constexpr int kFewestCarriers = 4;                            // ... and where there is little to do
  static constexpr int kDispatchOthers = 2;  // warps beside them: words and counts; what is told to peers
  static constexpr int kCombineOthers = 1;
  static constexpr int kFewestTasks = 40;    // as many as a grid has warps for, also where this rank has no rows
  static constexpr int kFewestTokens = 8;    // the same of a dispatch
  static constexpr int kNarrowDispatch = 8;  // most warps of a block with which narrow tasks are quicker
  static constexpr int kNarrowCombine = 10;
  static constexpr int kRowsInFlight = 8;  // of a warp that sums
  static constexpr int kRowsAwaited = 2;   // of rows by expert
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
