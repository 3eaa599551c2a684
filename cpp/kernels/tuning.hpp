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

// Blocks that read ids: none without tokens but the first. `wanted` 0: as tuned.
inline int num_layout_blocks(std::int64_t num_tokens, int wanted) {
  const std::int64_t chunks =
      std::max<std::int64_t>(1, (num_tokens + NotifyTuning::kThreads - 1) / NotifyTuning::kThreads);
  const std::int64_t most = wanted > 0 ? wanted : NotifyTuning::kAutoBlocks;
  const std::int64_t chunks_per_block = (chunks + most - 1) / most;
  return static_cast<int>((chunks + chunks_per_block - 1) / chunks_per_block);
}

}  // namespace deep_moe::kernels
