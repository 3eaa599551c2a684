// The GPU tests of low-latency calls between nodes, on the CPU, over a network that delivers what it is given in pieces
// and in random order.
#include "../gpu_direct.cuh"
#include "kernels/internode/direct_combine_kernel.cuh"
#include "kernels/internode/direct_dispatch_kernel.cuh"
#include "port_network.hpp"

#define DEEP_MOE_EMULATED

namespace deep_moe::test {

class WiredRanks : public DirectRanks {
 public:
  WiredRanks(const NodeShape& shape, std::int64_t part_bytes, std::int64_t arena_bytes, double timeout_seconds = 20.0,
             bool signals_behind_data = true)
      : DirectRanks(shape, part_bytes, arena_bytes, timeout_seconds),
        network_(shape.num_ranks(), network_bytes(), 3, signals_behind_data) {}

 protected:
  void launch(int r, const kernels::LowLatencyDispatchArgs& args) override {
    internode::launch_direct_dispatch(domain(r), port(r), args, world.rank(r).stream);
  }
  void launch(int r, const kernels::LowLatencyCombineArgs& args) override {
    internode::launch_direct_combine(domain(r), port(r), args, world.rank(r).stream);
  }
  void launch(int r, const internode::DirectRefusal& args) override {
    internode::launch_direct_refusal(domain(r), port(r), args, world.rank(r).stream);
  }

 private:
  PortNetwork port(int r) { return {&network_.port(r)}; }

  RandomNetwork network_;
};

}  // namespace deep_moe::test

#include "../gpu_direct_test.cu"

TEST_CASE("low latency between nodes, emulated: signals that overtake their data are noticed") {
  LowShape shape;
  shape.num_tokens = {16, 16};
  shape.hidden = 1024;
  int failures = 0;
  for (int attempt = 0; attempt < 4 && failures == 0; ++attempt) {
    WiredRanks ranks({2, 1}, kMiB / 4, 24 * kMiB, 2.0, false);
    try {
      check_pair(ranks, shape, mode_of(false, true, 0, 3), 4);
    } catch (const std::exception&) {
      ++failures;
    }
  }
  CHECK(failures > 0);
}
