// The GPU tests of the kernels between nodes, on the CPU, over a network that delivers what it is given in pieces and
// in random order: through send slots, as over NVSHMEM, where the other programs write into the peer's ring.
#include "../gpu_internode.cuh"
#include "kernels/internode/combine_kernel.cuh"
#include "kernels/internode/dispatch_kernel.cuh"
#include "kernels/internode/notify_kernel.cuh"
#include "port_network.hpp"

#define DEEP_MOE_WIRED

namespace deep_moe::test {

class WiredRails : public RailWorld {
 public:
  WiredRails(World& world, Rows& rows, const RailShape& shape, std::int64_t max_tokens, bool signals_behind_data = true)
      : RailWorld(world, rows, shape, max_tokens),
        network_(shape.num_ranks(), rank(0).domain.rail.bytes(), 5, signals_behind_data) {}

  void notify(int r, const internode::NotifyArgs& args) override {
    internode::launch_notify(rank(r).domain, port(r), args, nullptr);
  }
  void dispatch(int r, const internode::DispatchArgs& args) override {
    internode::launch_dispatch(rank(r).domain, port(r), args, nullptr);
  }
  void combine(int r, const internode::CombineArgs& args) override {
    internode::launch_combine(rank(r).domain, port(r), args, nullptr);
  }
  void quiet(int r) override { network_.port(r).quiet(); }

 private:
  PortNetwork port(int r) { return {&network_.port(r)}; }

  RandomNetwork network_;
};

}  // namespace deep_moe::test

#include "../gpu_internode_test.cu"

TEST_CASE("between nodes, over a network: signals that overtake their data are noticed") {
  std::mt19937_64 random(71);
  int failures = 0;
  for (int attempt = 0; attempt < 4 && failures == 0; ++attempt) {
    const RailShape rail{2, 1};
    World world(2, 60, 4, 16, 8, 2.0);
    Rows rows(world, 60, row_shape(1024));
    WiredRails rails(world, rows, rail, 60, false);
    fill_random(world, rows, random, {60});
    rails.dispatch_all();
    failures += !rails.errors().empty() || !rails.check_routes().empty() || !rows.check_heaps().empty();
  }
  CHECK(failures > 0);
}
