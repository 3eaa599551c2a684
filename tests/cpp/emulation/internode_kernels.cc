// The kernels between nodes, compiled for the CPU.
#include "kernels/internode/notify.cu"

#include "kernels/internode/dispatch.cu"

#include "kernels/internode/combine.cu"

namespace deep_moe::kernels::internode {

void prepare_direct() {}  // this program has no low-latency calls

}  // namespace deep_moe::kernels::internode
