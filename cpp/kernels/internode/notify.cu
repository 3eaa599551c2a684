// Notify between nodes: one block counts this rank's tokens, exchanges records with the peers and relays them inside
// the node, and says whether all ranks make the same call.
#include <cuda_runtime.h>

#include "kernels/internode/launch.cuh"
#include "kernels/internode/notify_kernel.cuh"

namespace deep_moe::kernels::internode {

void notify(const RailDomain& domain, const MappedBlocks& network, NotifyArgs args, Stream stream) {
  launch_notify(domain, MappedNetwork{network, domain.rank()}, args, stream);
}

void prepare_notify() { load_notify<MappedNetwork>(); }

}  // namespace deep_moe::kernels::internode
