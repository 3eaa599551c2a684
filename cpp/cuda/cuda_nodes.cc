#include "cuda/cuda_nodes.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include <deep_moe/error.hpp>

#include "cuda/call_streams.hpp"
#include "runtime/network.hpp"

namespace deep_moe::cuda {
namespace {

using layout::align_up;
using layout::kAlign;

void check_plugin(const char* error) {
  if (error != nullptr) throw Error(std::string("NVSHMEM: ") + error);
}

// As for all kernels, before the first of them can wait.
void prepare_kernels() {
  static std::mutex mutex;
  static auto* prepared = new std::set<int>;  // devices
  const std::lock_guard<std::mutex> lock(mutex);
  const int device = current_device();
  if (prepared->count(device) != 0) return;
  kernels::internode::prepare();
  prepared->insert(device);
}

// Words of the node, then those of the rail, then the block of a mapped network.
std::size_t rail_words_at(int num_local_ranks) {
  return align_up(layout::device_workspace_bytes(num_local_ranks), kAlign);
}
std::size_t block_at(int num_local_ranks, const layout::RailWords& words) {
  return rail_words_at(num_local_ranks) + align_up(words.bytes(), kAlign);
}

}  // namespace

NetworkKind network_kind_here() {
  const char* name = std::getenv("DEEP_MOE_NETWORK");
  if (name == nullptr || *name == '\0') return NetworkKind::kAuto;
  if (std::strcmp(name, "mapped") == 0) return NetworkKind::kMapped;
  if (std::strcmp(name, "nvshmem") == 0) return NetworkKind::kNvshmem;
  throw ArgumentError(std::string("DEEP_MOE_NETWORK: got '") + name + "', expected mapped or nvshmem");
}

Nodes::Nodes(const Topology& topology, int rank, std::size_t network_bytes, NetworkKind kind, bool direct,
             std::size_t low_latency_bytes)
    : topology_(topology),
      kind_(kind),
      rail_(layout::rail_layout_within(topology.num_nodes(), topology.num_local_ranks(), network_bytes)),
      words_(topology.num_nodes(), topology.num_local_ranks()) {
  const int N = topology.num_nodes(), L = topology.num_local_ranks();
  if (N > layout::kMaxNodes || N * L + std::max(N, L) > layout::kMaxKernelRanks)
    throw ArgumentError("ranks: got " + std::to_string(N) + " nodes of " + std::to_string(L) + ", expected at most " +
                        std::to_string(layout::kMaxNodes) + " nodes, and at most " +
                        std::to_string(layout::kMaxKernelRanks) +
                        " for all ranks with the nodes, and with those of one");
  if (kind == NetworkKind::kNvshmem) plugin_ = &network_plugin();
  prepare_kernels();
  if (direct) {
    if (low_latency_bytes == 0) low_latency_bytes = layout::kDefaultDirectBytes;
    const std::size_t part = low_latency_bytes / static_cast<std::size_t>(layout::kLowLatencySlots * N * L);
    direct_ = layout::DirectLayout(N, L, std::max(part / kAlign * kAlign, layout::kDirectRefusalBytes), rail_.bytes());
  }
  domain_.node.rank = topology.local_of(rank);
  domain_.node.num_ranks = L;
  domain_.node.words = layout::DeviceLayout(L);
  domain_.node.host_words = layout::HostLayout(N * L);
  domain_.num_nodes = N;
  domain_.own_node = topology.node_of(rank);
  domain_.rail = rail_;
  domain_.words = words_;
  for (int node = 0; node < N; ++node) {
    for (int local = 0; local < L; ++local)
      domain_.rank_table[node * L + local] = static_cast<std::uint8_t>(topology.rank_at(node, local));
  }
}

std::size_t Nodes::shared_bytes() const {
  return block_at(domain_.num_local_ranks(), words_) + (kind_ == NetworkKind::kMapped ? network_bytes() : 0);
}

void Nodes::connect(const std::vector<char*>& shared, const HostWords& words, std::uint64_t timeout_ns, char* block) {
  const int L = domain_.num_local_ranks();
  for (int local = 0; local < L; ++local) {
    char* base = shared[static_cast<std::size_t>(domain_.rank_at(domain_.own_node, local))];
    domain_.node.workspaces[local] = base;
    domain_.workspaces[local] = base + rail_words_at(L);
  }
  for (std::size_t rank = 0; kind_ == NetworkKind::kMapped && rank < shared.size(); ++rank)
    mapped_.blocks[rank] = shared[rank] + block_at(L, words_);
  block_ = block;
  host_ = words.host;
  domain_.node.host = words.device;
  domain_.node.timeout_ns = timeout_ns;
}

std::uint64_t Nodes::lost_bits(std::uint64_t ranks, std::uint64_t dead) const {
  std::uint64_t bits = 0;
  for (int rank = 0; rank < domain_.num_ranks(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    const int local = topology_.local_of(rank);
    if (topology_.node_of(rank) != domain_.own_node) {
      if (local == domain_.node.rank || (dead >> rank & 1) != 0) bits |= std::uint64_t{1} << domain_.in_errors(rank);
      continue;
    }
    bits |= std::uint64_t{1} << local;
    for (int node = 0; node < domain_.num_nodes; ++node)
      if (node != domain_.own_node) bits |= std::uint64_t{1} << domain_.in_errors(domain_.rank_at(node, local));
  }
  return bits;
}

int Nodes::blamed(const layout::ErrorRecord& error) const {
  using layout::KernelErrorKind;
  const auto kind = static_cast<KernelErrorKind>(error.kind);
  const bool of_group =
      kind == KernelErrorKind::kTooFewRows || kind == KernelErrorKind::kUnknownSegment ||
      (!layout::fails_buffer(kind) && static_cast<layout::WaitPhase>(error.phase) == layout::WaitPhase::kRelay);
  if (of_group) return error.peer;
  const int L = domain_.num_local_ranks();
  return error.peer < L ? domain_.rank_at(domain_.own_node, error.peer) : error.peer - L;
}

void Nodes::notify(const kernels::internode::NotifyArgs& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->notify(domain_, block_, args, stream));
  kernels::internode::notify(domain_, mapped_, args, stream);
}

void Nodes::dispatch(const kernels::internode::DispatchArgs& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->dispatch(domain_, block_, args, stream));
  kernels::internode::dispatch(domain_, mapped_, args, stream);
}

void Nodes::combine(const kernels::internode::CombineArgs& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->combine(domain_, block_, args, stream));
  kernels::internode::combine(domain_, mapped_, args, stream);
}

kernels::internode::DirectDomain Nodes::direct_domain(const kernels::DeviceDomain& group) const {
  kernels::internode::DirectDomain domain;
  domain.group = group;
  domain.layout = direct_;
  domain.ranks.num_nodes = domain_.num_nodes;
  domain.ranks.num_local_ranks = domain_.num_local_ranks();
  domain.ranks.own_node = domain_.own_node;
  std::copy(std::begin(domain_.rank_table), std::end(domain_.rank_table), domain.ranks.rank_table);
  for (int rank = 0; rank < domain_.num_ranks(); ++rank) {
    domain.ranks.node_of[rank] = static_cast<std::uint8_t>(topology_.node_of(rank));
    domain.ranks.local_of[rank] = static_cast<std::uint8_t>(topology_.local_of(rank));
  }
  return domain;
}

void Nodes::low_latency_dispatch(const kernels::internode::DirectDomain& domain,
                                 const kernels::LowLatencyDispatchArgs& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->low_latency_dispatch(domain, block_, args, stream));
  kernels::internode::low_latency_dispatch(domain, mapped_, args, stream);
}

void Nodes::low_latency_combine(const kernels::internode::DirectDomain& domain,
                                const kernels::LowLatencyCombineArgs& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->low_latency_combine(domain, block_, args, stream));
  kernels::internode::low_latency_combine(domain, mapped_, args, stream);
}

void Nodes::low_latency_refuse(const kernels::internode::DirectDomain& domain,
                               const kernels::internode::DirectRefusal& args, Stream stream) const {
  if (plugin_ != nullptr) return check_plugin(plugin_->low_latency_refuse(domain, block_, args, stream));
  kernels::internode::low_latency_refuse(domain, mapped_, args, stream);
}

void Nodes::count_nodes(const bool* token_in_rank, std::int64_t num_tokens, std::int32_t* num_tokens_per_node,
                        Stream stream) const {
  kernels::internode::count_nodes(domain_, token_in_rank, num_tokens, num_tokens_per_node, stream);
}

void Nodes::check_row(const char* call, const layout::RailRow& row) const {
  if (row.stride <= rail_.shape().slot_bytes) return;
  const layout::RailLayout wanted = layout::rail_layout(topology_.num_nodes(), topology_.num_local_ranks(),
                                                        static_cast<std::size_t>(layout::kChunkRows) * row.stride);
  throw BufferTooSmallError(std::string(call) + ": rows of " + std::to_string(row.stride) +
                            " bytes cross the network, and num_rdma_bytes leaves room for " +
                            std::to_string(rail_.shape().slot_bytes) +
                            " in each slot of the rings: pass num_rdma_bytes=" + std::to_string(wanted.bytes()) +
                            ", see Config.get_rdma_buffer_size_hint");
}

void Nodes::quiet(Stream stream) const {
  if (plugin_ != nullptr) check_plugin(plugin_->quiet(stream));
}

void Nodes::restart(std::uint64_t generation, std::uint64_t epoch, Stream stream) const {
  kernels::reset_state(domain_.node, epoch, stream);
  kernels::internode::restart_rings(domain_, generation, stream);
  if (is_direct()) {
    char* const memory = plugin_ != nullptr ? block_ : mapped_.blocks[domain_.rank()];
    check_runtime(
        cudaMemsetAsync(memory + direct_.own_words(), 0, direct_.own_words_bytes(), static_cast<cudaStream_t>(stream)),
        "cudaMemsetAsync");
  }
  kernels::clear_error(domain_.node, host_, stream);
}

}  // namespace deep_moe::cuda
