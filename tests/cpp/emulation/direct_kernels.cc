// Low-latency calls between nodes, compiled for the CPU.
#include "kernels/internode/direct.cu"

namespace deep_moe::kernels::internode {

alignas(128) thread_local char dynamic_shared[kMostDirectShared];

void prepare() {}

}  // namespace deep_moe::kernels::internode
