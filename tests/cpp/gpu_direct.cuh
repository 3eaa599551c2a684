// Low-latency calls between nodes, over memory that all ranks map; else as gpu_low_latency.cuh has them.
#pragma once

#include <cstring>

#include "gpu_low_latency.cuh"
#include "kernels/internode/api.hpp"

namespace deep_moe::test {

namespace internode = kernels::internode;

struct NodeShape {
  int num_nodes, num_local_ranks;
  bool interleaved = false;  // rank r is on node r % N

  int num_ranks() const { return num_nodes * num_local_ranks; }
  int node_of(int rank) const { return interleaved ? rank % num_nodes : rank / num_local_ranks; }
  int local_of(int rank) const { return interleaved ? rank / num_nodes : rank % num_local_ranks; }
  layout::DirectRanks ranks(int own) const {
    layout::DirectRanks all;
    all.num_nodes = num_nodes;
    all.num_local_ranks = num_local_ranks;
    all.own_node = node_of(own);
    for (int r = 0; r < num_ranks(); ++r) {
      all.node_of[r] = static_cast<std::uint8_t>(node_of(r));
      all.local_of[r] = static_cast<std::uint8_t>(local_of(r));
      all.rank_table[node_of(r) * num_local_ranks + local_of(r)] = static_cast<std::uint8_t>(r);
    }
    return all;
  }
};

class DirectRanks : public LowRanks {
 public:
  // Something stands in front of the calls' part of the network's memory.
  static constexpr std::size_t kBegin = 300;

  DirectRanks(const NodeShape& shape, std::int64_t part_bytes, std::int64_t arena_bytes, double timeout_seconds = 20.0)
      : LowRanks(shape.num_ranks(), static_cast<std::int64_t>(layout_of(shape, part_bytes).mates_slot_bytes()),
                 arena_bytes, timeout_seconds),
        shape_(shape),
        layout_(layout_of(shape, part_bytes)) {
    for (int r = 0; r < shape.num_ranks(); ++r) {
      if (r < num_gpus()) {
        const OnGpuOf on(r);
        internode::prepare();
      }
      network_.blocks[r] = allocate(r, static_cast<std::int64_t>(layout_.end()));
    }
    sync_gpus();
  }

  // Words and staging of other nodes' ranks are out of reach.
  internode::DirectDomain domain(int r) {
    internode::DirectDomain domain{world.rank(r).domain, layout_, shape_.ranks(r)};
    for (int peer = 0; peer < shape_.num_ranks(); ++peer)
      if (!domain.ranks.is_mate(peer)) domain.group.workspaces[peer] = nullptr;
    return domain;
  }
  kernels::LowLatencyStaging mates(int r) {
    kernels::LowLatencyStaging mates = staging;
    for (int peer = 0; peer < shape_.num_ranks(); ++peer)
      if (shape_.node_of(peer) != shape_.node_of(r)) mates.bases[peer] = nullptr;
    return mates;
  }
  void dispatch(int r, const kernels::LowLatencyDispatchArgs& args) override {
    kernels::LowLatencyDispatchArgs own = args;
    own.call.staging = mates(r);
    launch(r, own);
  }
  void combine(int r, const kernels::LowLatencyCombineArgs& args) override {
    kernels::LowLatencyCombineArgs own = args;
    own.call.staging = mates(r);
    launch(r, own);
  }
  void refuse(int r, const kernels::LowLatencyCall& call, const std::string& reason) {
    internode::DirectRefusal args;
    args.call = call;
    args.call.staging = mates(r);
    args.num_reason_bytes = static_cast<std::uint32_t>(reason.size());
    std::memcpy(args.reason, reason.data(), reason.size());
    launch(r, args);
  }
  std::size_t network_bytes() const { return layout_.end(); }
  bool sums_logarithms_without_weights() const override { return false; }

 protected:
  // Over another network where that is overridden.
  virtual void launch(int r, const kernels::LowLatencyDispatchArgs& args) {
    internode::low_latency_dispatch(domain(r), network_, args, world.rank(r).stream);
  }
  virtual void launch(int r, const kernels::LowLatencyCombineArgs& args) {
    internode::low_latency_combine(domain(r), network_, args, world.rank(r).stream);
  }
  virtual void launch(int r, const internode::DirectRefusal& args) {
    internode::low_latency_refuse(domain(r), network_, args, world.rank(r).stream);
  }

 private:
  static layout::DirectLayout layout_of(const NodeShape& shape, std::int64_t part_bytes) {
    return layout::DirectLayout(shape.num_nodes, shape.num_local_ranks, static_cast<std::size_t>(part_bytes), kBegin);
  }
  const NodeShape shape_;
  const layout::DirectLayout layout_;
  internode::MappedBlocks network_;
};

}  // namespace deep_moe::test
