// High-throughput dispatch. The steps and their order are those of the GPU protocol:
//  1. route: counts and row indices from topk_idx (or from the handle)
//  2. notify: counts and the offered block go to every peer; then all ranks know all counts, so every row's final index
//  3. regrow: ranks whose offer was too small publish another one; what still does not fit goes in waves
//  4. send: each row is read once and stored at its final index at every destination; one flag a peer. Between nodes it
//     crosses the network once a node, and a rank there stores it (row_movement.hpp)
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/copy.hpp"
#include "cpu/dispatch_handle.hpp"
#include "cpu/prepared_call.hpp"
#include "cpu/route.hpp"
#include "cpu/row_movement.hpp"
#include "cpu/row_writer.hpp"
#include "layout/handle.hpp"
#include "layout/rows.hpp"
#include "runtime/text.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Place;
using layout::RecvBlock;
using layout::Region;

constexpr std::int64_t kSendGrain = 64;  // tokens a thread takes at least

class Dispatch {
 public:
  Dispatch(Context context, const DispatchArgs& args)
      : context_(context),
        domain_(context.domain),
        pool_(context.pool),
        args_(args),
        topology_(domain_.topology()),
        rank_(domain_.rank()),
        num_ranks_(domain_.num_ranks()),
        cached_(args.handle != nullptr),
        num_tokens_(args.x.data.shape[0]),
        num_experts_(cached_                   ? 0
                     : args.topk_idx.defined() ? args.num_experts
                                               : args.num_tokens_per_expert.numel()),
        blocks_(static_cast<int>(num_experts_), num_ranks_),
        worst_rows_(args.num_worst_tokens),
        writer_(args),
        format_(writer_.format()) {
    if (cached_) {
      const std::int64_t* meta = args.handle->meta.as<std::int64_t>();
      const bool padded = meta[layout::kMetaNumRecv] != meta[layout::kMetaNumArrived];
      worst_rows_ = padded ? meta[layout::kMetaNumRecv] : 0;
    }
  }

  // Before anything is announced: what fails here is a refusal.
  void prepare() {
    if (context_.rails != nullptr)
      context_.rails->check_fits("dispatch", writer_.rail_row(topology_.num_local_ranks()).stride);
    if (cached_) {
      read_handle();
    } else {
      route();
    }
    std::string reason;
    if (worst_rows_ > 0) {
      const std::size_t bytes = RecvBlock(format_, worst_rows_).total;
      block_ = domain_.heap().allocate_or_grow(bytes, &reason);
      if (!block_)
        throw BufferTooSmallError("num_worst_tokens=" + std::to_string(worst_rows_) + " needs " +
                                  std::to_string(bytes) + " bytes of heap: " + reason);
      place_ = place_of(block_, worst_rows_);
      place_.flags |= layout::kPlaceHard;
    } else if (cached_) {
      // The counts are known: take what they need at once.
      take_for(total_of(rank_), &reason);
    } else {
      block_ = domain_.heap().allocate_largest(std::numeric_limits<std::int64_t>::max());
      place_ = place_of(block_, RecvBlock::capacity(format_, static_cast<std::int64_t>(block_.bytes)));
    }
  }

  DispatchResult run() {
    try {
      notify();
      regrow();
      aim();
      if (all_fit_ && context_.rails == nullptr) {
        send_all();
      } else {
        move_rows();
      }
      return result();
    } catch (const ArgumentError&) {
      give_back();
      throw;
    } catch (const BufferTooSmallError&) {
      give_back();
      throw;
    } catch (const PeerRefusedError&) {
      give_back();
      throw;
    } catch (const CallMismatchError&) {
      give_back();
      throw;
    } catch (...) {
      domain_.heap().quarantine(block_);  // a peer that sleeps may still write there
      throw;
    }
  }

  void give_back() { domain_.heap().free(block_); }

 private:
  std::int64_t count(int src, int dst) const { return counts_[static_cast<std::size_t>(src) * num_ranks_ + dst]; }
  std::int64_t total_of(int dst) const {
    std::int64_t total = 0;
    for (int src = 0; src < num_ranks_; ++src) total += count(src, dst);
    return total;
  }

  Place place_of(const Block& block, std::int64_t capacity) const {
    Place place;
    place.segment = block.segment;
    place.offset = static_cast<std::int64_t>(block.offset);
    place.capacity = block ? capacity : 0;
    place.flags = writer_.column_scales() ? layout::kPlaceColumnScales : 0;
    return place;
  }

  // A block for `rows` rows, or for as many as can be had.
  void take_for(std::int64_t rows, std::string* reason) {
    const std::size_t bytes = RecvBlock(format_, rows).total;
    block_ = domain_.heap().allocate_most(bytes, reason);
    const bool fits = block_ && block_.bytes >= bytes;
    place_ = place_of(block_, fits ? rows : RecvBlock::capacity(format_, static_cast<std::int64_t>(block_.bytes)));
  }

  void route() {
    handle_.allocate(num_tokens_, topology_);
    std::int32_t* send_index = handle_.send_index();
    send_index_ = send_index;
    route_ = args_.topk_idx.defined() ? route_tokens(args_.topk_idx, blocks_, send_index, handle_.is_token_in_rank())
                                      : route_tokens(args_.is_token_in_rank, args_.num_tokens_per_expert, num_ranks_,
                                                     send_index, handle_.is_token_in_rank());
    if (context_.rails == nullptr) return;
    plan_.send_rdma_index = handle_.send_rdma_index();
    plan_.rows_out = route_nodes(topology_, rank_, num_tokens_, send_index, handle_.send_rdma_index());
  }

  void read_handle() {
    send_index_ = args_.handle->send_index.as<std::int32_t>();
    if (context_.rails != nullptr) read_rails();
    const std::int32_t* prefix = args_.handle->rank_prefix_matrix.as<std::int32_t>();
    counts_.resize(static_cast<std::size_t>(num_ranks_) * num_ranks_);
    for (int src = 0; src < num_ranks_; ++src) {
      for (int dst = 0; dst < num_ranks_; ++dst) {
        const std::int64_t at = static_cast<std::int64_t>(src) * num_ranks_ + dst;
        counts_[at] = prefix[at] - (src > 0 ? prefix[at - num_ranks_] : 0);
      }
    }
  }

  void read_rails() {
    const int num_nodes = topology_.num_nodes();
    plan_.send_rdma_index = args_.handle->send_rdma_index.as<std::int32_t>();
    plan_.rows_out.assign(static_cast<std::size_t>(num_nodes), 0);
    for (std::int64_t at = 0; at < num_tokens_ * num_nodes; ++at)
      plan_.rows_out[static_cast<std::size_t>(at % num_nodes)] += plan_.send_rdma_index[at] >= 0;
    const std::int32_t* prefix = args_.handle->recv_rdma_rank_prefix_sum.as<std::int32_t>();
    for (int node = 0; node < num_nodes; ++node)
      plan_.rows_in.push_back(prefix[node] - (node > 0 ? prefix[node - 1] : 0));
  }

  // Step 2. The counts are written before the announcement, which is their flag.
  void notify() {
    const std::uint64_t epoch = domain_.begin_call();
    if (!cached_) {
      for (int peer = 0; peer < num_ranks_; ++peer) {
        std::memcpy(domain_.of(peer).rank_counts(epoch, rank_), route_.rank_counts.data(),
                    sizeof(std::int32_t) * num_ranks_);
        std::memcpy(domain_.of(peer).expert_counts(epoch, rank_),
                    route_.expert_counts.data() + blocks_.first_expert(peer),
                    sizeof(std::int32_t) * blocks_.num_local_experts(peer));
        if (context_.rails != nullptr)
          domain_.of(peer).node_rows(epoch, rank_) =
              static_cast<std::int32_t>(plan_.rows_out[static_cast<std::size_t>(topology_.node_of(peer))]);
      }
    }
    layout::Announce words{};
    words.signature = signature(args_);
    words.num_tokens = num_tokens_;
    words.place = place_;
    epoch_ = domain_.announce(words);
    domain_.gather_announcements("dispatch/notify", epoch_);
    places_.resize(num_ranks_);
    if (!cached_) counts_.resize(static_cast<std::size_t>(num_ranks_) * num_ranks_);
    for (int src = 0; src < num_ranks_; ++src) {
      places_[src] = domain_.mine().announce(epoch_, src).place;
      if (cached_) continue;
      const std::int32_t* row = domain_.mine().rank_counts(epoch_, src);
      std::copy(row, row + num_ranks_, counts_.begin() + static_cast<std::ptrdiff_t>(src) * num_ranks_);
    }
    if (cached_ || context_.rails == nullptr) return;
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      const bool own = node == topology_.node_of(rank_);
      plan_.rows_in.push_back(own ? 0 : domain_.mine().node_rows(epoch_, context_.rails->peer(node)));
    }
  }

  // Step 3. Every rank evaluates the same predicate on the gathered words, so all of them know who publishes again.
  void regrow() {
    std::vector<int> late;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (total_of(peer) <= places_[peer].capacity) continue;
      if (places_[peer].flags & layout::kPlaceHard)
        throw ArgumentError("num_worst_tokens: rank " + std::to_string(peer) + " allows " +
                            std::to_string(places_[peer].capacity) + " rows and " + std::to_string(total_of(peer)) +
                            " arrive there; nothing was sent");
      late.push_back(peer);
    }
    if (std::find(late.begin(), late.end(), rank_) != late.end()) publish_again();
    if (late.empty()) return;
    domain_.wait(
        "dispatch/regrow", epoch_,
        [&] {
          for (const int peer : late)
            if (load_acquire(domain_.mine().regrow(epoch_, peer).epoch) != epoch_) return peer;
          return -1;
        },
        [](int) { return std::string("expected its larger block"); });
    for (const int peer : late) {
      const layout::Regrow& words = domain_.mine().regrow(epoch_, peer);
      places_[peer] = words.place;
      if (words.place.capacity < 1)
        throw BufferTooSmallError("rank " + std::to_string(peer) + " has no heap for the " +
                                  std::to_string(total_of(peer)) +
                                  " rows that arrive there: " + std::string(words.reason, words.num_reason_bytes));
    }
  }

  void publish_again() {
    domain_.heap().free(block_);
    std::string reason;
    take_for(total_of(rank_), &reason);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      layout::Regrow& words = domain_.of(peer).regrow(epoch_, rank_);
      words.place = place_;
      words.num_reason_bytes = copy_text(reason, words.reason, sizeof(words.reason));
      store_release(words.epoch, epoch_);
      domain_.ring(peer);
    }
  }

  // From counts and places to addresses, of the ranks of this node.
  void aim() {
    targets_.resize(num_ranks_);
    all_fit_ = true;
    std::int64_t bytes_sent = 0;
    for (int dst = 0; dst < num_ranks_; ++dst) {
      if (topology_.node_of(dst) != topology_.node_of(rank_)) continue;
      Target& target = targets_[dst];
      const Place& place = places_[dst];
      target.total_rows = total_of(dst);
      target.num_rows = count(rank_, dst);
      for (int src = 0; src < rank_; ++src) target.first_index += count(src, dst);
      const bool fits = target.total_rows <= place.capacity;
      target.block_rows = fits && !(place.flags & layout::kPlaceHard) ? target.total_rows : place.capacity;
      target.num_waves = fits ? 1 : (target.total_rows + place.capacity - 1) / place.capacity;
      target.block = RecvBlock(format_, target.block_rows);
      target.column_scales = (place.flags & layout::kPlaceColumnScales) != 0;
      target.first_expert = blocks_.first_expert(dst);
      target.num_local_experts = blocks_.num_local_experts(dst);
      all_fit_ = all_fit_ && fits;
      bytes_sent += target.num_rows * format_.row_bytes;
      if (target.total_rows > 0)
        target.base = domain_.address(dst, place.segment, static_cast<std::size_t>(place.offset));
    }
    streaming_ = bytes_sent > kStreamingBytes;
    if (targets_[rank_].num_waves == 1) domain_.heap().shrink(block_, targets_[rank_].block.total);
  }

  void flag_rows_done(int dst, std::int64_t waves) {
    store_release(domain_.of(dst).word(Region::kRowsDone, rank_),
                  layout::pack_count(epoch_, static_cast<std::uint64_t>(waves)));
    domain_.ring(dst);
  }
  std::int64_t rows_done(int src) {
    return static_cast<std::int64_t>(
        layout::unpack_count(load_acquire(domain_.mine().word(Region::kRowsDone, src)), epoch_));
  }

  // Step 4 where everything fits.
  void send_all() {
    pool_.parallel_for(num_tokens_, kSendGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int32_t* index = send_index_ + token * num_ranks_;
        const Row row = writer_.row_of(token);
        for (int dst = 0; dst < num_ranks_; ++dst) {
          if (index[dst] >= 0) writer_.store(targets_[dst], row, targets_[dst].first_index + index[dst], streaming_);
        }
      }
      finish_streaming();
    });
    for (int dst = 0; dst < num_ranks_; ++dst) flag_rows_done(dst, 1);
    domain_.wait(
        "dispatch/rows", epoch_,
        [&] {
          for (int src = 0; src < num_ranks_; ++src)
            if (rows_done(src) < 1) return src;
          return -1;
        },
        [&](int src) { return "expected its flag for " + std::to_string(count(src, rank_)) + " rows, saw none"; });
  }

  // Step 4 between nodes, and where some block is a window over what arrives, which its owner copies out to ordinary
  // memory and opens again.
  void move_rows() {
    if (targets_[rank_].num_waves > 1) {
      domain_.log_once(
          "receives " + std::to_string(targets_[rank_].total_rows) + " rows in " +
          std::to_string(targets_[rank_].num_waves) +
          " waves, which is slow: its heap cannot grow (raise num_nvl_bytes or DEEP_MOE_MAX_HEAP_BYTES, or "
          "free received tensors)");
      make_spill_tensors();
    }
    plan_.epoch = epoch_;
    plan_.targets = &targets_;
    plan_.counts = &counts_;
    plan_.num_tokens = num_tokens_;
    plan_.send_index = send_index_;
    plan_.streaming = streaming_;
    std::int32_t* map = context_.rails != nullptr && !cached_ ? handle_.allocate_rows_in(plan_.rows_in) : nullptr;
    RowMovement(context_, writer_, plan_, [this](std::int64_t wave) { copy_out(wave); }, map).run();
  }

  void make_spill_tensors() {
    const std::int64_t rows = targets_[rank_].total_rows;
    spill_ = make_host_tensor(DType::kUInt8, {static_cast<std::int64_t>(RecvBlock(format_, rows).total)});
  }

  void copy_out(std::int64_t wave) {
    const Target& mine = targets_[rank_];
    const RecvBlock whole(format_, mine.total_rows);
    const std::int64_t low = wave * mine.block_rows;
    const std::int64_t rows = std::min(mine.block_rows, mine.total_rows - low);
    char* out = spill_.as<char>();
    const auto copy = [&](std::size_t to, std::size_t from, std::int64_t row_bytes) {
      std::memcpy(out + to + low * row_bytes, block_.ptr + from, static_cast<std::size_t>(rows * row_bytes));
    };
    copy(whole.x, mine.block.x, format_.row_bytes);
    copy(whole.topk_idx, mine.block.topk_idx, format_.topk * format_.idx_bytes);
    copy(whole.topk_weights, mine.block.topk_weights, format_.topk * format_.weight_bytes);
    copy(whole.src_idx, mine.block.src_idx, 4);
    if (!writer_.column_scales()) return copy(whole.scales, mine.block.scales, format_.scale_bytes);
    for (std::int64_t s = 0; s < writer_.num_scales(); ++s) {
      std::memcpy(out + whole.scales + (s * mine.total_rows + low) * writer_.scale_item(),
                  block_.ptr + mine.block.scales + s * mine.block_rows * writer_.scale_item(),
                  static_cast<std::size_t>(rows * writer_.scale_item()));
    }
  }

  DispatchResult result() {
    const Target& mine = targets_[rank_];
    const bool spilled = mine.num_waves > 1;
    const std::int64_t arrived = mine.total_rows;
    const std::int64_t rows = worst_rows_ > 0 ? worst_rows_ : arrived;
    const RecvBlock parts(format_, rows);
    if (worst_rows_ > 0) fill_tail(parts, arrived, rows);
    std::vector<Block> blocks;
    if (spilled || parts.total == 0) {
      domain_.heap().free(block_);
    } else {
      blocks = domain_.heap().split(block_, {parts.x, parts.scales, parts.topk_idx, parts.topk_weights, parts.src_idx});
    }
    static char nothing;
    const auto tensor = [&](int part, std::size_t offset, DType dtype, std::initializer_list<std::int64_t> shape) {
      Tensor out;
      out.view = TensorView::contiguous(&nothing, dtype, shape);
      if (parts.total == 0) return out;
      out.view.data = (spilled ? spill_.as<char>() : block_.ptr) + offset;
      out.owner = spilled ? spill_.owner : domain_.heap().own(blocks[static_cast<std::size_t>(part)]);
      return out;
    };
    DispatchResult result;
    result.recv_x.data = tensor(0, parts.x, args_.x.data.dtype, {rows, args_.x.data.shape[1]});
    const TensorView& scales = args_.x.scales;
    if (scales.defined()) {
      Tensor& out = result.recv_x.scales;
      out = scales.num_dims == 2 ? tensor(1, parts.scales, scales.dtype, {rows, writer_.num_scales()})
                                 : tensor(1, parts.scales, scales.dtype, {rows});
      if (writer_.column_scales()) {
        out.view.stride[0] = 1;
        out.view.stride[1] = rows;
      }
    }
    Tensor src_idx = tensor(4, parts.src_idx, DType::kInt32, {rows});
    if (cached_) return result;
    if (format_.topk > 0) {
      result.recv_topk_idx = tensor(2, parts.topk_idx, args_.topk_idx.dtype, {rows, format_.topk});
      if (format_.weight_bytes > 0)
        result.recv_topk_weights = tensor(3, parts.topk_weights, DType::kFloat32, {rows, format_.topk});
    }
    if (worst_rows_ == 0) count_experts(&result.num_recv_tokens_per_expert);
    result.handle = handle_.finish({rows, arrived, num_experts_, format_.topk, epoch_}, counts_, std::move(src_idx));
    return result;
  }

  void fill_tail(const RecvBlock& parts, std::int64_t arrived, std::int64_t rows) const {
    const auto fill = [&](std::size_t offset, std::int64_t row_bytes, int byte) {
      std::memset(block_.ptr + offset + arrived * row_bytes, byte,
                  static_cast<std::size_t>((rows - arrived) * row_bytes));
    };
    fill(parts.topk_idx, format_.topk * format_.idx_bytes, 0xff);
    fill(parts.topk_weights, format_.topk * format_.weight_bytes, 0);
    fill(parts.src_idx, 4, 0xff);
  }

  void count_experts(std::vector<std::int64_t>* list) {
    const int num_local = blocks_.num_local_experts(rank_);
    list->assign(static_cast<std::size_t>(num_local), 0);
    for (int src = 0; src < num_ranks_; ++src) {
      const std::int32_t* counts = domain_.mine().expert_counts(epoch_, src);
      for (int expert = 0; expert < num_local; ++expert) (*list)[expert] += counts[expert];
    }
    const std::int64_t alignment = args_.expert_alignment;
    for (std::int64_t& entry : *list) entry = (entry + alignment - 1) / alignment * alignment;
  }

  const Context context_;
  Domain& domain_;
  WorkerPool& pool_;
  const DispatchArgs& args_;
  const Topology& topology_;
  const int rank_, num_ranks_;
  const bool cached_;
  const std::int64_t num_tokens_, num_experts_;
  const layout::ExpertBlocks blocks_;
  std::int64_t worst_rows_;  // rows handed out whatever arrives; 0: as many as arrive
  const RowWriter writer_;
  const layout::RowFormat format_;

  std::uint64_t epoch_ = 0;
  Route route_;
  Block block_;
  Place place_;
  std::vector<Place> places_;         // by rank
  std::vector<std::int64_t> counts_;  // [src][dst]
  std::vector<Target> targets_;
  bool all_fit_ = true;
  bool streaming_ = false;
  Tensor spill_;  // received rows where they came in waves
  RowPlan plan_;

  DispatchHandleBuilder handle_;
  const std::int32_t* send_index_ = nullptr;  // [T, R]
};

}  // namespace

DispatchResult dispatch(Context context, const DispatchArgs& args) { return run_prepared<Dispatch>(context, args); }

}  // namespace deep_moe::cpu
