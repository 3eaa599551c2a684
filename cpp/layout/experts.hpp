// Which rank owns which expert: contiguous blocks, the first E % R ranks own one expert more.
#pragma once

#include "layout/host_device.hpp"

namespace deep_moe::layout {

struct ExpertBlocks {
  int num_experts;
  int num_ranks;
  int base;   // experts of a rank past the first `extra`
  int extra;  // ranks that own base + 1

  DM_HOST_DEVICE ExpertBlocks(int num_experts_, int num_ranks_)
      : num_experts(num_experts_),
        num_ranks(num_ranks_),
        base(num_experts_ / num_ranks_),
        extra(num_experts_ % num_ranks_) {}

  DM_HOST_DEVICE int first_expert(int rank) const { return rank * base + (rank < extra ? rank : extra); }
  DM_HOST_DEVICE int num_local_experts(int rank) const { return base + (rank < extra ? 1 : 0); }
  DM_HOST_DEVICE int max_local_experts() const { return base + (extra > 0 ? 1 : 0); }
  // `expert_idx` in [0, num_experts).
  DM_HOST_DEVICE int rank_of(int expert_idx) const {
    const int split = extra * (base + 1);
    return expert_idx < split ? expert_idx / (base + 1) : extra + (expert_idx - split) / base;
  }
};

}  // namespace deep_moe::layout
