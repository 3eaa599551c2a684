// A GPU Buffer's ranks on several nodes: the words of this node, the network's memory, and the kernels between nodes.
//
// On one machine whose GPUs reach each other the network is memory that every rank maps; on several machines, and with
// DEEP_MOE_NETWORK=nvshmem, it is NVSHMEM, through the plug-in. Low-latency calls take it as well where that is
// NVSHMEM or DEEP_MOE_NETWORK names it; else they go straight from rank to rank (`direct` below).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/device_segment.hpp"
#include "kernels/internode/api.hpp"
#include "nvshmem/plugin.hpp"
#include "runtime/topology.hpp"

namespace deep_moe::cuda {

enum class NetworkKind : std::uint32_t { kAuto = 0, kMapped, kNvshmem };
// What DEEP_MOE_NETWORK asks for; kAuto where it is unset: mapped on one machine, NVSHMEM on several. Throws
// ArgumentError.
NetworkKind network_kind_here();

class Nodes {
 public:
  // `network_bytes`: for the rings; 0: the default. `direct`: low-latency calls take the network, with room for
  // `low_latency_bytes` that arrive; 0: the default. Throws ArgumentError where kernels cannot serve so many ranks.
  Nodes(const Topology& topology, int rank, std::size_t network_bytes, NetworkKind kind, bool direct,
        std::size_t low_latency_bytes);

  const Topology& topology() const { return topology_; }
  NetworkKind kind() const { return kind_; }
  // Memory of each rank that those near it map, zeroed: words of the node, of the rail, and the network's where it is
  // mapped.
  std::size_t shared_bytes() const;
  std::size_t network_bytes() const { return is_direct() ? direct_.end() : rail_.bytes(); }

  struct HostWords {
    char* host;
    char* device;  // the same as kernels see it
  };
  // Once the memory of every near rank is there, by rank. `block`: the network's where it is NVSHMEM's.
  void connect(const std::vector<char*>& shared, const HostWords& words, std::uint64_t timeout_ns, char* block);

  const kernels::DeviceDomain& domain() const { return domain_.node; }
  char* host_words() const { return host_; }
  layout::NotifyState& state() const { return domain().words.state(domain().workspaces[domain().rank]); }
  // In lost_peers of this node's words, for ranks of the group that are lost: themselves where kernels wait for them,
  // and those whose calls a lost mate would have passed on. Calls of a rank on another rail may be on their way here
  // yet through a mate, so it counts only where it is `dead` too.
  std::uint64_t lost_bits(std::uint64_t ranks, std::uint64_t dead) const;
  // The rank of the group that an error of these kernels blames.
  int blamed(const layout::ErrorRecord& error) const;

  void notify(const kernels::internode::NotifyArgs& args, Stream stream) const;
  void dispatch(const kernels::internode::DispatchArgs& args, Stream stream) const;
  void combine(const kernels::internode::CombineArgs& args, Stream stream) const;
  void count_nodes(const bool* token_in_rank, std::int64_t num_tokens, std::int32_t* num_tokens_per_node,
                   Stream stream) const;
  // Throws BufferTooSmallError unless rows of these bytes fit a slot of the rings.
  void check_row(const char* call, const layout::RailRow& row) const;

  // Low-latency calls over the network: launches for a domain made of the group's; their memory.
  bool is_direct() const { return direct_.part_bytes() > 0; }
  const layout::DirectLayout& direct_layout() const { return direct_; }
  kernels::internode::DirectDomain direct_domain(const kernels::DeviceDomain& group) const;
  void low_latency_dispatch(const kernels::internode::DirectDomain& domain, const kernels::LowLatencyDispatchArgs& args,
                            Stream stream) const;
  void low_latency_combine(const kernels::internode::DirectDomain& domain, const kernels::LowLatencyCombineArgs& args,
                           Stream stream) const;
  void low_latency_refuse(const kernels::internode::DirectDomain& domain, const kernels::internode::DirectRefusal& args,
                          Stream stream) const;

  // In a reset: before the ranks agree, nothing that this one has put is on its way any more; then, in stream order,
  // rings, words and error records are as new.
  void quiet(Stream stream) const;
  void restart(std::uint64_t generation, std::uint64_t epoch, Stream stream) const;

 private:
  const Topology topology_;
  const NetworkKind kind_;
  const layout::RailLayout rail_;
  const layout::RailWords words_;
  layout::DirectLayout direct_;  // without parts: low-latency calls go straight
  kernels::internode::RailDomain domain_;
  kernels::internode::MappedBlocks mapped_;
  const nvshmem::Plugin* plugin_ = nullptr;
  char* block_ = nullptr;
  char* host_ = nullptr;
};

}  // namespace deep_moe::cuda
