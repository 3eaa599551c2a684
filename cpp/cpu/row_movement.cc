#include "cpu/row_movement.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cpu/copy.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Region;

constexpr std::int64_t kGrain = 16;   // rows a thread takes at least
constexpr std::int64_t kBatch = 512;  // rows between looks at the other sources

}  // namespace

RowMovement::RowMovement(Context context, const RowWriter& writer, const RowPlan& plan,
                         std::function<void(std::int64_t)> copy_out, std::int32_t* send_nvl_index)
    : domain_(context.domain),
      pool_(context.pool),
      rails_(context.rails),
      topology_(domain_.topology()),
      writer_(writer),
      plan_(plan),
      copy_out_(std::move(copy_out)),
      send_nvl_index_(send_nvl_index),
      rank_(domain_.rank()),
      num_ranks_(domain_.num_ranks()),
      node_(topology_.node_of(rank_)),
      num_local_ranks_(topology_.num_local_ranks()),
      num_nodes_(topology_.num_nodes()),
      rail_row_(writer.rail_row(num_local_ranks_)),
      window_end_(static_cast<std::size_t>(num_local_ranks_), 0) {
  sources_.push_back(make_source(rank_, node_, plan.num_tokens));
  std::int64_t rows = 0;
  for (int node = 0; node < num_nodes_; ++node) {
    if (node == node_) continue;
    sources_.push_back(make_source(rails_->peer(node), node, plan.rows_in[static_cast<std::size_t>(node)]));
    sources_.back().map_begin = rows;
    rows += sources_.back().total;
  }
  if (rails_ != nullptr) rails_->begin(rail_row_.stride, plan.rows_out, plan.rows_in);
}

RowMovement::Source RowMovement::make_source(int rank, int node, std::int64_t total) const {
  Source source{rank, node, total};
  source.stored.assign(static_cast<std::size_t>(num_local_ranks_), 0);
  source.waves = source.stored;
  for (int local = 0; local < num_local_ranks_; ++local) {
    std::int64_t first = 0;
    for (int earlier = 0; earlier < rank; ++earlier)
      first += (*plan_.counts)[static_cast<std::size_t>(earlier * num_ranks_ + mate(local))];
    source.first.push_back(first);
  }
  return source;
}

const Target& RowMovement::target(int local) const { return (*plan_.targets)[static_cast<std::size_t>(mate(local))]; }

void RowMovement::run() {
  const auto unfinished = [&] {
    for (const Source& source : sources_)
      if (source.done < source.total) return true;
    return drained_ < (*plan_.targets)[static_cast<std::size_t>(rank_)].num_waves;
  };
  for (Source& source : sources_) tell_rows_done(source);
  while (unfinished()) {
    look_at_windows();
    bool moved = false;
    for (Source& source : sources_) moved |= move(source);
    moved |= drain();
    if (moved) continue;
    domain_.wait(
        "dispatch/rows", plan_.epoch, [&] { return first_missing(); },
        [&](int) {
          return "expected rows or room for rows; wave " + std::to_string(drained_) + " has not arrived in full";
        });
  }
}

void RowMovement::look_at_windows() {
  for (int local = 0; local < num_local_ranks_; ++local) {
    std::int64_t& end = window_end_[static_cast<std::size_t>(local)];
    if (target(local).num_waves == 1) {
      end = std::numeric_limits<std::int64_t>::max();
      continue;
    }
    const auto drained = static_cast<std::int64_t>(
        layout::unpack_count(load_acquire(domain_.mine().word(Region::kWindow, mate(local))), plan_.epoch));
    end = (drained + 1) * target(local).block_rows;
  }
}

// Of a row that has arrived, or of a token.
std::int64_t RowMovement::final_index(const Source& source, std::int64_t row, int local) {
  std::int32_t position;
  if (is_own(source)) {
    position = plan_.send_index[row * num_ranks_ + mate(local)];
  } else {
    std::memcpy(&position, rails_->in(source.node).row(row) + rail_row_.positions + 4 * local, 4);
    if (position >= (*plan_.counts)[static_cast<std::size_t>(source.rank * num_ranks_ + mate(local))])
      throw Error("a row from rank " + std::to_string(source.rank) + " says that it is number " +
                  std::to_string(position) + " for rank " + std::to_string(mate(local)) +
                  ", which is more than were announced: the network has delivered it in part");
  }
  return position < 0 ? -1 : source.first[static_cast<std::size_t>(local)] + position;
}

int RowMovement::blocked_by(const Source& source, std::int64_t row) {
  if (!is_own(source) && rails_->in(source.node).row(row) == nullptr) return source.rank;
  for (int local = 0; local < num_local_ranks_; ++local)
    if (final_index(source, row, local) >= window_end_[static_cast<std::size_t>(local)]) return mate(local);
  if (!is_own(source) || rails_ == nullptr) return -1;
  for (int node = 0; node < num_nodes_; ++node) {
    const std::int32_t position = plan_.send_rdma_index[row * num_nodes_ + node];
    if (position >= 0 && rails_->out(node).row(position) == nullptr) return rails_->peer(node);
  }
  return -1;
}

bool RowMovement::move(Source& source) {
  const std::int64_t begin = source.done, limit = std::min(source.total, begin + kBatch);
  std::int64_t end = begin;
  std::vector<std::int64_t>& stored = source.stored;
  for (; end < limit && blocked_by(source, end) < 0; ++end) {
    for (int local = 0; local < num_local_ranks_; ++local)
      stored[static_cast<std::size_t>(local)] += final_index(source, end, local) >= 0;
  }
  if (end == begin) return false;
  pool_.parallel_for(end - begin, kGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = begin + first; row < begin + last; ++row)
      is_own(source) ? send(source, row) : forward(source, row);
    finish_streaming();
  });
  source.done = end;
  tell_rows_done(source);
  return true;
}

// D1, D2, and with the last row of a chunk D4.
void RowMovement::send(const Source& source, std::int64_t token) {
  const Row row = writer_.row_of(token);
  for (int local = 0; local < num_local_ranks_; ++local) {
    if (const std::int64_t index = final_index(source, token, local); index >= 0)
      writer_.store(target(local), row, index % target(local).block_rows, plan_.streaming);
  }
  for (int node = 0; rails_ != nullptr && node < num_nodes_; ++node) {
    const std::int32_t position = plan_.send_rdma_index[token * num_nodes_ + node];
    if (position < 0) continue;
    char* slot = rails_->out(node).row(position);
    writer_.pack(slot, rail_row_, row);
    for (int local = 0; local < num_local_ranks_; ++local)
      std::memcpy(slot + rail_row_.positions + 4 * local,
                  plan_.send_index + token * num_ranks_ + topology_.rank_at(node, local), 4);
    rails_->out(node).filled(position);
  }
}

// D6, and with the last row of a chunk D7.
void RowMovement::forward(const Source& source, std::int64_t position) {
  RailReceiver& ring = rails_->in(source.node);
  const Row row = writer_.unpack(ring.row(position), rail_row_);
  for (int local = 0; local < num_local_ranks_; ++local) {
    const std::int64_t index = final_index(source, position, local);
    if (index >= 0) writer_.store(target(local), row, index % target(local).block_rows, plan_.streaming);
    if (send_nvl_index_ != nullptr)
      send_nvl_index_[(source.map_begin + position) * num_local_ranks_ + local] = static_cast<std::int32_t>(index);
  }
  ring.taken(position);
}

// D8, a source and a wave at a time: on behalf of the source, whose rows nobody else stores here.
void RowMovement::tell_rows_done(Source& source) {
  for (int local = 0; local < num_local_ranks_; ++local) {
    const auto at = static_cast<std::size_t>(local);
    const Target& there = target(local);
    const std::int64_t all = (*plan_.counts)[static_cast<std::size_t>(source.rank * num_ranks_ + mate(local))];
    const std::int64_t next = source.first[at] + source.stored[at];
    const std::int64_t waves = source.stored[at] == all ? there.num_waves : next / there.block_rows;
    if (waves == source.waves[at]) continue;
    source.waves[at] = waves;
    store_release(domain_.of(mate(local)).word(Region::kRowsDone, source.rank),
                  layout::pack_count(plan_.epoch, static_cast<std::uint64_t>(waves)));
    domain_.ring(mate(local));
  }
}

int RowMovement::missing_source() {
  for (int src = 0; src < num_ranks_; ++src) {
    const std::uint64_t word = load_acquire(domain_.mine().word(Region::kRowsDone, src));
    if (static_cast<std::int64_t>(layout::unpack_count(word, plan_.epoch)) < drained_ + 1) return src;
  }
  return -1;
}

bool RowMovement::drain() {
  const Target& mine = (*plan_.targets)[static_cast<std::size_t>(rank_)];
  if (drained_ >= mine.num_waves || missing_source() >= 0) return false;
  if (mine.num_waves > 1) copy_out_(drained_);
  ++drained_;
  for (int local = 0; local < num_local_ranks_; ++local) {
    store_release(domain_.of(mate(local)).word(Region::kWindow, rank_),
                  layout::pack_count(plan_.epoch, static_cast<std::uint64_t>(drained_)));
    domain_.ring(mate(local));
  }
  return true;
}

int RowMovement::first_missing() {
  look_at_windows();
  int blamed = -1;
  for (const Source& source : sources_) {
    if (source.done == source.total) continue;
    blamed = blocked_by(source, source.done);
    if (blamed < 0) return -1;
  }
  if (drained_ < (*plan_.targets)[static_cast<std::size_t>(rank_)].num_waves) {
    const int src = missing_source();
    if (src < 0) return -1;
    // Its rows come through the rank of this node that is on its rail.
    const int through = mate(topology_.local_of(src));
    if (blamed < 0 || blamed == rank_) blamed = through != rank_ ? through : src;
  }
  return blamed;
}

}  // namespace deep_moe::cpu
