// Which ranks of a group share a node.
#pragma once

#include <cstdint>
#include <vector>

namespace deep_moe {

// What a rank says of itself.
struct Placement {
  std::uint64_t host = 0;        // equal for the ranks of one host
  std::int64_t local_ranks = 0;  // into how many ranks a node its host is cut; 0: not at all
};
// From DEEP_MOE_NODE (a name in place of the host's), DEEP_MOE_HOST_ID and DEEP_MOE_LOCAL_RANKS. Throws ArgumentError.
Placement placement_here();

// N nodes of L ranks. Nodes are numbered in the order of their lowest ranks, and the ranks of a node ascend; ranks of
// equal local index on all nodes are a rail.
class Topology {
 public:
  Topology() = default;
  // The same on every rank. Throws ArgumentError, on every rank with the same text, where nodes differ in size or ranks
  // in DEEP_MOE_LOCAL_RANKS.
  explicit Topology(const std::vector<Placement>& ranks);

  int num_nodes() const { return num_nodes_; }
  int num_local_ranks() const { return num_local_ranks_; }
  int node_of(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  int local_of(int rank) const { return local_of_[static_cast<std::size_t>(rank)]; }
  int rank_at(int node, int local) const {
    return ranks_[static_cast<std::size_t>(node) * static_cast<std::size_t>(num_local_ranks_) +
                  static_cast<std::size_t>(local)];
  }

 private:
  int num_nodes_ = 0, num_local_ranks_ = 0;
  std::vector<int> node_of_, local_of_, ranks_;
};

}  // namespace deep_moe
