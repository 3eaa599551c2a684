#include "runtime/topology.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "layout/hash.hpp"
#include "runtime/process.hpp"

namespace deep_moe {
namespace {

// "4, 4, 2", cut short where there are many.
std::string sizes_of(const std::vector<std::vector<int>>& nodes) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t node = 0; node < std::min(nodes.size(), kShown); ++node)
    text += (node > 0 ? ", " : "") + std::to_string(nodes[node].size());
  return nodes.size() > kShown ? text + ", ..." : text;
}

}  // namespace

Placement placement_here() {
  Placement placement{host_uid(), 0};
  if (const char* name = std::getenv("DEEP_MOE_NODE"); name != nullptr && *name != '\0') {
    placement.host = layout::kFnvStart;
    for (; *name != '\0'; ++name) placement.host = layout::fnv_step(placement.host, static_cast<unsigned char>(*name));
  }
  const char* text = std::getenv("DEEP_MOE_LOCAL_RANKS");
  if (text == nullptr || *text == '\0') return placement;
  char* end = nullptr;
  placement.local_ranks = std::strtoll(text, &end, 10);
  if (*end != '\0' || placement.local_ranks < 1 || placement.local_ranks > std::numeric_limits<int>::max())
    throw ArgumentError(std::string("DEEP_MOE_LOCAL_RANKS: got '") + text + "', expected a number of ranks, >= 1");
  return placement;
}

Topology::Topology(const std::vector<Placement>& ranks) : node_of_(ranks.size()), local_of_(ranks.size()) {
  std::map<std::uint64_t, std::int64_t> seen;                  // ranks of each host so far
  std::map<std::pair<std::uint64_t, std::int64_t>, int> node;  // by host and part of it
  std::vector<std::vector<int>> nodes;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Placement& placement = ranks[rank];
    if (placement.local_ranks != ranks[0].local_ranks)
      throw ArgumentError("DEEP_MOE_LOCAL_RANKS has to be the same on all ranks: rank 0 has " +
                          std::to_string(ranks[0].local_ranks) + ", rank " + std::to_string(rank) + " has " +
                          std::to_string(placement.local_ranks) + " (0: not set)");
    const std::int64_t before = seen[placement.host]++;
    const std::int64_t part = placement.local_ranks > 0 ? before / placement.local_ranks : 0;
    const auto [found, is_new] = node.try_emplace({placement.host, part}, static_cast<int>(nodes.size()));
    if (is_new) nodes.emplace_back();
    auto& members = nodes[static_cast<std::size_t>(found->second)];
    node_of_[rank] = found->second;
    local_of_[rank] = static_cast<int>(members.size());
    members.push_back(static_cast<int>(rank));
  }
  num_nodes_ = static_cast<int>(nodes.size());
  num_local_ranks_ = static_cast<int>(nodes[0].size());
  for (const std::vector<int>& members : nodes) {
    if (members.size() != nodes[0].size())
      throw ArgumentError("a Buffer needs equally many ranks on every node, and the " + std::to_string(ranks.size()) +
                          " ranks of this one are on " + std::to_string(num_nodes_) + " nodes of " + sizes_of(nodes) +
                          ": start as many ranks on every host" +
                          (ranks[0].local_ranks > 0
                               ? ", a multiple of DEEP_MOE_LOCAL_RANKS=" + std::to_string(ranks[0].local_ranks)
                               : std::string()));
    ranks_.insert(ranks_.end(), members.begin(), members.end());
  }
}

}  // namespace deep_moe
