// What timing tests share: routing as it is uniform, and how long calls take inside CUDA graphs.
#pragma once

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "gpu_world.cuh"

namespace deep_moe::test {

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// [num_tokens, topk] of different experts a token, each as likely.
inline std::vector<std::int64_t> uniform_ids(std::int64_t num_tokens, int topk, int num_experts, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> ids, experts(num_experts);
  for (int e = 0; e < num_experts; ++e) experts[e] = e;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (int k = 0; k < topk; ++k) std::swap(experts[k], experts[k + random() % (num_experts - k)]);
    ids.insert(ids.end(), experts.begin(), experts.begin() + topk);
  }
  return ids;
}

struct GraphRuns {
  int calls;    // in a graph
  int graphs;   // launched in a row
  int samples;  // behind two that do not count
};

// Microseconds a call of `launch(r)`: all ranks at the same time, back to back inside CUDA graphs; slowest rank,
// median.
inline double time_in_graphs(World& world, const GraphRuns& runs, const std::function<void(int)>& launch) {
  const int R = world.num_ranks();
  std::vector<std::vector<double>> micros(R);
  std::vector<cudaGraphExec_t> graphs(R);
  std::vector<cudaEvent_t> begin(R), end(R);
  for (int r = 0; r < R; ++r) {
    const OnGpuOf on(r);
    cudaStream_t stream = world.rank(r).stream;
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < runs.calls; ++i) launch(r);
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&graphs[r], graph, 0));
    cuda(cudaGraphUpload(graphs[r], stream));
    cuda(cudaGraphDestroy(graph));
    cuda(cudaEventCreate(&begin[r]));
    cuda(cudaEventCreate(&end[r]));
  }
  Meeting together(R);
  for (int i = -2; i < runs.samples; ++i) {
    run(R, [&](int r) {
      const Meeting::Leave leave{together};
      cudaStream_t stream = world.rank(r).stream;
      together.wait();
      cuda(cudaGraphLaunch(graphs[r], stream));
      cuda(cudaEventRecord(begin[r], stream));
      // No rank is a launch ahead of one that has not launched: a launch may wait for the one before it with the
      // driver's lock held, and that one for the other rank.
      for (int g = 0; g < runs.graphs; ++g) {
        together.wait();
        cuda(cudaGraphLaunch(graphs[r], stream));
      }
      cuda(cudaEventRecord(end[r], stream));
      cuda(cudaStreamSynchronize(stream));
      float ms = 0;
      cuda(cudaEventElapsedTime(&ms, begin[r], end[r]));
      if (i >= 0) micros[r].push_back(1000.0 * ms / (runs.calls * runs.graphs));
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

}  // namespace deep_moe::test
