// How long calls between nodes take over mapped memory, notify and all: ranks share the GPUs there are, each is a node.
// Prints a table, and a line of JSON a row where DEEP_MOE_JSON names a file; fails if a call fails.
#include <doctest/doctest.h>

#include <algorithm>

#include "gpu_internode.cuh"
#include "gpu_timing.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

constexpr std::int64_t kTokens = 4096, kHidden = 7168;
constexpr int kExperts = 256, kTopk = 8, kCalls = 10, kRepeats = 7;

// Microseconds a call: all ranks at the same time, back to back, slowest rank, median.
double back_to_back(World& world, const std::function<void(int)>& launch) {
  const int R = world.num_ranks();
  std::vector<std::vector<double>> micros(R);
  Meeting together(R);
  run(R, [&](int r) {
    const Meeting::Leave leave{together};
    const OnGpuOf on(r);
    const cudaStream_t stream = world.rank(r).stream;
    cudaEvent_t begin, end;
    cuda(cudaEventCreate(&begin));
    cuda(cudaEventCreate(&end));
    for (int i = -1; i < kRepeats; ++i) {
      together.wait();
      launch(r);
      cuda(cudaEventRecord(begin, stream));
      for (int call = 0; call < kCalls; ++call) launch(r);
      cuda(cudaEventRecord(end, stream));
      cuda(cudaStreamSynchronize(stream));
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 0) micros[r].push_back(1000.0 * ms / kCalls);
    }
    cuda(cudaEventDestroy(begin));
    cuda(cudaEventDestroy(end));
  });
  double slowest = 0;
  for (const std::vector<double>& of_rank : micros) slowest = std::max(slowest, median(of_rank));
  return slowest;
}

void report(const char* call, const RailShape& rail, int num_sms, double micros) {
  const int ranks = rail.num_ranks(), gpus = num_gpus_of(ranks);
  std::printf("%-16s %d x %d %d GPUs %3d SMs | %8.1f us\n", call, rail.num_nodes, rail.num_local_ranks, gpus, num_sms,
              micros);
  std::fflush(stdout);
  const char* path = std::getenv("DEEP_MOE_JSON");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file,
               "{\"call\": \"%s between nodes\", \"nodes\": %d, \"ranks\": %d, \"gpus\": %d, \"tokens\": %lld, "
               "\"hidden\": %lld, \"experts\": %d, \"topk\": %d, \"sms\": %d, \"micros\": %.2f}\n",
               call, rail.num_nodes, ranks, gpus, static_cast<long long>(kTokens), static_cast<long long>(kHidden),
               kExperts, kTopk, num_sms, micros);
  std::fclose(file);
}

}  // namespace

TEST_CASE("timing: between nodes" * doctest::skip(no_gpu())) {
  RailShape rail{2, 1};
  rail.num_slots = layout::ring_slots(rail.num_nodes);
  rail.slot_bytes = layout::kDefaultSlotBytes;
  RowShape row;
  row.row_bytes = 2 * kHidden;
  World world(rail.num_ranks(), kTokens, kTopk, kExperts, 8, 5.0);
  Rows rows(world, kTokens, row);
  SumShape sum;
  sum.hidden = static_cast<int>(kHidden);
  sum.weights = false;
  Sums sums(world, rows, kTokens, sum);
  RailWorld rails(world, rows, rail, kTokens);
  rails.use_inputs(sums);
  std::mt19937_64 random(71);
  for (int r = 0; r < rail.num_ranks(); ++r) {
    world.set_ids(r, uniform_ids(kTokens, kTopk, kExperts, static_cast<std::uint64_t>(r)));
    rows.fill(r, random);
  }
  rows.count();
  rails.dispatch_all();
  REQUIRE_EQ(rails.errors(), "");
  for (const int num_sms : {8, 16, 24, 48}) {
    rows.shape().num_sms = num_sms;
    const auto start = [&](int r, layout::CallKind kind) {
      internode::notify(rails.rank(r).domain, rails.network(), rails.start_args(r, kind, 0), world.rank(r).stream);
    };
    report("cached dispatch", rail, num_sms, back_to_back(world, [&](int r) {
             start(r, layout::CallKind::kCachedDispatch);
             internode::dispatch(rails.rank(r).domain, rails.network(), rails.dispatch_args(r, true),
                                 world.rank(r).stream);
           }));
    report("combine", rail, num_sms, back_to_back(world, [&](int r) {
             start(r, layout::CallKind::kCombine);
             internode::combine(rails.rank(r).domain, rails.network(), rails.combine_args(r, sums),
                                world.rank(r).stream);
           }));
    REQUIRE_EQ(rails.errors(), "");
  }
}
