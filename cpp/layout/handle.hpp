// What the `meta` tensors of handles hold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/workspace.hpp"

namespace deep_moe::layout {

enum DispatchMeta : int {
  kMetaNumTokens = 0,  // T
  kMetaNumRecv,        // N, rows of recv_x (num_worst_tokens where given)
  kMetaNumArrived,     // rows that really arrived
  kMetaNumExperts,     // E, 0 if unknown
  kMetaTopk,           // K, 0 if unknown
  kMetaNumRanks,
  kMetaHash,           // of the rank-by-rank counts: the same on every rank of one dispatch
  kMetaNumNodes,       // 0: the ranks are on one node
  kMetaNumExpertRows,  // P of an expert-major dispatch, else -1
  kDispatchMetaSize,  // on GPUs R more: the rows that came from each rank, where the host knows them; between nodes one
                      // more behind them: rows of send_nvl_index
};

enum LowLatencyMeta : int {
  kLowMetaMaxTokens = 0,  // M
  kLowMetaHidden,         // H
  kLowMetaNumExperts,     // E
  kLowMetaTopk,           // K
  kLowMetaNumRanks,
  kLowMetaNumTokens,  // T of the owner
  kLowMetaHasWeights,
  kLowMetaXDtype,       // of the tensor given to dispatch (deep_moe::DType)
  kLowMetaHash,         // of the dispatch: the same on every rank
  kLowMetaComplete,     // 1 once the receive half has run
  kLowMetaIdsHash,      // of this rank's topk_idx
  kLowMetaWeightsHash,  // of this rank's topk_weights, if they were given
  kLowLatencyMetaSize,
};

// Where the other tensors of a low-latency handle lie on GPUs: in one piece of memory, byte offsets. L local experts.
struct LowLatencyHandleWords {
  std::size_t src_info = 0, layout_range = 0, recv_pos = 0, recv_weights = 0, total = 0;

  LowLatencyHandleWords(std::int64_t num_local, std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t topk,
                        bool has_weights) {
    const auto bytes = [](std::int64_t items, std::size_t item) {
      return align_up(static_cast<std::size_t>(items) * item, kAlign);
    };
    layout_range = src_info + bytes(num_local * num_ranks * max_tokens, sizeof(std::int32_t));
    recv_pos = layout_range + bytes(num_local * num_ranks, sizeof(std::int64_t));
    recv_weights = recv_pos + bytes(num_ranks * (max_tokens + 1) * topk, sizeof(std::int32_t));
    total = recv_weights + (has_weights ? bytes(num_ranks * max_tokens * topk, sizeof(float)) : 0);
  }
};

}  // namespace deep_moe::layout
