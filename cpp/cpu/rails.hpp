// The rings of one rank: both ends of each, towards its peers on the other nodes.
#pragma once

#include <memory>
#include <vector>

#include "cpu/rail.hpp"
#include "runtime/domain.hpp"

namespace deep_moe::cpu {

class Rails {
 public:
  using Network = std::shared_ptr<OneSided>;
  // What stands between the rings and the other ranks' memory; tests put other networks there.
  using MakeNetwork = Network (*)(Domain& domain);
  static MakeNetwork make_network;

  explicit Rails(Domain& domain);

  // Rows of these bytes have to fit a slot: BufferTooSmallError, naming the call and the bytes.
  void check_fits(const char* call, std::size_t row_stride) const;
  // All rings begin a call. Rows by node, 0 at this rank's own.
  void begin(std::size_t row_stride, const std::vector<std::int64_t>& rows_out,
             const std::vector<std::int64_t>& rows_in);
  RailSender& out(int node) { return *out_[static_cast<std::size_t>(node)]; }
  RailReceiver& in(int node) { return *in_[static_cast<std::size_t>(node)]; }
  int peer(int node) const { return domain_.topology().rank_at(node, local_); }
  // A reset: before the ranks agree on a generation, none of what this one has issued is on its way any more.
  void quiet() { network_->quiet(); }
  // In the new generation.
  void restart();

 private:
  Domain& domain_;
  const int node_, local_;
  Network network_;
  std::vector<std::unique_ptr<RailSender>> out_;  // by node; none at this rank's own
  std::vector<std::unique_ptr<RailReceiver>> in_;
};

}  // namespace deep_moe::cpu
