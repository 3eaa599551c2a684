#include "cpu/rails.hpp"

#include <cstring>
#include <string>

#include <deep_moe/error.hpp>

namespace deep_moe::cpu {
namespace {

// Between the ranks of one machine: puts are copies, done when the call returns.
class SharedMemory final : public OneSided {
 public:
  explicit SharedMemory(Domain& domain) : domain_(domain), mine_(domain.network_memory(domain.rank())) {}

  char* memory() override { return mine_; }
  void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal_at,
                  std::uint64_t value) override {
    std::memcpy(domain_.network_memory(rank) + to, mine_ + from, bytes);
    signal(rank, signal_at, value);
  }
  void signal(int rank, std::size_t signal_at, std::uint64_t value) override {
    store_release(*reinterpret_cast<std::uint64_t*>(domain_.network_memory(rank) + signal_at), value);
    domain_.ring(rank);
  }
  std::uint64_t test(std::size_t signal_at) override {
    return load_acquire(*reinterpret_cast<std::uint64_t*>(mine_ + signal_at));
  }
  void quiet() override {}

 private:
  Domain& domain_;
  char* mine_;
};

Rails::Network shared_memory(Domain& domain) { return std::make_shared<SharedMemory>(domain); }

}  // namespace

Rails::MakeNetwork Rails::make_network = shared_memory;

Rails::Rails(Domain& domain)
    : domain_(domain),
      node_(domain.topology().node_of(domain.rank())),
      local_(domain.topology().local_of(domain.rank())),
      network_(make_network(domain)) {
  restart();
}

void Rails::check_fits(const char* call, std::size_t row_stride) const {
  const std::size_t slot = domain_.rail_layout().shape().slot_bytes;
  if (row_stride <= slot) return;
  const Topology& topology = domain_.topology();
  const layout::RailLayout wanted = layout::rail_layout(topology.num_nodes(), topology.num_local_ranks(),
                                                        static_cast<std::size_t>(layout::kChunkRows) * row_stride);
  throw BufferTooSmallError(std::string(call) + ": rows of " + std::to_string(row_stride) +
                            " bytes cross the network, and num_rdma_bytes leaves room for " + std::to_string(slot) +
                            " in each slot of the rings: pass num_rdma_bytes=" + std::to_string(wanted.bytes()) +
                            ", see Config.get_rdma_buffer_size_hint");
}

void Rails::begin(std::size_t row_stride, const std::vector<std::int64_t>& rows_out,
                  const std::vector<std::int64_t>& rows_in) {
  for (int node = 0; node < domain_.topology().num_nodes(); ++node) {
    if (node == node_) continue;
    out(node).begin(rows_out[static_cast<std::size_t>(node)], row_stride);
    in(node).begin(rows_in[static_cast<std::size_t>(node)], row_stride);
  }
}

void Rails::restart() {
  const int num_nodes = domain_.topology().num_nodes();
  out_.clear();
  in_.clear();
  for (int node = 0; node < num_nodes; ++node) {
    const RailPeer to{peer(node), node};
    const bool own = node == node_;
    const layout::RailLayout& layout = domain_.rail_layout();
    out_.push_back(own ? nullptr : std::make_unique<RailSender>(*network_, layout, node_, to, domain_.generation()));
    in_.push_back(own ? nullptr : std::make_unique<RailReceiver>(*network_, layout, node_, to, domain_.generation()));
  }
}

}  // namespace deep_moe::cpu
