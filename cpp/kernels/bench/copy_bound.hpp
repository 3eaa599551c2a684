// What dispatch and combine are held against: a kernel that only copies rows with the copy engine, through the same
// kind of ring of chunks in shared memory. No counts, no words, no waiting for peers, no sums.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"

namespace deep_moe::bench {

inline constexpr int kMaxCopyRanks = 32;  // the ranks of a row are the bits of one word

// dispatch: one load of a row, a store to each rank that it goes to. combine: a load from each rank, one store (of what
// was loaded last). Addresses may be those of other GPUs.
struct CopyBound {
  const char* from[kMaxCopyRanks] = {};  // rows at token * row_bytes; all addresses and sizes are multiples of 16
  char* to[kMaxCopyRanks] = {};
  int num_loads = 1;
  int num_stores = 1;
  const bool* wanted = nullptr;  // [num_tokens, num_wanted] which of the stores, or of several loads, are made; null:
  int num_wanted = 0;            // all. 0: as many as stores or loads; those past num_wanted are always made
  std::int64_t num_tokens = 0;
  int row_bytes = 0, chunk_bytes = 0;
  int extra_bytes = 0;  // a piece more a row (scales), of arrays of its own
  const char* extra_from = nullptr;
  char* extra_to[kMaxCopyRanks] = {};
  // Null: warp w of n takes tokens w, w + n, ... Else two words, 0 between launches: the next token to whoever asks.
  std::uint64_t* tickets = nullptr;
};

struct CopyShape {
  int num_sms = 1, num_warps = 12, num_stages = 4;  // stages: 3 or 4 chunks a warp
};

// Loads the kernels and lets them take the shared memory they may need. Call it once a device, before the first launch.
// False: what this build has for the current device knows no copy engine, and the kernels do nothing there.
bool prepare_copy_bound();
void launch_copy_bound(const CopyBound& args, const CopyShape& shape, kernels::Stream stream);

}  // namespace deep_moe::bench
