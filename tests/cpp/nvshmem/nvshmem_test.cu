// The kernels between nodes over NVSHMEM: ranks are processes, each a node of its own, which may share one GPU (NVSHMEM
// then reaches their memory directly; no NIC is needed). Each process makes the inputs of all ranks, and compares its
// own results with the host. DEEP_MOE_NVSHMEM_PLUGIN: the plug-in's file. Needs a machine with a GPU.
#include <dlfcn.h>

#include "gpu_direct.cuh"
#include "gpu_internode.cuh"
#include "nvshmem/plugin.hpp"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

void check_plugin(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

// Settings with which a host without NIC will do; what the user has set stays.
void set_defaults() {
  const std::pair<const char*, const char*> defaults[] = {
      {"NVSHMEM_REMOTE_TRANSPORT", "none"},    {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"},
      {"NVSHMEM_IB_ENABLE_IBGDA", "0"},        {"NVSHMEM_DISABLE_NVLS", "1"},
      {"NVSHMEM_SYMMETRIC_SIZE", "268435456"}, {"CUDA_MODULE_LOADING", "EAGER"},
  };
  for (const auto& [name, value] : defaults) ::setenv(name, value, 0);
}

const nvshmem::Plugin& load_plugin() {
  const char* path = std::getenv("DEEP_MOE_NVSHMEM_PLUGIN");
  void* library = ::dlopen(path != nullptr ? path : "libdeep_moe_nvshmem.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  const auto get = reinterpret_cast<nvshmem::GetPlugin>(::dlsym(library, "deep_moe_nvshmem_plugin"));
  if (get == nullptr) throw std::runtime_error("not the plug-in");
  return *get();
}

// Low-latency calls of one rank, whose peers are other processes.
class PluginRanks : public DirectRanks {
 public:
  PluginRanks(const nvshmem::Plugin& plugin, int num_ranks)
      : DirectRanks({num_ranks, 1}, 1 << 18, 8 << 20), plugin_(plugin) {
    check_plugin(plugin.allocate(network_bytes(), &block_));
  }

 protected:
  void launch(int r, const kernels::LowLatencyDispatchArgs& args) override {
    check_plugin(plugin_.low_latency_dispatch(domain(r), block_, args, world.rank(r).stream));
  }
  void launch(int r, const kernels::LowLatencyCombineArgs& args) override {
    check_plugin(plugin_.low_latency_combine(domain(r), block_, args, world.rank(r).stream));
  }
  void launch(int r, const kernels::internode::DirectRefusal& args) override {
    check_plugin(plugin_.low_latency_refuse(domain(r), block_, args, world.rank(r).stream));
  }

 private:
  const nvshmem::Plugin& plugin_;
  char* block_ = nullptr;
};

void run_low_latency(const nvshmem::Plugin& plugin, int me, int num_ranks) {
  PluginRanks ranks(plugin, num_ranks);
  LowShape shape;
  shape.num_ranks = num_ranks;
  shape.num_tokens.clear();
  for (int r = 0; r < num_ranks; ++r) shape.num_tokens.push_back(20 - 3 * (r % 4));
  shape.max_tokens = 20;
  shape.hidden = 1024;
  shape.num_experts = 24;
  shape.topk = 5;
  struct Case {
    bool halves, weights;
    int kind;
  };
  for (const auto& [halves, weights, kind] :
       {Case{false, true, 1}, Case{false, false, 0}, Case{true, true, 2}, Case{true, false, 0}, Case{true, true, 0}}) {
    shape.seed += 1;
    LowModel model(shape);
    LowMode mode;
    mode.halves = halves;
    mode.weights = weights;
    mode.fp8 = kind > 0;
    mode.ue8m0 = kind == 2;
    mode.num_blocks = 5 + 4 * kind;
    ranks.clear(me);
    LowCall call(ranks, model, me, mode);
    call.dispatch();
    call.check_dispatch();
    if (halves) call.restore_inputs();
    call.make_outputs();
    call.combine();
    call.check_combine();
    expect(ranks.world.error(me).kind == 0, "an error");
  }
}

// One process's part.
void run_rank(const Bootstrap& bootstrap) {
  set_defaults();
  const int R = bootstrap.size, me = bootstrap.rank;
  const nvshmem::Plugin& plugin = load_plugin();
  int num_devices = 0;
  cuda(cudaGetDeviceCount(&num_devices));
  cuda(cudaSetDevice(me % num_devices));
  cuda(cudaFree(nullptr));
  struct Id {
    char bytes[nvshmem::kUniqueIdBytes];
  } id{};
  if (me == 0) check_plugin(plugin.unique_id(id.bytes));
  std::vector<Id> ids(static_cast<std::size_t>(R));
  bootstrap.all_gather(&id, ids.data(), sizeof(Id));
  check_plugin(plugin.start(me, R, ids[0].bytes));
  check_plugin(plugin.prepare());

  constexpr std::int64_t kTokens = 40;
  const RailShape rail{R, 1, 4, 16384};
  RowShape shape;
  shape.row_bytes = 1024;
  shape.num_scales = 2;
  shape.num_sms = 2;
  World world(R, kTokens, 4, 24, 8, 20.0);
  Rows rows(world, kTokens, shape);
  SumShape sum;
  sum.hidden = 512;
  sum.num_biases = 1;
  for (int r = 0; r < R; ++r) sum.node_of.push_back(r);
  Sums sums(world, rows, kTokens, sum);
  RailWorld rails(world, rows, rail, kTokens);
  rails.use_inputs(sums);
  char* block = nullptr;
  check_plugin(plugin.allocate(rails.rank(me).domain.rail.bytes(), &block));
  const auto& domain = rails.rank(me).domain;
  const auto stream = world.rank(me).stream;
  const auto finish = [&](const char* what) {
    cuda(cudaStreamSynchronize(stream));
    const std::string errors = rails.errors();
    expect(errors.empty(), std::string(what) + ": " + errors);
  };
  std::mt19937_64 random(71);  // the same in all processes
  for (int call = 0; call < 4; ++call) {
    for (int r = 0; r < R; ++r) {
      world.set_ids(r, random_ids(random, kTokens - 7 * r % 30, 4, 24, 8));
      rows.fill(r, random);
    }
    rows.count();
    check_plugin(plugin.notify(domain, block, rails.notify_args(me, 0), stream));
    check_plugin(plugin.dispatch(domain, block, rails.dispatch_args(me), stream));
    finish("dispatch");
    const std::string difference = rows.compare_heap(me, rows.expected_heap(me));
    expect(difference.empty(), difference);
    for (int r = 0; r < R; ++r) sums.fill(r, random);
    check_plugin(plugin.notify(domain, block, rails.start_args(me, layout::CallKind::kCombine, 0), stream));
    check_plugin(plugin.combine(domain, block, rails.combine_args(me, sums), stream));
    finish("combine");
    const std::string wrong = sums.check(me);
    expect(wrong.empty(), wrong);
  }
  if (R <= 4) run_low_latency(plugin, me, R);  // more that share a GPU take long
  check_plugin(plugin.quiet(stream));
  cuda(cudaStreamSynchronize(stream));
}

}  // namespace

TEST_CASE("over NVSHMEM: dispatch and combine of both modes are equal to the host, ranks as processes") {
  for (const int num_ranks : {2, 4, 8}) {
    CAPTURE(num_ranks);
    check_all(run_processes(num_ranks, run_rank));
  }
}
