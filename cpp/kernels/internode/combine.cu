// Combine between nodes, over mapped memory.
#include <cuda_runtime.h>

#include "kernels/internode/combine_kernel.cuh"

namespace deep_moe::kernels::internode {

void prepare_notify();
void prepare_dispatch();
void prepare_direct();

void combine(const RailDomain& domain, const MappedBlocks& network, const CombineArgs& args, Stream stream) {
  launch_combine(domain, MappedNetwork{network, domain.rank()}, args, stream);
}

void prepare() {
  prepare_notify();
  prepare_dispatch();
  load_combine<MappedNetwork>();
  prepare_direct();
}

}  // namespace deep_moe::kernels::internode
