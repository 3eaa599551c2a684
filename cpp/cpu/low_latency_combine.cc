// Low-latency combine, in two forms.
//  - Pre-reduced: the experts' rank sums the rows of its experts with their weights and sends one row for each row that
//    it received. The weights came with the dispatch; else their owner sends them ahead, and the call has no hook.
//  - By expert: one row for each (token, distinct expert), summed by the owner. A send half that must not wait for a
//    peer does this where the weights did not come with the dispatch.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "cpu/logfmt.hpp"
#include "cpu/low_latency_call.hpp"
#include "cpu/route.hpp"
#include "cpu/simd.hpp"
#include "layout/handle.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Region;

// Sizes of one call, and where its rows lie.
struct Shape {
  int rank, num_ranks;
  layout::ExpertBlocks blocks;
  std::int64_t max_tokens, num_tokens, topk, hidden;
  DType dtype;
  std::int64_t item;       // bytes of one element
  std::int64_t row_bytes;  // as it travels
  bool logfmt, by_expert, weights_known;
  bool own_parts;             // rows by expert lie in the writer's part too
  std::int64_t max_distinct;  // experts that one row may have on one rank
  layout::LowLatencySlot slot;

  Shape(const Domain& domain, const LowLatencyCombineArgs& args, const layout::CallSignature& signature)
      : rank(domain.rank()),
        num_ranks(domain.num_ranks()),
        blocks(static_cast<int>(signature.num_experts), num_ranks),
        max_tokens(signature.max_tokens),
        num_tokens(args.topk_idx.shape[0]),
        topk(args.topk_idx.shape[1]),
        hidden(args.x.shape[2]),
        dtype(args.x.dtype),
        item(static_cast<std::int64_t>(dtype_bytes(dtype))),
        row_bytes(signature.row_bytes),
        logfmt(args.use_logfmt),
        by_expert((signature.flags & kFlagByExpert) != 0),
        weights_known((signature.flags & kFlagWeights) != 0),
        own_parts(domain.options().enable_shrink),
        max_distinct(std::min<std::int64_t>(topk, blocks.max_local_experts())),
        slot(num_ranks, max_tokens, topk, 0, 0, row_bytes) {}

  std::size_t slot_bytes() const {
    if (!by_expert || !own_parts) return slot.total;
    const std::size_t rows = static_cast<std::size_t>(max_tokens * max_distinct);
    return layout::align_up(slot.combine_row_stride * rows, layout::kAlign) * static_cast<std::size_t>(num_ranks);
  }
  // In the owner's slot: the result for row `row` of (owner -> writer).
  char* reduced_row(const SlotUse& use, int owner, int writer, std::int64_t row) const {
    return use.part(owner, writer) + slot.combine_row_stride * static_cast<std::size_t>(row);
  }
  // The same for one expert of it: the `nth` distinct one, which is entry (token, k) of the owner's topk_idx.
  char* expert_row(const SlotUse& use, int owner, int writer, std::int64_t row, std::int64_t nth, std::int64_t token,
                   std::int64_t k) const {
    if (own_parts) return reduced_row(use, owner, writer, row * max_distinct + nth);
    return use.bases[owner] + slot.combine_row_stride * static_cast<std::size_t>(token * topk + k);
  }
  // In the holder's slot: the owner's weights [K] for row `row` of (owner -> holder).
  char* weights_ahead(const SlotUse& use, int holder, int owner, std::int64_t row) const {
    return use.part(holder, owner) + slot.weights_ahead + 4 * static_cast<std::size_t>(row * topk);
  }
};

// The weight of entry k of a row: the sum over all the entries like it, in order.
template <typename Id>
float summed_weight(const Id* ids, const float* weights, std::int64_t topk, std::int64_t k) {
  float sum = 0.0f;
  for (std::int64_t other = k; other < topk; ++other)
    if (ids[other] == ids[k]) sum += weights[other];
  return sum;
}

template <typename Id>
bool is_first(const Id* ids, std::int64_t k) {
  for (std::int64_t earlier = 0; earlier < k; ++earlier)
    if (ids[earlier] == ids[k]) return false;
  return ids[k] >= 0;
}

// The rank of the experts: sends their results to the owners of the tokens.
class Holder {
 public:
  Holder(LowLatencyContext& context, const LowLatencyCombineArgs& args, const Shape& shape, const SlotUse& use)
      : context_(context),
        x_(args.x),
        positions_(args.handle.recv_pos.as<std::int32_t>()),
        tokens_(args.handle.src_info.as<std::int32_t>()),
        known_weights_(args.handle.recv_weights.as<float>()),
        shape_(shape),
        use_(use) {}

  void send(int owner, std::int64_t num_rows) {
    context_.base.pool.parallel_for(num_rows, row_grain(shape_.row_bytes), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        if (shape_.by_expert)
          send_by_expert(owner, row);
        else
          send_reduced(owner, row);
      }
    });
    post_arrival(context_, use_, Region::kArrival, owner, num_rows);
  }

  // Rows that came from `owner`: they are in front, and each has an expert here.
  std::int64_t num_rows(int owner) const {
    std::int64_t row = 0;
    for (; row < shape_.max_tokens; ++row) {
      const std::int32_t* const at = positions_ + routing_index(owner, row);
      bool any = false;
      for (std::int64_t k = 0; k < shape_.topk; ++k) any = any || at[k] >= 0;
      if (!any) break;
    }
    return row;
  }

 private:
  std::int64_t routing_index(int owner, std::int64_t row) const {
    return (owner * shape_.max_tokens + row) * shape_.topk;
  }
  const char* x_row(std::int32_t position) const {
    const std::int64_t rows = x_.shape[1];
    return static_cast<const char*>(x_.data) +
           (position / rows * x_.stride[0] + position % rows * x_.stride[1]) * shape_.item;
  }

  void send_by_expert(int owner, std::int64_t row) const {
    const std::int32_t* const at = positions_ + routing_index(owner, row);
    std::int64_t nth = 0;
    for (std::int64_t k = 0; k < shape_.topk; ++k) {
      if (!is_first(at, k)) continue;
      char* const to = shape_.expert_row(use_, owner, shape_.rank, row, nth++, tokens_[at[k]], k);
      if (shape_.logfmt)
        logfmt_encode(shape_.dtype, x_row(at[k]), shape_.hidden, reinterpret_cast<std::uint8_t*>(to));
      else
        std::memcpy(to, x_row(at[k]), static_cast<std::size_t>(shape_.row_bytes));
    }
  }

  void send_reduced(int owner, std::int64_t row) const {
    const std::int32_t* const at = positions_ + routing_index(owner, row);
    float row_weights[layout::kMaxTopk];
    const void* from = known_weights_ + routing_index(owner, row);
    if (!shape_.weights_known) from = shape_.weights_ahead(use_, shape_.rank, owner, row);
    std::memcpy(row_weights, from, 4 * static_cast<std::size_t>(shape_.topk));
    const void* rows[layout::kMaxTopk];
    float weights[layout::kMaxTopk];
    int count = 0;
    for (std::int64_t k = 0; k < shape_.topk; ++k) {
      if (!is_first(at, k)) continue;
      weights[count] = summed_weight(at, row_weights, shape_.topk, k);
      rows[count++] = x_row(at[k]);
    }
    char* const to = shape_.reduced_row(use_, owner, shape_.rank, row);
    if (!shape_.logfmt) {
      simd_ops().weighted_sum_rows(shape_.dtype, rows, weights, count, to, shape_.hidden);
      return;
    }
    char sum[kLogfmtBlock * sizeof(float)];
    for (std::int64_t block = 0; block < shape_.hidden / kLogfmtBlock; ++block) {
      simd_ops().weighted_sum_rows(shape_.dtype, rows, weights, count, sum, kLogfmtBlock);
      logfmt_encode(shape_.dtype, sum, kLogfmtBlock, reinterpret_cast<std::uint8_t*>(to) + block * kLogfmtBlockBytes);
      for (int i = 0; i < count; ++i) rows[i] = static_cast<const char*>(rows[i]) + kLogfmtBlock * shape_.item;
    }
  }

  LowLatencyContext& context_;
  const TensorView x_;
  const std::int32_t* const positions_;
  const std::int32_t* const tokens_;
  const float* const known_weights_;
  const Shape& shape_;
  const SlotUse& use_;
};

// The owner of the tokens: sums what the holders of their experts sent. Keeps what it needs of the caller's ids and
// weights, and the result; not `out` or the statistics.
class Owner {
 public:
  Owner(const LowLatencyCombineArgs& args, const Shape& shape, const SlotUse& use, const Tensor& result)
      : shape_(shape),
        use_(use),
        plan_(args.topk_idx, shape.blocks),
        result_(result),
        wait_stats_(args.wait_recv_cost_stats.as<std::int64_t>()) {
    if (shape.by_expert) keep_terms(args);
  }

  void send_weights(LowLatencyContext& context, const TensorView& topk_weights) const {
    for (std::int64_t token = 0; token < shape_.num_tokens; ++token) {
      for (std::int64_t i = plan_.begins[token]; i < plan_.begins[token + 1]; ++i) {
        const auto [holder, row] = plan_.entries[i];
        if (use_.bases[holder] == nullptr) continue;
        std::memcpy(shape_.weights_ahead(use_, holder, shape_.rank, row),
                    topk_weights.as<float>() + token * topk_weights.stride[0],
                    4 * static_cast<std::size_t>(shape_.topk));
      }
    }
    for (int holder = 0; holder < shape_.num_ranks; ++holder)
      if (use_.bases[holder] != nullptr)
        post_arrival(context, use_, Region::kWeightArrival, holder, plan_.counts[holder]);
  }

  void receive(LowLatencyContext& context) {
    std::vector<std::int64_t> arrived;  // by holder: rows
    for (int holder = 0; holder < shape_.num_ranks; ++holder)
      arrived.push_back(
          await_arrival(context, use_, Region::kArrival, holder, "low_latency_combine/receive", wait_stats_));
    context.base.pool.parallel_for(shape_.num_tokens, row_grain(shape_.row_bytes),
                                   [&](std::int64_t begin, std::int64_t end) {
                                     for (std::int64_t token = begin; token < end; ++token) sum(token, arrived);
                                   });
  }

 private:
  // One distinct expert of a row, by the entry of the plan that it belongs to.
  struct Term {
    std::int32_t k;
    float weight;
  };

  void keep_terms(const LowLatencyCombineArgs& args) {
    std::int64_t ids[layout::kMaxTopk];
    for (std::int64_t token = 0; token < shape_.num_tokens; ++token) {
      for (std::int64_t k = 0; k < shape_.topk; ++k) ids[k] = topk_id(args.topk_idx, token, k);
      const float* const weights = args.topk_weights.as<float>() + token * args.topk_weights.stride[0];
      for (std::int64_t i = plan_.begins[token]; i < plan_.begins[token + 1]; ++i) {
        term_begins_.push_back(static_cast<std::int64_t>(terms_.size()));
        for (std::int64_t k = 0; k < shape_.topk; ++k) {
          if (!is_first(ids, k) || shape_.blocks.rank_of(static_cast<int>(ids[k])) != plan_.entries[i].rank) continue;
          terms_.push_back({static_cast<std::int32_t>(k), summed_weight(ids, weights, shape_.topk, k)});
        }
      }
    }
    term_begins_.push_back(static_cast<std::int64_t>(terms_.size()));
  }

  void sum(std::int64_t token, const std::vector<std::int64_t>& arrived) const {
    const void* rows[layout::kMaxTopk];
    float weights[layout::kMaxTopk];
    int count = 0;
    for (std::int64_t i = plan_.begins[token]; i < plan_.begins[token + 1]; ++i) {
      const auto [holder, row] = plan_.entries[i];
      if (row >= arrived[holder]) continue;  // masked, now or when the rows were sent
      if (!shape_.by_expert) {
        rows[count++] = shape_.reduced_row(use_, shape_.rank, holder, row);
        continue;
      }
      for (std::int64_t t = term_begins_[i]; t < term_begins_[i + 1]; ++t) {
        weights[count] = terms_[t].weight;
        rows[count++] = shape_.expert_row(use_, shape_.rank, holder, row, t - term_begins_[i], token, terms_[t].k);
      }
    }
    char* const out = result_.as<char>() + token * result_.view.stride[0] * shape_.item;
    if (shape_.logfmt)
      sum_logfmt(rows, weights, count, out);
    else
      sum_rows(shape_.dtype, rows, weights, count, out, shape_.hidden);
  }

  void sum_rows(DType dtype, const void* const* rows, const float* weights, int count, void* out,
                std::int64_t width) const {
    if (shape_.by_expert)
      simd_ops().weighted_sum_rows(dtype, rows, weights, count, out, width);
    else
      simd_ops().sum_rows(dtype, rows, count, nullptr, nullptr, out, width);
  }

  void sum_logfmt(const void* const* rows, const float* weights, int count, char* out) const {
    float decoded[layout::kMaxTopk][kLogfmtBlock], total[kLogfmtBlock];
    const void* pointers[layout::kMaxTopk];
    for (std::int64_t block = 0; block < shape_.hidden / kLogfmtBlock; ++block) {
      for (int i = 0; i < count; ++i) {
        logfmt_decode(static_cast<const std::uint8_t*>(rows[i]) + block * kLogfmtBlockBytes, kLogfmtBlock, decoded[i]);
        pointers[i] = decoded[i];
      }
      sum_rows(DType::kFloat32, pointers, weights, count, total, kLogfmtBlock);
      round_row(shape_.dtype, total, kLogfmtBlock, out + block * kLogfmtBlock * shape_.item);
    }
  }

  const Shape shape_;
  const SlotUse use_;
  const RowPlan plan_;
  const Tensor result_;
  std::int64_t* const wait_stats_;
  std::vector<std::int64_t> term_begins_;  // [entries + 1] into terms
  std::vector<Term> terms_;
};

}  // namespace

LowLatencyCombineResult low_latency_combine(LowLatencyContext context, const LowLatencyCombineArgs& args) {
  Domain& domain = context.base.domain;
  layout::Announce words{};
  words.signature = signature(args);
  words.num_tokens = args.topk_idx.shape[0];
  const Shape shape(domain, args, words.signature);
  LowLatencyCombineResult result;
  if (args.out.defined())
    result.combined_x.view = args.out;
  else
    result.combined_x = make_output(context, shape.dtype, {shape.num_tokens, shape.hidden});

  const SlotUse use = take_slot(context, words, shape.slot_bytes());
  std::shared_ptr<Owner> owner;
  with_slot(context, use, [&] {
    owner = std::make_shared<Owner>(args, shape, use, result.combined_x);
    const bool ahead = !shape.by_expert && !shape.weights_known;
    if (ahead) owner->send_weights(context, args.topk_weights);
    Holder holder(context, args, shape, use);
    for (int peer = 0; peer < shape.num_ranks; ++peer) {
      std::int64_t rows = holder.num_rows(peer);
      if (ahead) {
        const std::int64_t known =
            await_arrival(context, use, Region::kWeightArrival, peer, "low_latency_combine/weights",
                          args.wait_recv_cost_stats.as<std::int64_t>());
        rows = known < rows ? known : rows;
      }
      if (rows >= 0 && !domain.masked(peer) && use.bases[peer] != nullptr) holder.send(peer, rows);
    }
  });
  result.hook =
      now_or_hook(context, use, args.return_recv_hook, [owner](LowLatencyContext& where) { owner->receive(where); });
  return result;
}

}  // namespace deep_moe::cpu
