#include "cpu/row_puller.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/simd.hpp"
#include "layout/handle.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Region;

constexpr std::int64_t kGrain = 16;   // tokens a thread takes at least
constexpr std::int64_t kBatch = 512;  // tokens between looks at the ready counters

// Room for the rows of one sum, on the stack where they are few.
class RowList {
 public:
  explicit RowList(int num_rows) {
    if (num_rows <= kFew) return;
    many_.resize(static_cast<std::size_t>(num_rows));
    rows_ = many_.data();
  }
  const void** get() { return rows_; }

 private:
  static constexpr int kFew = 64;
  const void* few_[kFew];
  std::vector<const void*> many_;
  const void** rows_ = few_;
};

}  // namespace

RowPuller::RowPuller(Context context, const CombineArgs& args, const CombineResult& result)
    : domain_(context.domain),
      pool_(context.pool),
      rails_(context.rails),
      topology_(domain_.topology()),
      args_(args),
      result_(result),
      rank_(domain_.rank()),
      num_ranks_(domain_.num_ranks()),
      node_(topology_.node_of(rank_)),
      num_local_ranks_(topology_.num_local_ranks()),
      num_nodes_(topology_.num_nodes()),
      hidden_(args.x.shape[1]),
      item_(static_cast<std::int64_t>(dtype_bytes(args.x.dtype))),
      row_bytes_(hidden_ * item_),
      topk_(args.topk_weights.defined() ? args.topk_weights.shape[1] : 0),
      rail_row_(static_cast<std::size_t>(row_bytes_), 0, 0, static_cast<std::size_t>(topk_ * 4), 0) {}

void RowPuller::check_fits() const {
  if (rails_ != nullptr) rails_->check_fits("combine", rail_row_.stride);
}

// Of the rows that `holder` has: how many are of ranks before `source`.
std::int64_t RowPuller::first_row(int source, int holder) const {
  const std::int32_t* prefix = args_.handle.rank_prefix_matrix.as<std::int32_t>();
  return source == 0 ? 0 : prefix[static_cast<std::int64_t>(source - 1) * num_ranks_ + holder];
}

void RowPuller::make_sources() {
  const auto add = [&](int rank, int node, std::int64_t total) -> Source& {
    Source source{rank, node, total};
    for (int local = 0; local < num_local_ranks_; ++local) source.consumed.push_back(first_row(rank, mate(local)));
    sources_.push_back(std::move(source));
    return sources_.back();
  };
  Source& own = add(rank_, node_, args_.handle.meta.as<std::int64_t>()[layout::kMetaNumTokens]);
  own.index = args_.handle.send_index.as<std::int32_t>();
  own.step = num_ranks_;
  own.first = own.consumed;
  if (rails_ == nullptr) return;
  const std::int32_t* prefix = args_.handle.recv_rdma_rank_prefix_sum.as<std::int32_t>();
  const std::int32_t* rdma_index = args_.handle.send_rdma_index.as<std::int32_t>();
  std::vector<std::int64_t> rows_out(static_cast<std::size_t>(num_nodes_), 0), rows_in = rows_out;
  for (std::int64_t at = 0; at < own.total * num_nodes_; ++at)
    rows_in[static_cast<std::size_t>(at % num_nodes_)] += rdma_index[at] >= 0;
  for (int node = 0; node < num_nodes_; ++node) {
    if (node == node_) continue;
    const std::int64_t begin = node > 0 ? prefix[node - 1] : 0;
    rows_out[static_cast<std::size_t>(node)] = prefix[node] - begin;
    Source& source = add(rails_->peer(node), node, prefix[node] - begin);
    source.index = args_.handle.send_nvl_index.as<std::int32_t>() + begin * num_local_ranks_;
    source.step = num_local_ranks_;
    source.first.assign(static_cast<std::size_t>(num_local_ranks_), 0);
  }
  rails_->begin(rail_row_.stride, rows_out, rows_in);
}

void RowPuller::begin(std::uint64_t epoch) {
  epoch_ = epoch;
  sources_.reserve(static_cast<std::size_t>(num_nodes_));
  make_sources();
  holders_.resize(static_cast<std::size_t>(num_local_ranks_));
  for (int local = 0; local < num_local_ranks_; ++local) aim(local);
}

void RowPuller::aim(int local) {
  Holder& holder = holders_[static_cast<std::size_t>(local)];
  const int rank = mate(local);
  const layout::Announce& words = domain_.mine().announce(epoch_, rank);
  const std::int64_t total_rows = first_row(num_ranks_, rank);
  holder.x_capacity = words.place.capacity;
  holder.weight_capacity = words.weight_place.capacity;
  holder.is_ring = holder.x_capacity < total_rows || (topk_ > 0 && holder.weight_capacity < total_rows);
  holder.x_stride = row_bytes_;
  holder.weight_stride = topk_ * 4;
  if (total_rows == 0) return;
  if (rank == rank_) {
    // What this rank holds itself is read where it is.
    holder.x = args_.x.as<char>();
    holder.x_stride = args_.x.stride[0] * item_;
    holder.x_capacity = std::numeric_limits<std::int64_t>::max();
    if (topk_ == 0) return;
    holder.weights = args_.topk_weights.as<char>();
    holder.weight_stride = args_.topk_weights.stride[0] * 4;
    holder.weight_capacity = std::numeric_limits<std::int64_t>::max();
    return;
  }
  holder.x = domain_.address(rank, words.place.segment, static_cast<std::size_t>(words.place.offset));
  if (topk_ > 0)
    holder.weights =
        domain_.address(rank, words.weight_place.segment, static_cast<std::size_t>(words.weight_place.offset));
}

void RowPuller::look_at_ready() {
  for (int local = 0; local < num_local_ranks_; ++local)
    holders_[static_cast<std::size_t>(local)].ready = static_cast<std::int64_t>(
        layout::unpack_count(load_acquire(domain_.mine().word(Region::kRowsReady, mate(local))), epoch_));
}

// Where the source's row lies at a holder, or -1.
std::int64_t RowPuller::row_at(const Source& source, std::int64_t row, int local) const {
  const int column = is_own(source) ? mate(local) : local;
  const std::int32_t index = source.index[row * source.step + column];
  return index < 0 ? -1 : source.first[static_cast<std::size_t>(local)] + index;
}

int RowPuller::blocked_by(const Source& source, std::int64_t row) {
  for (int local = 0; local < num_local_ranks_; ++local)
    if (row_at(source, row, local) >= holders_[static_cast<std::size_t>(local)].ready) return mate(local);
  if (!is_own(source)) return rails_->out(source.node).row(row) == nullptr ? source.rank : -1;
  for (int node = 0; rails_ != nullptr && node < num_nodes_; ++node) {
    const std::int32_t position = args_.handle.send_rdma_index.as<std::int32_t>()[row * num_nodes_ + node];
    if (position >= 0 && rails_->in(node).row(position) == nullptr) return rails_->peer(node);
  }
  return -1;
}

bool RowPuller::advance() {
  look_at_ready();
  bool any = false;
  for (Source& source : sources_) any |= advance(source);
  return any;
}

bool RowPuller::advance(Source& source) {
  const std::int64_t begin = source.done, limit = std::min(source.total, begin + kBatch);
  std::int64_t end = begin;
  while (end < limit && blocked_by(source, end) < 0) ++end;
  if (end == begin) return false;
  pool_.parallel_for(end - begin, kGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = begin + first; row < begin + last; ++row)
      is_own(source) ? sum_token(source, row) : collect(source, row);
  });
  publish_consumed(source, begin, end);
  source.done = end;
  return true;
}

void RowPuller::publish_consumed(Source& source, std::int64_t begin, std::int64_t end) {
  for (int local = 0; local < num_local_ranks_; ++local) {
    if (!holders_[static_cast<std::size_t>(local)].is_ring) continue;
    std::int64_t& consumed = source.consumed[static_cast<std::size_t>(local)];
    for (std::int64_t row = begin; row < end; ++row) consumed += row_at(source, row, local) >= 0;
    store_release(domain_.of(mate(local)).word(Region::kRowsConsumed, source.rank),
                  layout::pack_count(epoch_, static_cast<std::uint64_t>(consumed)));
    domain_.ring(mate(local));
  }
}

bool RowPuller::finished() const {
  return std::all_of(sources_.begin(), sources_.end(), [](const Source& one) { return one.done == one.total; });
}

// The rows of this node in rank order, and the sum of their weights on top of what is there.
int RowPuller::gather(const Source& source, std::int64_t row, const void** rows, float* weights) const {
  int num_rows = 0;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const std::int64_t at = row_at(source, row, local);
    if (at < 0) continue;
    const Holder& holder = holders_[static_cast<std::size_t>(local)];
    rows[num_rows++] = holder.x + at % holder.x_capacity * holder.x_stride;
    if (topk_ == 0) continue;
    const auto* theirs =
        reinterpret_cast<const float*>(holder.weights + at % holder.weight_capacity * holder.weight_stride);
    for (std::int64_t k = 0; k < topk_; ++k) weights[k] += theirs[k];
  }
  return num_rows;
}

// C3: rounded once, for the network.
void RowPuller::collect(const Source& source, std::int64_t row) {
  RowList rows(num_local_ranks_);
  RailSender& ring = rails_->out(source.node);
  char* slot = ring.row(row);
  auto* weights = reinterpret_cast<float*>(slot + rail_row_.topk_weights);
  std::fill_n(weights, topk_, 0.0f);
  const int num_rows = gather(source, row, rows.get(), weights);
  simd_ops().sum_rows(args_.x.dtype, rows.get(), num_rows, nullptr, nullptr, slot, hidden_);
  ring.filled(row);
}

// C5: biases, then the nodes in ascending order: this rank's own row by row, the others as the sums that came back.
void RowPuller::sum_token(const Source& source, std::int64_t token) {
  RowList list(num_local_ranks_ + num_nodes_);
  const void** rows = list.get();
  int num_rows = 0;
  float* weights = topk_ > 0 ? result_.combined_topk_weights.as<float>() + token * topk_ : nullptr;
  std::fill_n(weights, topk_, 0.0f);
  const std::int32_t* positions =
      rails_ != nullptr ? args_.handle.send_rdma_index.as<std::int32_t>() + token * num_nodes_ : nullptr;
  for (int node = 0; node < num_nodes_; ++node) {
    if (node == node_) {
      num_rows += gather(source, token, rows + num_rows, weights);
    } else if (positions[node] >= 0) {
      const char* sum = rails_->in(node).row(positions[node]);
      const auto* theirs = reinterpret_cast<const float*>(sum + rail_row_.topk_weights);
      for (std::int64_t k = 0; k < topk_; ++k) weights[k] += theirs[k];
      rows[num_rows++] = sum;
    }
  }
  const auto row_of = [&](const TensorView& view) -> char* {
    return view.defined() ? view.as<char>() + token * view.stride[0] * item_ : nullptr;
  };
  simd_ops().sum_rows(args_.x.dtype, rows, num_rows, row_of(args_.bias0), row_of(args_.bias1),
                      row_of(result_.combined_x.view), hidden_);
  for (int node = 0; positions != nullptr && node < num_nodes_; ++node)
    if (positions[node] >= 0) rails_->in(node).taken(positions[node]);
}

int RowPuller::first_missing() {
  look_at_ready();
  int blamed = -1;
  for (const Source& source : sources_) {
    if (source.done == source.total) continue;
    blamed = blocked_by(source, source.done);
    if (blamed < 0) return -1;
  }
  return blamed;
}

std::string RowPuller::describe(int peer) const {
  if (topology_.node_of(peer) != node_) return "expected its sums, or room for sums";
  const Holder& holder = holders_[static_cast<std::size_t>(topology_.local_of(peer))];
  return "expected more rows than the " + std::to_string(holder.ready) + " it has ready";
}

}  // namespace deep_moe::cpu
