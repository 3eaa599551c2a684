// How long whole dispatches and combines take, beside kernels that only copy as many rows on as many SMs. Prints a
// table, and a line of JSON a row where DEEP_MOE_JSON names a file; fails if a call is wildly slower than the copy.
#include <doctest/doctest.h>

#include <tuple>

#include "gpu_copy_bound.cuh"
#include "gpu_rows.cuh"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

constexpr int kNodes = 10, kGraphs = 3, kRepeats = 11;
constexpr std::int64_t kTokens = 4096, kHidden = 7168;
constexpr int kExperts = 256, kTopk = 8;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<std::int64_t> uniform_ids(int seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids, experts(kExperts);
  for (int e = 0; e < kExperts; ++e) experts[e] = e;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (int k = 0; k < kTopk; ++k) std::swap(experts[k], experts[k + random() % (kExperts - k)]);
    ids.insert(ids.end(), experts.begin(), experts.begin() + kTopk);
  }
  return ids;
}

// Microseconds a call of `launch(r)`: both ranks at the same time, back to back inside CUDA graphs, slower rank,
// median.
double back_to_back(World& world, const std::function<void(int)>& launch) {
  const int R = world.num_ranks();
  std::vector<std::vector<double>> micros(R);
  std::vector<cudaGraphExec_t> graphs(R);
  std::vector<cudaEvent_t> begin(R), end(R);
  for (int r = 0; r < R; ++r) {
    cudaStream_t stream = world.rank(r).stream;
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kNodes; ++i) launch(r);
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
      cudaStream_t stream = world.rank(r).stream;
      together.wait();
      cuda(cudaGraphLaunch(graphs[r], stream));
      cuda(cudaEventRecord(begin[r], stream));
      for (int g = 0; g < kGraphs; ++g) cuda(cudaGraphLaunch(graphs[r], stream));
      cuda(cudaEventRecord(end[r], stream));
      cuda(cudaStreamSynchronize(stream));
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, begin[r], end[r]));
      if (i >= 0) micros[r].push_back(1000.0 * ms / (kNodes * kGraphs));
    });
  }
  double slowest = 0;
  for (int r = 0; r < R; ++r) {
    slowest = std::max(slowest, median(micros[r]));
    cuda(cudaGraphExecDestroy(graphs[r]));
    cuda(cudaEventDestroy(begin[r]));
    cuda(cudaEventDestroy(end[r]));
  }
  return slowest;
}

template <int kStages>
void launch_copy(const CopyBound& args, int num_sms, int num_warps, cudaStream_t stream) {
  const int shared = num_warps * kStages * (args.chunk_bytes + 8);
  cuda(cudaFuncSetAttribute(copy_bound_kernel<kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  copy_bound_kernel<kStages><<<num_sms, 32 * num_warps, shared, stream>>>(args);
  cuda(cudaGetLastError());
}

// The fastest of several shapes of the copy.
double copy_time(World& world, int num_sms, const std::vector<std::pair<int, int>>& warps_and_stages,
                 const std::function<CopyBound(int)>& args) {
  double best = 1e9;
  for (const auto& [num_warps, num_stages] : warps_and_stages) {
    const int warps = num_warps, stages = num_stages;
    best = std::min(best, back_to_back(world, [&, warps, stages](int r) {
                      cudaStream_t stream = world.rank(r).stream;
                      if (stages == 3) {
                        launch_copy<3>(args(r), num_sms, warps, stream);
                      } else {
                        launch_copy<4>(args(r), num_sms, warps, stream);
                      }
                    }));
  }
  return best;
}

void report(const char* call, const char* type, int num_sms, double micros, double copy) {
  std::printf("%-24s %5s %4d | %8.1f us %8.1f us %+7.1f us\n", call, type, num_sms, micros, copy, micros - copy);
  std::fflush(stdout);
  const char* path = std::getenv("DEEP_MOE_JSON");
  if (path == nullptr) return;
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file,
               "{\"call\": \"%s\", \"type\": \"%s\", \"ranks\": 2, \"gpus\": 1, \"tokens\": %lld, \"hidden\": %lld, "
               "\"experts\": %d, \"topk\": %d, \"sms\": %d, \"micros\": %.2f, \"copy_micros\": %.2f}\n",
               call, type, static_cast<long long>(kTokens), static_cast<long long>(kHidden), kExperts, kTopk, num_sms,
               micros, copy);
  std::fclose(file);
}

}  // namespace

TEST_CASE("timing: dispatch and combine beside a plain copy" * doctest::skip(no_gpu())) {
  World world(2, kTokens, kTopk, kExperts, 8, 100.0);
  for (int r = 0; r < 2; ++r) world.set_ids(r, uniform_ids(r));
  std::printf("\n%-24s %5s %4s | %11s %11s\n", "call", "type", "SMs", "call", "plain copy");
  const double notify = back_to_back(
      world, [&](int r) { kernels::notify(world.rank(r).domain, world.args(r, 1), world.rank(r).stream); });
  std::printf("layout and notify alone: %.2f us\n", notify);
  std::mt19937_64 random(41);
  for (const bool fp8 : {false, true}) {
    RowShape shape;
    shape.row_bytes = fp8 ? kHidden : 2 * kHidden;
    shape.num_scales = fp8 ? kHidden / 128 : 0;
    shape.bf16_values = !fp8;
    Rows rows(world, kTokens, shape);
    for (int r = 0; r < 2; ++r) rows.fill(r, random);
    rows.count();
    char *copies[2][2], *sums[2];
    char* extra[2][2] = {};
    for (int r = 0; r < 2; ++r) {
      for (char*& copy : copies[r]) copy = rows.allocate(kTokens * shape.row_bytes);
      for (char*& copy : extra[r]) copy = rows.allocate(kTokens * 256);
      sums[r] = rows.allocate(kTokens * shape.row_bytes);
    }
    for (const int num_sms : {8, 12, 16, 24}) {
      rows.shape().num_sms = num_sms;
      const double copy = copy_time(world, num_sms, {{6, 4}, {12, 4}}, [&](int r) {
        CopyBound args;
        args.from[0] = rows.rank(r).x;
        args.extra_bytes = static_cast<int>(rows.scale_row_bytes());
        args.extra_from = rows.rank(r).scales;
        for (int d = 0; d < 2; ++d) args.extra_to[d] = extra[d][r];
        for (int d = 0; d < 2; ++d) args.to[d] = copies[d][r];
        args.num_stores = 2;
        args.wanted = world.rank(r).out.is_token_in_rank;
        args.num_tokens = kTokens;
        args.row_bytes = static_cast<int>(shape.row_bytes);
        args.chunk_bytes = 3584;
        return args;
      });
      const double whole = back_to_back(world, [&](int r) {
        kernels::notify(world.rank(r).domain, rows.notify_args(r, 1), world.rank(r).stream);
        kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
      });
      const double cached = back_to_back(
          world, [&](int r) { kernels::dispatch(world.rank(r).domain, rows.cached_args(r, 0), world.rank(r).stream); });
      report("notify + dispatch", fp8 ? "fp8" : "bf16", num_sms, whole, copy);
      report("dispatch by handle", fp8 ? "fp8" : "bf16", num_sms, cached, copy);
      CHECK_LT(whole, 2 * copy + 50);
      if (fp8) continue;

      for (int r = 0; r < 2; ++r) rows.poison_heap(r);
      run(2, [&](int r) {
        kernels::notify(world.rank(r).domain, rows.notify_args(r, 0), world.rank(r).stream);
        kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
        cuda(cudaStreamSynchronize(world.rank(r).stream));
      });
      const double pull = copy_time(world, num_sms, {{16, 3}, {12, 4}}, [&](int r) {
        CopyBound args;
        for (int d = 0; d < 2; ++d) args.from[d] = copies[d][r];
        args.to[0] = sums[r];
        args.num_loads = 2;
        args.wanted = world.rank(r).out.is_token_in_rank;
        args.num_tokens = kTokens;
        args.row_bytes = static_cast<int>(shape.row_bytes);
        args.chunk_bytes = 3584;
        return args;
      });
      for (const auto& [name, weights, vector_path] :
           std::vector<std::tuple<const char*, bool, bool>>{{"combine", true, false},
                                                            {"combine without weights", false, false},
                                                            {"combine, plain loads", true, true}}) {
        const int topk = weights ? kTopk : 0;
        const bool plain = vector_path;
        const double combine = back_to_back(world, [&](int r) {
          const layout::RecvBlock block(rows.format(), rows.counts().total(r, 2));
          kernels::CombineArgs args;
          args.num_tokens = kTokens;
          args.hidden = kHidden;
          args.send_position = world.rank(r).out.send_position;
          args.rank_prefix_matrix = world.rank(r).out.prefix;
          args.segment_bases = rows.rank(r).segments;
          args.out = sums[r];
          args.out_stride = shape.row_bytes;
          args.topk = topk;
          args.use_vector_path = plain;
          args.combined_topk_weights = reinterpret_cast<float*>(rows.rank(r).weights);
          args.num_sms = num_sms;
          args.start.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCombine);
          args.start.place = {kHeapSegment, 0, rows.place_offset(r) + static_cast<std::int64_t>(block.x), 0};
          args.start.weight_place = {kHeapSegment, 0,
                                     rows.place_offset(r) + static_cast<std::int64_t>(block.topk_weights), 0};
          kernels::combine(world.rank(r).domain, args, world.rank(r).stream);
        });
        report(name, "bf16", num_sms, combine, pull);
        CHECK_LT(combine, 4 * pull + 50);
      }
    }
  }
}
