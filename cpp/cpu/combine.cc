// High-throughput combine by pull: the owner of a token reads its rows from the ranks that hold them, sums them in fp32
// in rank order and writes once. One protocol for all inputs: each rank publishes a place, its capacity and a counter
// of ready rows. An input in the heap is the place itself, with all rows ready; any other input is copied into a
// staging block behind which the pullers follow, which is a ring where the heap has no room for all rows. Rows are
// pulled in the order (source rank, token) in which they lie, on every rank, so a ring of any size makes progress.
// Between nodes the rows of a peer's tokens are pulled for it, and one sum a token goes back (row_puller.hpp).
#include <algorithm>
#include <cstring>

#include "cpu/copy.hpp"
#include "cpu/output.hpp"
#include "cpu/prepared_call.hpp"
#include "cpu/row_puller.hpp"
#include "layout/handle.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Place;
using layout::Region;

constexpr std::int64_t kCopyBytes = std::int64_t{512} << 10;  // the copier's step
constexpr std::int64_t kCopyGrain = 16;                       // rows a thread takes at least

class Combine {
 public:
  Combine(Context context, const CombineArgs& args)
      : domain_(context.domain),
        pool_(context.pool),
        args_(args),
        rank_(domain_.rank()),
        num_ranks_(domain_.num_ranks()),
        meta_(args.handle.meta.as<std::int64_t>()),
        num_tokens_(meta_[layout::kMetaNumTokens]),
        num_held_(meta_[layout::kMetaNumArrived]),
        hidden_(args.x.shape[1]),
        item_(static_cast<std::int64_t>(dtype_bytes(args.x.dtype))),
        row_bytes_(hidden_ * item_),
        topk_(args.topk_weights.defined() ? args.topk_weights.shape[1] : 0),
        puller_(context, args, result_) {
    const std::int32_t* prefix = args.handle.rank_prefix_matrix.as<std::int32_t>() + rank_;
    own_begin_ = rank_ > 0 ? prefix[static_cast<std::int64_t>(rank_ - 1) * num_ranks_] : 0;
    own_end_ = prefix[static_cast<std::int64_t>(rank_) * num_ranks_];
  }

  // Before anything is announced: what fails here is a refusal.
  void prepare() {
    puller_.check_fits();
    const TensorView& x = args_.x;
    const TensorView& weights = args_.topk_weights;
    const bool x_inside = in_heap(x, row_bytes_, &x_place_);
    const bool weights_inside = topk_ == 0 || in_heap(weights, topk_ * 4, &weight_place_);
    if (x_inside && weights_inside) {
      copied_ = num_held_;
    } else {
      make_staging(!x_inside, topk_ > 0 && !weights_inside);
    }
    allocate_outputs();
  }

  CombineResult run() {
    try {
      layout::Announce words{};
      words.signature = signature(args_);
      words.num_tokens = num_tokens_;
      words.place = x_place_;
      words.weight_place = weight_place_;
      epoch_ = domain_.announce(words);
      publish_ready();
      advance_copier();
      domain_.gather_announcements("combine/notify", epoch_);
      puller_.begin(epoch_);
      pull();
      finish();
    } catch (...) {
      give_back();  // peers only read the staging: what a sleeper reads of it is never used
      throw;
    }
    give_back();
    return std::move(result_);
  }

  void give_back() { domain_.heap().free(staging_); }

 private:
  bool in_heap(const TensorView& view, std::int64_t row_bytes, Place* place) const {
    place->capacity = num_held_;
    if (num_held_ == 0) return true;
    std::size_t offset = 0;
    if (!view.is_contiguous() ||
        !domain_.heap().locate(view.data, static_cast<std::size_t>(num_held_ * row_bytes), &place->segment, &offset))
      return false;
    place->offset = static_cast<std::int64_t>(offset);
    return true;
  }

  // All rows where the heap has room or can grow, else as many as it has room for.
  void make_staging(bool for_x, bool for_weights) {
    const std::int64_t x_bytes = for_x ? row_bytes_ : 0, weight_bytes = for_weights ? topk_ * 4 : 0;
    const auto bytes_of = [&](std::int64_t rows) {
      return layout::align_up(static_cast<std::size_t>(x_bytes * rows), layout::kAlign) +
             static_cast<std::size_t>(weight_bytes * rows);
    };
    std::string reason;
    std::int64_t rows = num_held_;
    staging_ = domain_.heap().allocate_most(bytes_of(rows), &reason);
    if (staging_.bytes < bytes_of(rows)) {
      rows = (static_cast<std::int64_t>(staging_.bytes) - layout::kAlign) / (x_bytes + weight_bytes);
      if (!staging_ || rows < 1) {
        domain_.heap().free(staging_);
        staging_ = {};
        throw BufferTooSmallError("combine: no heap for even one row of " + std::to_string(x_bytes + weight_bytes) +
                                  " bytes, " + std::to_string(bytes_of(num_held_)) + " bytes wanted: " + reason);
      }
    }
    ring_ = rows;
    const std::size_t weights_at = layout::align_up(static_cast<std::size_t>(x_bytes * rows), layout::kAlign);
    if (for_x) {
      staged_x_ = staging_.ptr;
      x_place_ = {staging_.segment, 0, static_cast<std::int64_t>(staging_.offset), rows};
    }
    if (for_weights) {
      staged_weights_ = staging_.ptr + weights_at;
      weight_place_ = {staging_.segment, 0, static_cast<std::int64_t>(staging_.offset + weights_at), rows};
    }
  }

  void allocate_outputs() {
    if (args_.out.defined()) {
      result_.combined_x.view = args_.out;
    } else {
      result_.combined_x = make_output(domain_, args_.x.dtype, num_tokens_, hidden_);
    }
    if (topk_ > 0) result_.combined_topk_weights = make_output(domain_, DType::kFloat32, num_tokens_, topk_);
  }

  // Row up to which every puller is through with this rank's rows, in the order of the rows.
  std::int64_t rows_consumed() {
    const std::int32_t* prefix = args_.handle.rank_prefix_matrix.as<std::int32_t>();
    std::int64_t begin = 0;
    for (int src = 0; src < num_ranks_; ++src) {
      const std::int64_t end = prefix[static_cast<std::int64_t>(src) * num_ranks_ + rank_];
      if (end > begin) {
        const auto seen = static_cast<std::int64_t>(
            layout::unpack_count(load_acquire(domain_.mine().word(Region::kRowsConsumed, src)), epoch_));
        if (seen < end) return std::max(begin, seen);
      }
      begin = end;
    }
    return num_held_;
  }

  bool copier_can_go() { return copied_ < num_held_ && (copied_ < ring_ || copied_ - ring_ < rows_consumed()); }

  // Copies as far as the ring allows. Returns whether anything was copied.
  bool advance_copier() {
    if (copied_ >= num_held_) return false;
    const std::int64_t limit = num_held_ <= ring_ ? num_held_ : std::min(num_held_, rows_consumed() + ring_);
    const std::int64_t step = std::max<std::int64_t>(1, kCopyBytes / row_bytes_);
    const bool any = copied_ < limit;
    while (copied_ < limit) {
      const std::int64_t end = std::min(limit, copied_ + step);
      pool_.parallel_for(end - copied_, kCopyGrain, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t row = copied_ + first; row < copied_ + last; ++row) stage_row(row);
        finish_streaming();
      });
      copied_ = end;
      publish_ready();
    }
    return any;
  }

  void stage_row(std::int64_t row) const {
    if (row >= own_begin_ && row < own_end_) return;
    const std::int64_t at = row % ring_;
    if (staged_x_ != nullptr)
      copy_row(staged_x_ + at * row_bytes_, args_.x.as<char>() + row * args_.x.stride[0] * item_, row_bytes_,
               num_held_ * row_bytes_ > kStreamingBytes);
    if (staged_weights_ != nullptr)
      std::memcpy(staged_weights_ + at * topk_ * 4, args_.topk_weights.as<float>() + row * args_.topk_weights.stride[0],
                  static_cast<std::size_t>(topk_ * 4));
  }

  void publish_ready() {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      store_release(domain_.of(peer).word(Region::kRowsReady, rank_),
                    layout::pack_count(epoch_, static_cast<std::uint64_t>(copied_)));
      domain_.ring(peer);
    }
  }

  void pull() {
    while (!puller_.finished() || copied_ < num_held_) {
      if (puller_.advance() || advance_copier()) continue;
      domain_.wait(
          "combine/rows", epoch_, [&] { return blocked_by(); }, [&](int peer) { return puller_.describe(peer); });
    }
  }

  int blocked_by() {
    if (copier_can_go()) return -1;
    if (!puller_.finished()) return puller_.first_missing();
    return copied_ < num_held_ ? slowest_puller() : -1;
  }

  // The reader of the first rows that stand in the way of the ring.
  int slowest_puller() {
    const std::int32_t* prefix = args_.handle.rank_prefix_matrix.as<std::int32_t>();
    const std::int64_t consumed = rows_consumed();
    for (int src = 0; src < num_ranks_; ++src)
      if (prefix[static_cast<std::int64_t>(src) * num_ranks_ + rank_] > consumed) return puller_.puller_of(src);
    return -1;
  }

  // All pulled: nobody touches this rank's rows any more once every rank of the node has said so.
  void finish() {
    const Topology& topology = domain_.topology();
    const int node = topology.node_of(rank_), num_mates = topology.num_local_ranks();
    for (int local = 0; local < num_mates; ++local) {
      const int holder = topology.rank_at(node, local);
      store_release(domain_.of(holder).word(Region::kPullDone, rank_), epoch_);
      domain_.ring(holder);
    }
    domain_.wait(
        "combine/done", epoch_,
        [&] {
          for (int local = 0; local < num_mates; ++local) {
            const int puller = topology.rank_at(node, local);
            if (load_acquire(domain_.mine().word(Region::kPullDone, puller)) < epoch_) return puller;
          }
          return -1;
        },
        [](int) { return std::string("it has not finished reading this rank's rows"); });
  }

  Domain& domain_;
  WorkerPool& pool_;
  const CombineArgs& args_;
  const int rank_, num_ranks_;
  const std::int64_t* meta_;
  const std::int64_t num_tokens_, num_held_, hidden_, item_, row_bytes_, topk_;

  std::int64_t own_begin_ = 0, own_end_ = 0;  // rows that this rank holds for itself

  std::uint64_t epoch_ = 0;
  Place x_place_, weight_place_;
  Block staging_;
  char* staged_x_ = nullptr;
  char* staged_weights_ = nullptr;
  std::int64_t ring_ = 1;    // rows of the staging
  std::int64_t copied_ = 0;  // rows of the input that are ready
  CombineResult result_;
  RowPuller puller_;
};

}  // namespace

CombineResult combine(Context context, const CombineArgs& args) { return run_prepared<Combine>(context, args); }

}  // namespace deep_moe::cpu
