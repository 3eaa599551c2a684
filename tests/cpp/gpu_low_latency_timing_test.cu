// How long a low-latency dispatch and combine take, back to back inside CUDA graphs. Prints a table, and a line of JSON
// a row where DEEP_MOE_JSON names a file; fails if a pair is wildly slow.
#include <tuple>

#include "gpu_direct.cuh"
#include "gpu_low_latency.cuh"
#include "gpu_timing.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr std::int64_t kHidden = 7168, kMaxTokens = 128;
constexpr int kExperts = 256, kTopk = 8;

enum class What { kPair, kDispatch, kCombine, kHalves };

// Microseconds a pair: both ranks at the same time, slower rank, median.
double time_of(LowRanks& ranks, std::vector<std::unique_ptr<LowCall>>& calls, What what) {
  const int R = ranks.world.num_ranks();
  if (what == What::kCombine)  // of what one dispatch has brought
    run(R, [&](int r) {
      calls[r]->launch_dispatch(LowLatencyHalf::kBoth);
      ranks.sync(r);
    });
  const double micros = time_in_graphs(ranks.world, {20, 3, 9}, [&](int r) {
    if (what == What::kHalves) {
      calls[r]->launch_dispatch(LowLatencyHalf::kSend);
      calls[r]->launch_dispatch(LowLatencyHalf::kReceive);
      calls[r]->launch_combine(LowLatencyHalf::kSend);
      calls[r]->launch_combine(LowLatencyHalf::kReceive);
      return;
    }
    if (what != What::kCombine) calls[r]->launch_dispatch(LowLatencyHalf::kBoth);
    if (what != What::kDispatch) calls[r]->launch_combine(LowLatencyHalf::kBoth);
  });
  for (int r = 0; r < R; ++r) {
    const layout::ErrorRecord& error = ranks.world.error(r);
    if (error.kind != 0)
      throw std::runtime_error("rank " + std::to_string(r) + " waited for rank " + std::to_string(error.peer) + " in " +
                               layout::wait_phase_name(static_cast<layout::WaitPhase>(error.phase)));
  }
  return micros;
}

LowShape shape_of(int num_ranks, std::int64_t num_tokens) {
  LowShape shape;
  shape.num_ranks = num_ranks;
  shape.num_tokens.assign(static_cast<std::size_t>(num_ranks), num_tokens);
  shape.max_tokens = kMaxTokens;
  shape.hidden = kHidden;
  shape.num_experts = kExperts;
  shape.topk = kTopk;
  return shape;
}

std::vector<std::unique_ptr<LowCall>> calls_of(LowRanks& ranks, LowModel& model, const LowMode& mode) {
  std::vector<std::unique_ptr<LowCall>> calls;
  for (int r = 0; r < model.shape.num_ranks; ++r) {
    const OnGpuOf on(r);
    ranks.clear(r);
    calls.push_back(std::make_unique<LowCall>(ranks, model, r, mode));
  }
  return calls;
}

// Ids without repetition, uniform, as in the models that are measured elsewhere.
void make_uniform(LowModel& model) {
  for (int r = 0; r < model.shape.num_ranks; ++r)
    model.inputs[r].ids = uniform_ids(model.shape.num_tokens[r], kTopk, kExperts, static_cast<std::uint64_t>(r) + 3);
}

void report(const char* what, int num_ranks, std::int64_t num_tokens, int blocks, bool early, double micros) {
  std::printf("%-34s R=%d %d GPUs T=%4lld %3d blocks%s | %7.2f us\n", what, num_ranks, num_gpus_of(num_ranks),
              static_cast<long long>(num_tokens), blocks, early ? ", early" : "       ", micros);
  std::fflush(stdout);
  const char* path = std::getenv("DEEP_MOE_JSON");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file,
               "{\"call\": \"low latency: %s\", \"ranks\": %d, \"gpus\": %d, \"tokens\": %lld, \"hidden\": %lld, "
               "\"experts\": %lld, \"topk\": %lld, \"blocks\": %d, \"early\": %s, \"micros\": %.2f}\n",
               what, num_ranks, num_gpus_of(num_ranks), static_cast<long long>(num_tokens),
               static_cast<long long>(kHidden), static_cast<long long>(kExperts), static_cast<long long>(kTopk), blocks,
               early ? "true" : "false", micros);
  std::fclose(file);
}

// Blocks, and whether launches start early: with a GPU for each rank all its SMs, else half of them and never early.
std::vector<std::pair<int, bool>> launches(int num_ranks) {
  if (ranks_a_gpu(num_ranks) > 1) return {{64, false}, {32, false}};
  return {{num_sms(), true}, {num_sms(), false}, {64, true}, {64, false}, {32, true}, {32, false}};
}

}  // namespace

TEST_CASE("timing: low latency" * doctest::skip(no_gpu())) {
  const int R = 2;
  LowRanks ranks(R, 128 * (1 << 20), std::int64_t{1800} << 20, 5.0);
  std::printf("\n");
  for (const std::int64_t T : {1, 8, 32, 128}) {
    LowModel model(shape_of(R, T));
    make_uniform(model);
    for (const auto& [name, weights, fp8, what, logfmt] : std::vector<std::tuple<const char*, bool, bool, What, bool>>{
             {"fp8 + logfmt, weights at dispatch", true, true, What::kPair, true},
             {"logfmt combine alone", true, true, What::kCombine, true},
             {"fp8 + logfmt in halves, by expert", false, true, What::kHalves, true},
             {"fp8 + bf16, weights at dispatch", true, true, What::kPair, false},
             {"fp8 dispatch alone", true, true, What::kDispatch, false},
             {"bf16 combine alone", true, true, What::kCombine, false},
             {"fp8 + bf16, weights ahead", false, true, What::kPair, false},
             {"bf16 + bf16, weights at dispatch", true, false, What::kPair, false},
             {"fp8 + bf16 in halves, pre-reduced", true, true, What::kHalves, false},
             {"fp8 + bf16 in halves, by expert", false, true, What::kHalves, false}}) {
      for (const auto& [blocks, early] : launches(R)) {
        if (blocks == 32 && (T != 128 || what != What::kPair)) continue;
        LowMode mode;
        mode.fp8 = fp8;
        mode.weights = weights;
        mode.logfmt = logfmt;
        mode.halves = what == What::kHalves;
        mode.num_blocks = blocks;
        mode.early = early;
        std::vector<std::unique_ptr<LowCall>> calls = calls_of(ranks, model, mode);
        const double micros = time_of(ranks, calls, what);
        report(name, R, T, blocks, early, micros);
        CHECK_LT(micros, 200);
      }
    }
  }
}

// Two nodes of one rank. Puts are copies by a block here, which says nothing about a network: what is seen is what the
// kernels take besides.
TEST_CASE("timing: low latency between nodes, over mapped memory" * doctest::skip(no_gpu())) {
  const int R = 2;
  DirectRanks ranks({2, 1}, 8 << 20, std::int64_t{1800} << 20, 5.0);
  std::printf("\n");
  for (const std::int64_t T : {1, 8, 32, 128}) {
    LowModel model(shape_of(R, T));
    make_uniform(model);
    for (const auto& [name, what, logfmt] : {std::tuple("between nodes: fp8 + bf16", What::kPair, false),
                                             std::tuple("between nodes: fp8 dispatch", What::kDispatch, false),
                                             std::tuple("between nodes: bf16 combine", What::kCombine, false),
                                             std::tuple("between nodes: fp8 + logfmt", What::kPair, true)}) {
      LowMode mode;
      mode.fp8 = true;
      mode.logfmt = logfmt;
      mode.num_blocks = 64;
      std::vector<std::unique_ptr<LowCall>> calls = calls_of(ranks, model, mode);
      const double micros = time_of(ranks, calls, what);
      report(name, R, T, 64, false, micros);
      CHECK_LT(micros, 2000);
    }
  }
}
