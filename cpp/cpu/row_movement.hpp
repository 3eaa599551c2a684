// The rows of a dispatch where they cannot all be stored at once: between nodes, through the rings, and into places
// that are windows over what arrives. One thread a rank serves all of its sources in turn and waits for none alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/protocol.hpp"
#include "cpu/row_writer.hpp"

namespace deep_moe::cpu {

// A call whose counts and places are known.
struct RowPlan {
  std::uint64_t epoch = 0;
  const std::vector<Target>* targets = nullptr;       // by rank; those of this node
  const std::vector<std::int64_t>* counts = nullptr;  // [source][destination]
  std::int64_t num_tokens = 0;
  const std::int32_t* send_index = nullptr;       // [T, R]
  const std::int32_t* send_rdma_index = nullptr;  // [T, N]; null on one node
  std::vector<std::int64_t> rows_out, rows_in;    // [N] to and from the peers
  bool streaming = false;
};

class RowMovement {
 public:
  // `copy_out(wave)`: this rank's place is a full window, to be emptied. send_nvl_index [rows from peers, L] is filled;
  // null: the handle has it.
  RowMovement(Context context, const RowWriter& writer, const RowPlan& plan,
              std::function<void(std::int64_t wave)> copy_out, std::int32_t* send_nvl_index);
  void run();

 private:
  // Rows that this rank stores on the ranks of its node: its own, and those of each peer.
  struct Source {
    int rank, node;
    std::int64_t total;                     // tokens, or rows of the ring
    std::int64_t done = 0;                  // of these, in order
    std::int64_t map_begin = 0;             // its first row in send_nvl_index
    std::vector<std::int64_t> first = {};   // [L] final index of its first row there
    std::vector<std::int64_t> stored = {};  // [L] rows there
    std::vector<std::int64_t> waves = {};   // [L] that have been told
  };

  Source make_source(int rank, int node, std::int64_t total) const;
  const Target& target(int local) const;
  int mate(int local) const { return topology_.rank_at(node_, local); }
  bool is_own(const Source& source) const { return source.node == node_; }

  void look_at_windows();
  // The rank that keeps the source's row or token from moving, or -1.
  int blocked_by(const Source& source, std::int64_t row);
  std::int64_t final_index(const Source& source, std::int64_t row, int local);
  bool move(Source& source);
  void send(const Source& source, std::int64_t token);
  void forward(const Source& source, std::int64_t row);
  void tell_rows_done(Source& source);
  int missing_source();  // whose rows of the next wave are not all here, or -1
  bool drain();
  int first_missing();  // for the wait: a rank to blame, or -1 where something can move

  Domain& domain_;
  WorkerPool& pool_;
  Rails* rails_;
  const Topology& topology_;
  const RowWriter& writer_;
  const RowPlan& plan_;
  const std::function<void(std::int64_t)> copy_out_;
  std::int32_t* const send_nvl_index_;
  const int rank_, num_ranks_, node_, num_local_ranks_, num_nodes_;
  layout::RailRow rail_row_;
  std::vector<Source> sources_;           // own first
  std::vector<std::int64_t> window_end_;  // [L] final index behind the last row that may be stored now
  std::int64_t drained_ = 0;              // waves of this rank's place
};

}  // namespace deep_moe::cpu
