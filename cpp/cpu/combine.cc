// High-throughput combine by pull: the owner of a token reads its rows from the ranks that hold them, sums them in fp32
// in rank order and writes once. One protocol for all inputs: each rank publishes a place, its capacity and a counter
// of ready rows. An input in the heap is the place itself, with all rows ready; any other input is copied into a
// staging block behind which the pullers follow, which is a ring where the heap has no room for all rows. Rows are
// pulled in the order (source rank, token) in which they lie, on every rank, so a ring of any size makes progress.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/copy.hpp"
#include "cpu/prepared_call.hpp"
#include "cpu/simd.hpp"
#include "layout/handle.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Place;
using layout::Region;

constexpr std::int64_t kCopyBytes = std::int64_t{512} << 10;  // the copier's step
constexpr std::int64_t kPullGrain = 16;                       // tokens a thread takes at least
constexpr std::int64_t kPullTokens = 512;                     // tokens between looks at the ready counters

// Rows that one rank holds for everybody.
struct Holder {
  const char* x = nullptr;
  const char* weights = nullptr;
  std::int64_t x_capacity = 0, weight_capacity = 0;  // rows of its rings
  std::int64_t x_stride = 0, weight_stride = 0;      // bytes from one row to the next
  std::int64_t first_index = 0;                      // of this rank's rows there
  std::int64_t num_rows = 0;                         // of this rank there
  bool is_ring = false;                              // it waits for what we have consumed
  std::int64_t consumed = 0;                         // row up to which we have pulled
};

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
        send_index_(args.handle.send_index.as<std::int32_t>()) {
    const std::int32_t* prefix = args.handle.rank_prefix_matrix.as<std::int32_t>() + rank_;
    own_begin_ = rank_ > 0 ? prefix[static_cast<std::int64_t>(rank_ - 1) * num_ranks_] : 0;
    own_end_ = prefix[static_cast<std::int64_t>(rank_) * num_ranks_];
  }

  // Before anything is announced: what fails here is a refusal.
  void prepare() {
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
      aim();
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

  // Outputs come from the heap where it has room, for its pages are warm; else from ordinary memory.
  Tensor make_output(DType dtype, std::int64_t columns) {
    const std::int64_t bytes = num_tokens_ * columns * static_cast<std::int64_t>(dtype_bytes(dtype));
    if (bytes > 0) {
      if (const Block block = domain_.heap().allocate(static_cast<std::size_t>(bytes)))
        return {TensorView::contiguous(block.ptr, dtype, {num_tokens_, columns}), domain_.heap().own(block)};
    }
    return make_host_tensor(dtype, {num_tokens_, columns});
  }

  void allocate_outputs() {
    if (args_.out.defined()) {
      result_.combined_x.view = args_.out;
    } else {
      result_.combined_x = make_output(args_.x.dtype, hidden_);
    }
    if (topk_ > 0) result_.combined_topk_weights = make_output(DType::kFloat32, topk_);
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
      pool_.parallel_for(end - copied_, kPullGrain, [&](std::int64_t first, std::int64_t last) {
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

  void aim() {
    const std::int32_t* prefix = args_.handle.rank_prefix_matrix.as<std::int32_t>();
    const auto prefix_at = [&](int src, int dst) {
      return src < 0 ? 0 : prefix[static_cast<std::int64_t>(src) * num_ranks_ + dst];
    };
    holders_.resize(num_ranks_);
    for (int holder = 0; holder < num_ranks_; ++holder) {
      Holder& entry = holders_[holder];
      const layout::Announce& words = domain_.mine().announce(epoch_, holder);
      entry.first_index = prefix_at(rank_ - 1, holder);
      entry.num_rows = prefix_at(rank_, holder) - entry.first_index;
      entry.x_capacity = words.place.capacity;
      entry.weight_capacity = words.weight_place.capacity;
      const std::int64_t total_rows = prefix_at(num_ranks_ - 1, holder);
      entry.is_ring = entry.x_capacity < total_rows || (topk_ > 0 && entry.weight_capacity < total_rows);
      entry.consumed = entry.first_index;
      entry.x_stride = row_bytes_;
      entry.weight_stride = topk_ * 4;
      if (entry.num_rows == 0) continue;
      if (holder == rank_) {
        aim_at_own(&entry);
        continue;
      }
      entry.x = domain_.address(holder, words.place.segment, static_cast<std::size_t>(words.place.offset));
      if (topk_ > 0)
        entry.weights =
            domain_.address(holder, words.weight_place.segment, static_cast<std::size_t>(words.weight_place.offset));
    }
  }

  // Rows that this rank holds for itself are read where they are, never staged.
  void aim_at_own(Holder* entry) const {
    entry->x = args_.x.as<char>();
    entry->x_stride = args_.x.stride[0] * item_;
    entry->x_capacity = std::numeric_limits<std::int64_t>::max();
    if (topk_ == 0) return;
    entry->weights = args_.topk_weights.as<char>();
    entry->weight_stride = args_.topk_weights.stride[0] * 4;
    entry->weight_capacity = std::numeric_limits<std::int64_t>::max();
  }

  std::int64_t rows_ready(int holder) {
    return static_cast<std::int64_t>(
        layout::unpack_count(load_acquire(domain_.mine().word(Region::kRowsReady, holder)), epoch_));
  }

  // The first holder whose row for `token` is not ready, or -1.
  int not_ready(std::int64_t token, const std::vector<std::int64_t>& ready) const {
    const std::int32_t* index = send_index_ + token * num_ranks_;
    for (int holder = 0; holder < num_ranks_; ++holder) {
      if (index[holder] >= 0 && holders_[holder].first_index + index[holder] >= ready[holder]) return holder;
    }
    return -1;
  }

  void look_at_ready(std::vector<std::int64_t>* ready) {
    for (int holder = 0; holder < num_ranks_; ++holder) (*ready)[holder] = rows_ready(holder);
  }

  void pull() {
    std::vector<std::int64_t> ready(static_cast<std::size_t>(num_ranks_), 0);
    std::int64_t token = 0;
    const auto blocked_by = [&] {
      if (copier_can_go()) return -1;
      if (token < num_tokens_) {
        look_at_ready(&ready);
        return not_ready(token, ready);
      }
      return copied_ < num_held_ ? slowest_puller() : -1;
    };
    while (token < num_tokens_ || copied_ < num_held_) {
      look_at_ready(&ready);
      std::int64_t end = token;
      const std::int64_t limit = std::min(num_tokens_, token + kPullTokens);
      while (end < limit && not_ready(end, ready) < 0) ++end;
      if (end > token) {
        pool_.parallel_for(end - token, kPullGrain, [&](std::int64_t first, std::int64_t last) {
          for (std::int64_t t = token + first; t < token + last; ++t) sum_token(t);
        });
        publish_consumed(token, end);
        token = end;
        continue;
      }
      if (advance_copier()) continue;
      domain_.wait("combine/rows", epoch_, blocked_by, [&](int peer) {
        return "expected more rows than the " + std::to_string(ready[peer]) + " it has ready";
      });
    }
  }

  // The first rank that has not yet pulled rows which stand in the way of the ring.
  int slowest_puller() {
    const std::int32_t* prefix = args_.handle.rank_prefix_matrix.as<std::int32_t>();
    const std::int64_t consumed = rows_consumed();
    for (int src = 0; src < num_ranks_; ++src)
      if (prefix[static_cast<std::int64_t>(src) * num_ranks_ + rank_] > consumed) return src;
    return -1;
  }

  void publish_consumed(std::int64_t begin, std::int64_t end) {
    for (int holder = 0; holder < num_ranks_; ++holder) {
      Holder& entry = holders_[holder];
      if (!entry.is_ring) continue;
      for (std::int64_t token = begin; token < end; ++token)
        if (send_index_[token * num_ranks_ + holder] >= 0) ++entry.consumed;
      store_release(domain_.of(holder).word(Region::kRowsConsumed, rank_),
                    layout::pack_count(epoch_, static_cast<std::uint64_t>(entry.consumed)));
      domain_.ring(holder);
    }
  }

  void sum_token(std::int64_t token) const {
    constexpr int kStackRows = 64;
    const void* few[kStackRows];
    std::vector<const void*> many;
    const void** rows = few;
    if (num_ranks_ > kStackRows) {
      many.resize(static_cast<std::size_t>(num_ranks_));
      rows = many.data();
    }
    int num_rows = 0;
    const std::int32_t* index = send_index_ + token * num_ranks_;
    float* weights = topk_ > 0 ? result_.combined_topk_weights.as<float>() + token * topk_ : nullptr;
    for (std::int64_t k = 0; k < topk_; ++k) weights[k] = 0.0f;
    for (int holder = 0; holder < num_ranks_; ++holder) {
      if (index[holder] < 0) continue;
      const Holder& entry = holders_[holder];
      const std::int64_t row = entry.first_index + index[holder];
      rows[num_rows++] = entry.x + row % entry.x_capacity * entry.x_stride;
      if (topk_ == 0) continue;
      const float* theirs =
          reinterpret_cast<const float*>(entry.weights + row % entry.weight_capacity * entry.weight_stride);
      for (std::int64_t k = 0; k < topk_; ++k) weights[k] += theirs[k];
    }
    const auto row_of = [&](const TensorView& view) -> char* {
      return view.defined() ? view.as<char>() + token * view.stride[0] * item_ : nullptr;
    };
    simd_ops().sum_rows(args_.x.dtype, rows, num_rows, row_of(args_.bias0), row_of(args_.bias1),
                        row_of(result_.combined_x.view), hidden_);
  }

  // All pulled: nobody touches this rank's rows any more once every peer has said so.
  void finish() {
    for (int holder = 0; holder < num_ranks_; ++holder) {
      store_release(domain_.of(holder).word(Region::kPullDone, rank_), epoch_);
      domain_.ring(holder);
    }
    domain_.wait(
        "combine/done", epoch_,
        [&] {
          for (int src = 0; src < num_ranks_; ++src)
            if (load_acquire(domain_.mine().word(Region::kPullDone, src)) < epoch_) return src;
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
  const std::int32_t* send_index_;

  std::int64_t own_begin_ = 0, own_end_ = 0;  // rows that this rank holds for itself

  std::uint64_t epoch_ = 0;
  Place x_place_, weight_place_;
  Block staging_;
  char* staged_x_ = nullptr;
  char* staged_weights_ = nullptr;
  std::int64_t ring_ = 1;    // rows of the staging
  std::int64_t copied_ = 0;  // rows of the input that are ready
  std::vector<Holder> holders_;
  CombineResult result_;
};

}  // namespace

CombineResult combine(Context context, const CombineArgs& args) { return run_prepared<Combine>(context, args); }

}  // namespace deep_moe::cpu
