// A kernel that holds multiprocessors without using them: what work beside dispatch is held against.
#pragma once

#include <cstdint>

#include "kernels/api.hpp"

namespace deep_moe::bench {

void prepare_hold();
// For `nanoseconds`, as many blocks, threads and as much shared memory as a dispatch with the copy engine takes.
void launch_hold(int num_sms, int num_ranks, std::int64_t nanoseconds, kernels::Stream stream);

}  // namespace deep_moe::bench
