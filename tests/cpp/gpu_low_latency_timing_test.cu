// How long a low-latency dispatch and combine take, back to back inside CUDA graphs. Prints a table, and a line of JSON
// a row where DEEP_MOE_JSON names a file; fails if a pair is wildly slow.
#include <cstdarg>

#include "gpu_direct.cuh"
#include "gpu_low_latency.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::LowLatencyHalf;

namespace {

constexpr int kPairs = 20, kGraphs = 3, kRepeats = 9;
constexpr std::int64_t kHidden = 7168, kExperts = 256, kTopk = 8, kMaxTokens = 128;

enum class What { kPair, kDispatch, kCombine, kHalves };

// Microseconds a pair: both ranks at the same time, slower rank, median.
double time_of(LowRanks& ranks, std::vector<std::unique_ptr<LowCall>>& calls, What what) {
  const int R = ranks.world.num_ranks();
  std::vector<std::vector<double>> micros(R);
  std::vector<cudaGraphExec_t> graphs(R);
  std::vector<cudaEvent_t> begin(R), end(R);
  if (what == What::kCombine)  // of what one dispatch has brought
    run(R, [&](int r) {
      calls[r]->launch_dispatch(LowLatencyHalf::kBoth);
      ranks.sync(r);
    });
  for (int r = 0; r < R; ++r) {
    const OnGpuOf on(r);
    cudaStream_t stream = ranks.world.rank(r).stream;
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kPairs; ++i) {
      if (what == What::kHalves) {
        calls[r]->launch_dispatch(LowLatencyHalf::kSend);
        calls[r]->launch_dispatch(LowLatencyHalf::kReceive);
        calls[r]->launch_combine(LowLatencyHalf::kSend);
        calls[r]->launch_combine(LowLatencyHalf::kReceive);
        continue;
      }
      if (what != What::kCombine) calls[r]->launch_dispatch(LowLatencyHalf::kBoth);
      if (what != What::kDispatch) calls[r]->launch_combine(LowLatencyHalf::kBoth);
    }
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&graphs[r], graph, 0));
    cuda(cudaGraphUpload(graphs[r], stream));
    cuda(cudaGraphDestroy(graph));
    cuda(cudaEventCreate(&begin[r]));
    cuda(cudaEventCreate(&end[r]));
  }
  Meeting together(R);
  for (int i = -1; i < kRepeats; ++i) {
    run(R, [&](int r) {
      const Meeting::Leave leave{together};
      cudaStream_t stream = ranks.world.rank(r).stream;
      together.wait();
      cuda(cudaGraphLaunch(graphs[r], stream));
      cuda(cudaEventRecord(begin[r], stream));
      // No rank is a launch ahead of one that has not launched: a launch may wait for the one before it with the
      // driver's lock held, and that one for the other rank.
      for (int g = 0; g < kGraphs; ++g) {
        together.wait();
        cuda(cudaGraphLaunch(graphs[r], stream));
      }
      cuda(cudaEventRecord(end[r], stream));
      cuda(cudaStreamSynchronize(stream));
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, begin[r], end[r]));
      if (i >= 0) micros[r].push_back(1000.0 * ms / (kPairs * kGraphs));
    });
  }
  double slowest = 0;
  for (int r = 0; r < R; ++r) {
    const layout::ErrorRecord& error = ranks.world.error(r);
    if (error.kind != 0)
      throw std::runtime_error("rank " + std::to_string(r) + " waited for rank " + std::to_string(error.peer) + " in " +
                               layout::wait_phase_name(static_cast<layout::WaitPhase>(error.phase)));
    std::sort(micros[r].begin(), micros[r].end());
    slowest = std::max(slowest, micros[r][micros[r].size() / 2]);
    cuda(cudaGraphExecDestroy(graphs[r]));
    cuda(cudaEventDestroy(begin[r]));
    cuda(cudaEventDestroy(end[r]));
  }
  return slowest;
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
  for (int r = 0; r < model.shape.num_ranks; ++r) {
    std::mt19937_64 random(static_cast<std::uint64_t>(r) + 3);
    std::vector<std::int64_t> experts(kExperts), ids;
    for (std::int64_t e = 0; e < kExperts; ++e) experts[static_cast<std::size_t>(e)] = e;
    for (std::int64_t t = 0; t < model.shape.num_tokens[r]; ++t) {
      for (int k = 0; k < kTopk; ++k) std::swap(experts[k], experts[k + random() % (kExperts - k)]);
      ids.insert(ids.end(), experts.begin(), experts.begin() + kTopk);
    }
    model.inputs[r].ids = ids;
  }
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
    for (const auto& [name, what] : {std::pair("between nodes: fp8 + bf16", What::kPair),
                                     std::pair("between nodes: fp8 dispatch", What::kDispatch),
                                     std::pair("between nodes: bf16 combine", What::kCombine)}) {
      LowMode mode;
      mode.fp8 = true;
      mode.num_blocks = 64;
      std::vector<std::unique_ptr<LowCall>> calls = calls_of(ranks, model, mode);
      const double micros = time_of(ranks, calls, what);
      report(name, R, T, 64, false, micros);
      CHECK_LT(micros, 2000);
    }
  }
}
