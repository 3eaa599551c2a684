// One rank of a timing: chains of calls on a Buffer, driven from C++, and the plain copies that they are held against.
// No Python and no CUDA header here; bench.cc is the binding, bench_rank_no_cuda.cc takes the place of bench_rank.cc
// in builds without CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <deep_moe/buffer.hpp>

namespace deep_moe::bench {

// What is sent. The tensors stay the caller's and must outlive their use.
struct Inputs {
  Payload x;  // scales: row-major
  TensorView topk_idx, topk_weights;
  std::int64_t num_experts = 0;
  TensorView ordinary;  // [R * T, H] of a type that combine takes, not in the heap
  // For each rank the place where this rank's plain copies go: rows, and behind the last of them the scales; as large
  // as x with its scales or `ordinary` / R, whichever is more. Addresses of this or another GPU; empty: no copies.
  std::vector<char*> landing;
};

// One call of a chain. A combine sends back what the last dispatch of its chain has given, or, where there was none,
// the one that set_inputs() has made; rows that combine cannot sum (fp8) are replaced by as many others of the heap.
enum class Step {
  kLayout,              // get_dispatch_layout
  kDispatch,            // by ids, num_experts=: the fused path
  kDispatchV1,          // get_dispatch_layout, then dispatch with what it gave
  kDispatchByHandle,    // of the dispatch that set_inputs() has made
  kCombine,             // rows in the heap
  kCombineWithWeights,  // the same, with the weights that were received
  kCombineOrdinary,     // rows in an ordinary tensor
  kCopyForDispatch,     // a row loaded once, stored to each rank that it goes to
  kCopyForCombine,      // a row loaded from each rank that holds it, one stored
};

// "dispatch", "dispatch_v1", ...; throws ArgumentError that lists them.
Step step_of(const std::string& name);

struct Chain {
  std::vector<Step> steps;
  int num_sms = 1;
  int graph_repeats = 0;  // this many times in one CUDA graph, with a fixed number of rows; 0: eager calls
  int copy_warps = 12, copy_stages = 4;  // shape of plain copies
  bool copy_tickets = false;             // tokens to whoever asks, rather than by turns
};

// Microseconds a chain, over all of a run.
struct Times {
  double device_us = 0;  // by events on the current stream
  double issue_us = 0;   // until the last call has returned to the host
  double wall_us = 0;    // until the stream is idle
};

// All calls are made on the thread whose current stream is `stream` (a cudaStream_t), that of the Buffer's calls.
class Rank {
 public:
  Rank();
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Collective: one dispatch.
  void set_inputs(Buffer& buffer, const Inputs& inputs, void* stream);
  // Gets ready for run(). Local, but nothing of any rank may be running that waits for a peer: a graph may be loaded.
  void prepare(Buffer& buffer, const Chain& chain, void* stream);
  // Collective where the chain is: runs it once, so that the ranks start together, then `count` times; with a graph
  // that many graphs. Waits for the end.
  Times run(Buffer& buffer, int count, void* stream);

  // Whether the plain copies work on this GPU; known after set_inputs().
  bool can_copy() const;
  // What the last dispatch and the last combine have given; undefined if there was none.
  Tensor received() const;
  Tensor combined() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// For `nanoseconds`, as many blocks, threads and as much shared memory as a dispatch takes.
void hold(int device, int num_sms, int num_ranks, std::int64_t nanoseconds, void* stream);

}  // namespace deep_moe::bench
