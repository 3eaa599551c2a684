// Low-latency calls between nodes, over mapped memory.
#include <cuda_runtime.h>

#include "kernels/internode/direct_combine_kernel.cuh"
#include "kernels/internode/direct_dispatch_kernel.cuh"

namespace deep_moe::kernels::internode {

std::int64_t direct_part_bytes(int num_ranks, const LowLatencyDispatchArgs& args) {
  return static_cast<std::int64_t>(direct_message(num_ranks, args).bytes(args.call.max_tokens));
}
std::int64_t direct_part_bytes(int num_ranks, const LowLatencyCombineArgs& args, bool by_expert) {
  return static_cast<std::int64_t>(direct_message(args).bytes(most_rows(num_ranks, args, by_expert)));
}

void low_latency_dispatch(const DirectDomain& domain, const MappedBlocks& network, const LowLatencyDispatchArgs& args,
                          Stream stream) {
  launch_direct_dispatch(domain, MappedNetwork{network, domain.group.rank}, args, stream);
}
void low_latency_combine(const DirectDomain& domain, const MappedBlocks& network, const LowLatencyCombineArgs& args,
                         Stream stream) {
  launch_direct_combine(domain, MappedNetwork{network, domain.group.rank}, args, stream);
}
void low_latency_refuse(const DirectDomain& domain, const MappedBlocks& network, const DirectRefusal& args,
                        Stream stream) {
  launch_direct_refusal(domain, MappedNetwork{network, domain.group.rank}, args, stream);
}

void prepare_direct() {
  load_direct_dispatch<MappedNetwork>();
  load_direct_combine<MappedNetwork>();
}

}  // namespace deep_moe::kernels::internode
