// Rows grouped by local expert: a regrouping behind dispatch and a sum ahead of combine. Neither changes what crosses
// the links: one row a (token, rank).
#pragma once

#include "cpu/protocol.hpp"

namespace deep_moe::cpu {

// What dispatch has received, expert-major: as args.expert_major asks for it, or like args.handle.
DispatchResult group_by_expert(Context context, const DispatchArgs& args, DispatchResult received);
// The arguments of a combine of received rows: each is the sum of its expert-major rows. They live in `kept`.
CombineArgs sum_by_row(Context context, const CombineArgs& args, std::vector<Tensor>* kept);

}  // namespace deep_moe::cpu
