// Random calls on Buffers of ranks that go round the GPUs, one after another without a rest, each result checked:
// dispatches of every kind, combines, eager and replayed from CUDA graphs, between threads and between processes.
//
// Every rank draws the same calls from the same numbers, and can make every other rank's inputs. Rows of a dispatch are
// random bytes; rows of a combine are small whole numbers, whose sums are exact in every type.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include "gpu_programs.hpp"
#include "gpu_stress.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

// DEEP_MOE_GPU_STRESS_CALLS: fewer, for a checker or between processes, which take turns.
int num_calls(int usual) {
  const char* text = std::getenv("DEEP_MOE_GPU_STRESS_CALLS");
  return text == nullptr ? usual : std::min(usual, std::atoi(text));
}

constexpr std::int64_t kHeapBytes = std::int64_t{96} << 20;

void eager(const Bootstrap& bootstrap, int calls, std::uint64_t seed, std::int64_t heap_bytes = kHeapBytes) {
  StressRank rank(bootstrap, seed, heap_bytes);
  rank.random_calls(calls);
  rank.finish();
}

// One rank replays a graph of a dispatch and a combine while the others make the same calls eagerly; then another one.
void replayed(const Bootstrap& bootstrap, int calls, std::uint64_t seed) {
  StressRank rank(bootstrap, seed, kHeapBytes);
  for (int replaying = 0; replaying < 2; ++replaying) {
    rank.random_calls(40);
    rank.replay_beside_eager(replaying % bootstrap.size, calls / 4);  // rounds of two calls
  }
  rank.random_calls(40);
  rank.finish();
}

const ChildFunctions& child_functions() {
  static const ChildFunctions functions = {
      {"eager", [](const Bootstrap& b) { eager(b, num_calls(120), 5); }},
      {"replayed", [](const Bootstrap& b) { replayed(b, num_calls(80), 6); }},
  };
  return functions;
}

}  // namespace

TEST_CASE("child of gpu_buffer_stress_test" * doctest::skip()) { run_as_child(child_functions()); }

TEST_CASE("GPU Buffer stress: ten thousand random calls on two ranks") {
  if (no_gpu()) return;
  check_all(run_threads(2, [](const Bootstrap& b) { eager(b, num_calls(10000), 1); }));
}

TEST_CASE("GPU Buffer stress: ten thousand calls replayed on one rank and eager on the other") {
  if (no_gpu()) return;
  check_all(run_threads(2, [](const Bootstrap& b) { replayed(b, num_calls(10000), 2); }));
}

TEST_CASE("GPU Buffer stress: one rank and more than two, heaps that grow from nothing") {
  if (no_gpu()) return;
  for (const int num_ranks : {1, 2, 3, 4})
    check_all(run_threads(num_ranks, [&](const Bootstrap& b) { eager(b, num_calls(500), 3, 0); }));
  check_all(run_threads(3, [](const Bootstrap& b) { replayed(b, num_calls(400), 4); }));
}

TEST_CASE("GPU Buffer stress: processes with one hardware queue each and with many") {
  if (no_gpu()) return;
  for (const char* queues : {"1", "8"}) {
    const ProgramOptions options{"child of gpu_buffer_stress_test", {}, {{"CUDA_DEVICE_MAX_CONNECTIONS", queues}}};
    run_programs(options, "eager", 2);
    run_programs(options, "replayed", 2);
  }
}
