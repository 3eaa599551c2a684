// Notify between nodes: one block counts this rank's tokens, exchanges records with the peers and relays them inside
// the node, and says whether all ranks make the same call.
#include <cuda_runtime.h>

#include "kernels/internode/launch.cuh"
#include "kernels/internode/notify_kernel.cuh"

namespace deep_moe::kernels::internode {

namespace {

struct NodeRanks {
  std::uint64_t ranks[layout::kMaxNodes] = {};  // of each node, as bits
};

__global__ void __launch_bounds__(NotifyTuning::kThreads)
    count_nodes_kernel(const __grid_constant__ NodeRanks nodes, int num_nodes, int num_ranks, const bool* token_in_rank,
                       std::int64_t num_tokens, std::int32_t* num_tokens_per_node) {
  __shared__ std::int32_t counts[layout::kMaxNodes];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < num_nodes) counts[thread] = 0;
  __syncthreads();
  const RouteByMask route{token_in_rank, nullptr, num_ranks};
  for (std::int64_t t = thread; t < num_tokens; t += NotifyTuning::kThreads) {
    const std::uint64_t mask = route.template ranks<false>(t, nullptr);
    for (int node = 0; node < num_nodes; ++node)
      if ((mask & nodes.ranks[node]) != 0) atomicAdd(counts + node, 1);
  }
  __syncthreads();
  if (thread < num_nodes) num_tokens_per_node[thread] = counts[thread];
}

__global__ void restart_rings_kernel(const __grid_constant__ RailDomain domain, std::uint64_t generation) {
  const int node = static_cast<int>(threadIdx.x);
  if (node >= domain.num_nodes) return;
  layout::RailState& state = domain.state();
  state.sent[node] = state.received[node] = layout::pack_chunk_tag(generation, 0);
}

}  // namespace

void restart_rings(const RailDomain& domain, std::uint64_t generation, Stream stream) {
  internode::check_domain(domain);
  check_cuda(cudaMemsetAsync(&domain.state(), 0, sizeof(layout::RailState), static_cast<cudaStream_t>(stream)),
             "restart_rings");
  launch(restart_rings_kernel, 1, 1, 0, stream, false, "launch of restart_rings", domain, generation);
}

void count_nodes(const RailDomain& domain, const bool* token_in_rank, std::int64_t num_tokens,
                 std::int32_t* num_tokens_per_node, Stream stream) {
  internode::check_domain(domain);
  NodeRanks nodes;
  for (int node = 0; node < domain.num_nodes; ++node) nodes.ranks[node] = ranks_of(domain, node);
  launch(count_nodes_kernel, 1, NotifyTuning::kWarps, 0, stream, false, "launch of count_nodes", nodes,
         domain.num_nodes, domain.num_ranks(), token_in_rank, num_tokens, num_tokens_per_node);
}

void notify(const RailDomain& domain, const MappedBlocks& network, NotifyArgs args, Stream stream) {
  launch_notify(domain, MappedNetwork{network, domain.rank()}, args, stream);
}

void prepare_notify() {
  load_notify<MappedNetwork>();
  load_kernel(count_nodes_kernel, 0);
  load_kernel(restart_rings_kernel, 0);
}

}  // namespace deep_moe::kernels::internode
