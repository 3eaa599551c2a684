// What the `meta` tensors of handles hold.
#pragma once

namespace deep_moe::layout {

enum DispatchMeta : int {
  kMetaNumTokens = 0,  // T
  kMetaNumRecv,        // N, rows of recv_x (num_worst_tokens where given)
  kMetaNumArrived,     // rows that really arrived
  kMetaNumExperts,     // E, 0 if unknown
  kMetaTopk,           // K, 0 if unknown
  kMetaNumRanks,
  kMetaHash,          // of the rank-by-rank counts: the same on every rank of one dispatch
  kMetaNumNodes,      // 0: the ranks are on one node
  kDispatchMetaSize,  // on GPUs R more: the rows that came from each rank, where the host knows them
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

}  // namespace deep_moe::layout
