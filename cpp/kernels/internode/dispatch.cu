// Dispatch between nodes, over mapped memory.
#include <cuda_runtime.h>

#include "kernels/internode/dispatch_kernel.cuh"

namespace deep_moe::kernels::internode {

void dispatch(const RailDomain& domain, const MappedBlocks& network, const DispatchArgs& args, Stream stream) {
  launch_dispatch(domain, MappedNetwork{network, domain.rank()}, args, stream);
}

void prepare_dispatch() { load_dispatch<MappedNetwork>(); }

}  // namespace deep_moe::kernels::internode
