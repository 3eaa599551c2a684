// The reading half of combine: sums of the rows that this rank's node holds, for this rank's own tokens and, between
// nodes, for those of its peers, to which the sums go back through the rings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/protocol.hpp"
#include "layout/rail.hpp"

namespace deep_moe::cpu {

class RowPuller {
 public:
  RowPuller(Context context, const CombineArgs& args, const CombineResult& result);

  // Before anything is announced: BufferTooSmallError where a row does not fit a slot of the rings.
  void check_fits() const;
  // All announcements of the call are here.
  void begin(std::uint64_t epoch);
  // Sums what it can; false if that is nothing.
  bool advance();
  bool finished() const;
  // A rank to blame for what is not finished; -1 where something can move.
  int first_missing();
  std::string describe(int peer) const;
  // The rank of this node that reads the rows of `source`.
  int puller_of(int source) const { return mate(topology_.local_of(source)); }

 private:
  // Rows that one rank of this node holds.
  struct Holder {
    const char* x = nullptr;
    const char* weights = nullptr;
    std::int64_t x_capacity = 0, weight_capacity = 0;  // rows of its rings
    std::int64_t x_stride = 0, weight_stride = 0;      // bytes from one row to the next
    bool is_ring = false;                              // it waits for what has been consumed
    std::int64_t ready = 0;                            // rows, when last looked at
  };
  // Whose rows are summed: this rank, or a peer.
  struct Source {
    int rank, node;
    std::int64_t total;                   // tokens, or rows that this rank forwarded
    const std::int32_t* index = nullptr;  // [total, step] at each holder, after `first`; -1 = none
    std::int64_t step = 0;
    std::int64_t done = 0;
    std::vector<std::int64_t> first = {};     // [L]
    std::vector<std::int64_t> consumed = {};  // [L] row up to which it has been read
  };

  int mate(int local) const { return topology_.rank_at(node_, local); }
  bool is_own(const Source& source) const { return source.node == node_; }
  std::int64_t first_row(int source, int holder) const;
  std::int64_t row_at(const Source& source, std::int64_t row, int local) const;
  void make_sources();
  void aim(int local);
  void look_at_ready();
  int blocked_by(const Source& source, std::int64_t row);
  bool advance(Source& source);
  void publish_consumed(Source& source, std::int64_t begin, std::int64_t end);
  int gather(const Source& source, std::int64_t row, const void** rows, float* weights) const;
  void collect(const Source& source, std::int64_t row);
  void sum_token(const Source& source, std::int64_t token);

  Domain& domain_;
  WorkerPool& pool_;
  Rails* rails_;
  const Topology& topology_;
  const CombineArgs& args_;
  const CombineResult& result_;
  const int rank_, num_ranks_, node_, num_local_ranks_, num_nodes_;
  const std::int64_t hidden_, item_, row_bytes_, topk_;
  const layout::RailRow rail_row_;
  std::uint64_t epoch_ = 0;
  std::vector<Holder> holders_;  // [L]
  std::vector<Source> sources_;  // own first
};

}  // namespace deep_moe::cpu
