// Low-latency dispatch. The send half casts each row once and writes it to every destination rank's slot; the receive
// half, in the call or in its hook, copies the rows into the packed tensor, a row for each local expert.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "cpu/copy.hpp"
#include "cpu/low_latency_call.hpp"
#include "cpu/route.hpp"
#include "cpu/simd.hpp"
#include "layout/handle.hpp"

namespace deep_moe::cpu {
namespace {

using layout::Region;

// Sizes of one call.
struct Shape {
  int rank, num_ranks;
  layout::ExpertBlocks blocks;
  std::int64_t num_local, max_tokens, topk, hidden;
  std::int64_t row_bytes;               // as it travels and is received
  std::int64_t num_scales, scale_item;  // a row; bytes of one as received
  layout::LowLatencySlot slot;

  Shape(const Domain& domain, const LowLatencyDispatchArgs& args, const layout::CallSignature& signature)
      : rank(domain.rank()),
        num_ranks(domain.num_ranks()),
        blocks(static_cast<int>(args.num_experts), num_ranks),
        num_local(blocks.num_local_experts(rank)),
        max_tokens(args.num_max_dispatch_tokens_per_rank),
        topk(args.topk_idx.shape[1]),
        hidden(args.x.data.shape[1]),
        row_bytes(signature.row_bytes) {
    const TensorView& scales = args.x.scales;
    if (scales.defined()) {
      num_scales = scales.num_dims == 2 ? scales.shape[1] : 1;
      scale_item = static_cast<std::int64_t>(dtype_bytes(scales.dtype));
    } else {
      num_scales = args.use_fp8 ? hidden / kFp8Block / (args.use_ue8m0 ? 4 : 1) : 0;
      scale_item = 4;
    }
    // Room for the combine of rows of the same width as well, so that it need not grow the staging.
    const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.data.dtype));
    slot = layout::LowLatencySlot(num_ranks, max_tokens, topk, row_bytes, num_scales * scale_item,
                                  hidden * (item > 2 ? item : 2));
  }

  std::int64_t expert_rows() const { return num_ranks * max_tokens; }  // rows of one local expert's block
};

// Writes this rank's rows into the slots of the destinations.
class Sender {
 public:
  Sender(LowLatencyContext& context, const LowLatencyDispatchArgs& args, const Shape& shape, const SlotUse& use)
      : context_(context), args_(args), shape_(shape), use_(use), plan_(args.topk_idx, shape.blocks) {}

  void run() {
    context_.base.pool.parallel_for(args_.topk_idx.shape[0], row_grain(shape_.row_bytes),
                                    [this](std::int64_t begin, std::int64_t end) {
                                      for (std::int64_t token = begin; token < end; ++token) send(token);
                                    });
    for (int i = 1; i <= shape_.num_ranks; ++i) {
      const int peer = (shape_.rank + i) % shape_.num_ranks;
      if (use_.bases[peer] != nullptr) post_arrival(context_, use_, Region::kArrival, peer, plan_.counts[peer]);
    }
  }

 private:
  void send(std::int64_t token) const {
    const char* first = nullptr;
    for (std::int64_t i = plan_.begins[token]; i < plan_.begins[token + 1]; ++i) {
      const auto [dst, row] = plan_.entries[i];
      if (use_.bases[dst] == nullptr) continue;
      char* const to = use_.part(dst, shape_.rank) + shape_.slot.row_stride * static_cast<std::size_t>(row);
      if (first == nullptr) {
        write_data(token, to);
        first = to;
      } else {
        std::memcpy(to, first, shape_.slot.token_offset);
      }
      write_routing(token, dst, to);
    }
  }

  void write_data(std::int64_t token, char* to) const {
    const TensorView& data = args_.x.data;
    const std::size_t item = dtype_bytes(data.dtype);
    const char* const from = static_cast<const char*>(data.data) + token * data.stride[0] * static_cast<int>(item);
    if (args_.x.scales.defined() || !args_.use_fp8) {
      std::memcpy(to, from, static_cast<std::size_t>(shape_.row_bytes));
      if (args_.x.scales.defined()) copy_scales(token, to + shape_.slot.scale_offset);
      return;
    }
    // In pieces, so that the scales before packing fit on the stack.
    constexpr std::int64_t kBlocks = 64;
    const std::int64_t num_blocks = shape_.hidden / kFp8Block;
    for (std::int64_t block = 0; block < num_blocks; block += kBlocks) {
      const std::int64_t count = num_blocks - block < kBlocks ? num_blocks - block : kBlocks;
      const std::int64_t begin = block * kFp8Block;
      float scales[kBlocks];
      simd_ops().cast_fp8(data.dtype, from + begin * static_cast<int>(item), count * kFp8Block,
                          args_.round_scale || args_.use_ue8m0, reinterpret_cast<std::uint8_t*>(to) + begin, scales);
      write_scales(scales, block, count, to + shape_.slot.scale_offset);
    }
  }

  // As fp32, or as the biased exponents alone.
  void write_scales(const float* scales, std::int64_t block, std::int64_t count, char* to) const {
    if (!args_.use_ue8m0) {
      std::memcpy(to + 4 * block, scales, 4 * static_cast<std::size_t>(count));
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &scales[i], sizeof bits);
      to[block + i] = static_cast<char>(static_cast<std::uint8_t>(bits >> 23));
    }
  }

  void copy_scales(std::int64_t token, char* to) const {
    const TensorView& scales = args_.x.scales;
    const std::int64_t item = shape_.scale_item;
    const char* const from = static_cast<const char*>(scales.data) + token * scales.stride[0] * item;
    const std::int64_t stride = scales.num_dims == 2 ? scales.stride[1] : 1;
    for (std::int64_t s = 0; s < shape_.num_scales; ++s)
      std::memcpy(to + s * item, from + s * stride * item, static_cast<std::size_t>(item));
  }

  void write_routing(std::int64_t token, int dst, char* to) const {
    const std::int32_t token_id = static_cast<std::int32_t>(token);
    std::memcpy(to + shape_.slot.token_offset, &token_id, sizeof token_id);
    const int first_expert = shape_.blocks.first_expert(dst), num_local = shape_.blocks.num_local_experts(dst);
    for (std::int64_t k = 0; k < shape_.topk; ++k) {
      const int local = static_cast<int>(topk_id(args_.topk_idx, token, k)) - first_expert;
      const std::int32_t id = local >= 0 && local < num_local ? local : -1;
      std::memcpy(to + shape_.slot.ids_offset + 4 * k, &id, sizeof id);
    }
    const TensorView& weights = args_.topk_weights;
    if (weights.defined())
      std::memcpy(to + shape_.slot.weights_offset, weights.as<float>() + token * weights.stride[0],
                  4 * static_cast<std::size_t>(shape_.topk));
  }

  LowLatencyContext& context_;
  const LowLatencyDispatchArgs& args_;
  const Shape& shape_;
  const SlotUse& use_;
  const RowPlan plan_;
};

// Expands the rows of this rank's slot. Keeps alive what it fills, but for the caller's statistics.
class Receiver {
 public:
  Receiver(const Shape& shape, const SlotUse& use, const LowLatencyDispatchResult& result,
           const LowLatencyDispatchArgs& args)
      : shape_(shape),
        use_(use),
        recv_x_(result.recv_x),
        recv_count_(result.recv_count),
        handle_(result.handle),
        has_weights_(args.topk_weights.defined()),
        stats_(args.cumulative_local_expert_recv_stats.as<std::int32_t>()),
        wait_stats_(args.wait_recv_cost_stats.as<std::int64_t>()),
        counts_(static_cast<std::size_t>(shape.num_local), 0) {}

  void run(LowLatencyContext& context) {
    for (int src = 0; src < shape_.num_ranks; ++src) {
      const std::int64_t rows =
          await_arrival(context, use_, Region::kArrival, src, "low_latency_dispatch/receive", wait_stats_);
      place_rows(src, rows < 0 ? 0 : rows);
      const bool streaming = rows * shape_.topk * shape_.row_bytes > kStreamingBytes;
      context.base.pool.parallel_for(rows < 0 ? 0 : rows, row_grain(shape_.row_bytes),
                                     [=, this](std::int64_t begin, std::int64_t end) {
                                       for (std::int64_t row = begin; row < end; ++row) expand(src, row, streaming);
                                       if (streaming) finish_streaming();
                                     });
    }
    for (std::int64_t local = 0; local < shape_.num_local; ++local) {
      recv_count_.as<std::int32_t>()[local] = counts_[static_cast<std::size_t>(local)];
      if (stats_ != nullptr) stats_[local] += counts_[static_cast<std::size_t>(local)];
    }
    handle_.meta.as<std::int64_t>()[layout::kLowMetaComplete] = 1;
  }

 private:
  const char* staged(int src, std::int64_t row) const {
    return use_.part(shape_.rank, src) + shape_.slot.row_stride * static_cast<std::size_t>(row);
  }
  std::int64_t routing_index(int src, std::int64_t row) const { return (src * shape_.max_tokens + row) * shape_.topk; }

  // Gives each row of one source its places in the experts' blocks.
  void place_rows(int src, std::int64_t num_rows) {
    std::int32_t* const positions = handle_.recv_pos.as<std::int32_t>();
    const std::vector<std::int32_t> begins = counts_;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const char* const from = staged(src, row);
      std::int32_t token, ids[layout::kMaxTopk];
      std::memcpy(&token, from + shape_.slot.token_offset, sizeof token);
      std::memcpy(ids, from + shape_.slot.ids_offset, 4 * static_cast<std::size_t>(shape_.topk));
      std::int32_t* const at = positions + routing_index(src, row);
      for (std::int64_t k = 0; k < shape_.topk; ++k) {
        at[k] = -1;
        for (std::int64_t earlier = 0; earlier < k && ids[k] >= 0; ++earlier)
          if (ids[earlier] == ids[k]) at[k] = at[earlier];
        if (ids[k] < 0 || at[k] >= 0) continue;
        at[k] = static_cast<std::int32_t>(ids[k] * shape_.expert_rows()) + counts_[static_cast<std::size_t>(ids[k])]++;
        handle_.src_info.as<std::int32_t>()[at[k]] = token;
      }
      if (has_weights_)
        std::memcpy(handle_.recv_weights.as<float>() + routing_index(src, row), from + shape_.slot.weights_offset,
                    4 * static_cast<std::size_t>(shape_.topk));
    }
    std::fill(positions + routing_index(src, num_rows), positions + routing_index(src + 1, 0), -1);
    for (std::int64_t local = 0; local < shape_.num_local; ++local) {
      const std::int64_t begin = begins[static_cast<std::size_t>(local)];
      handle_.layout_range.as<std::int64_t>()[local * shape_.num_ranks + src] =
          begin << 32 | (counts_[static_cast<std::size_t>(local)] - begin);
    }
  }

  void expand(int src, std::int64_t row, bool streaming) const {
    const char* const from = staged(src, row);
    const std::int32_t* const positions = handle_.recv_pos.as<std::int32_t>() + routing_index(src, row);
    for (std::int64_t k = 0; k < shape_.topk; ++k) {
      bool again = positions[k] < 0;
      for (std::int64_t earlier = 0; earlier < k && !again; ++earlier) again = positions[earlier] == positions[k];
      if (again) continue;
      copy_row(recv_x_.data.as<char>() + positions[k] * shape_.row_bytes, from, shape_.row_bytes, streaming);
      if (shape_.num_scales > 0) copy_scales(from + shape_.slot.scale_offset, positions[k]);
    }
  }

  void copy_scales(const char* from, std::int32_t position) const {
    const std::int64_t local = position / shape_.expert_rows(), slot = position % shape_.expert_rows();
    const std::int64_t item = shape_.scale_item;
    char* to = recv_x_.scales.as<char>() + (local * shape_.num_scales * shape_.expert_rows() + slot) * item;
    for (std::int64_t s = 0; s < shape_.num_scales; ++s, to += shape_.expert_rows() * item)
      std::memcpy(to, from + s * item, static_cast<std::size_t>(item));
  }

  const Shape shape_;
  const SlotUse use_;
  const OwnedPayload recv_x_;
  const Tensor recv_count_;
  const OwnedLowLatencyHandle handle_;
  const bool has_weights_;
  std::int32_t* const stats_;
  std::int64_t* const wait_stats_;
  std::vector<std::int32_t> counts_;  // [L] rows so far
};

Tensor make_scales(LowLatencyContext& context, const Shape& shape, const LowLatencyDispatchArgs& args) {
  const TensorView& scales = args.x.scales;
  if (scales.defined() && scales.num_dims == 1)
    return make_output(context, scales.dtype, {shape.num_local, shape.expert_rows()});
  const DType dtype = scales.defined() ? scales.dtype : args.use_ue8m0 ? DType::kInt32 : DType::kFloat32;
  Tensor result = make_output(context, dtype, {shape.num_local, shape.expert_rows(), shape.num_scales});
  result.view.stride[1] = 1;
  result.view.stride[2] = shape.expert_rows();
  return result;
}

LowLatencyDispatchResult make_result(LowLatencyContext& context, const Shape& shape, const LowLatencyDispatchArgs& args,
                                     const layout::CallSignature& signature) {
  LowLatencyDispatchResult result;
  const bool cast = (signature.flags & kFlagFp8) != 0;
  result.recv_x.data = make_output(context, cast ? DType::kFloat8E4M3 : args.x.data.dtype,
                                   {shape.num_local, shape.expert_rows(), shape.hidden});
  if (shape.num_scales > 0) result.recv_x.scales = make_scales(context, shape, args);
  result.recv_count = make_output(context, DType::kInt32, {shape.num_local});
  OwnedLowLatencyHandle& handle = result.handle;
  handle.src_info = make_output(context, DType::kInt32, {shape.num_local, shape.expert_rows()});
  handle.layout_range = make_output(context, DType::kInt64, {shape.num_local, shape.num_ranks});
  handle.recv_pos = make_output(context, DType::kInt32, {shape.num_ranks, shape.max_tokens, shape.topk});
  handle.recv_weights = args.topk_weights.defined()
                            ? make_output(context, DType::kFloat32, {shape.num_ranks, shape.max_tokens, shape.topk})
                            : make_output(context, DType::kFloat32, {0});
  handle.meta = make_host_tensor(DType::kInt64, {layout::kLowLatencyMetaSize});
  std::int64_t* const meta = handle.meta.as<std::int64_t>();
  std::fill(meta, meta + layout::kLowLatencyMetaSize, 0);
  meta[layout::kLowMetaMaxTokens] = shape.max_tokens;
  meta[layout::kLowMetaHidden] = shape.hidden;
  meta[layout::kLowMetaNumExperts] = args.num_experts;
  meta[layout::kLowMetaTopk] = shape.topk;
  meta[layout::kLowMetaNumRanks] = shape.num_ranks;
  meta[layout::kLowMetaNumTokens] = args.topk_idx.shape[0];
  meta[layout::kLowMetaHasWeights] = args.topk_weights.defined() ? 1 : 0;
  meta[layout::kLowMetaXDtype] = static_cast<std::int64_t>(args.x.data.dtype);
  meta[layout::kLowMetaIdsHash] = hash_ids(args.topk_idx);
  if (args.topk_weights.defined()) meta[layout::kLowMetaWeightsHash] = hash_weights(args.topk_weights);
  return result;
}

}  // namespace

LowLatencyDispatchResult low_latency_dispatch(LowLatencyContext context, const LowLatencyDispatchArgs& args) {
  Domain& domain = context.base.domain;
  layout::Announce words{};
  words.signature = signature(args);
  words.num_tokens = args.topk_idx.shape[0];
  const Shape shape(domain, args, words.signature);
  LowLatencyDispatchResult result = make_result(context, shape, args, words.signature);
  const SlotUse use = take_slot(context, words, shape.slot.total);
  // The epoch tells this dispatch from every other one, on every rank.
  result.handle.meta.as<std::int64_t>()[layout::kLowMetaHash] =
      static_cast<std::int64_t>((use.hash ^ use.epoch) * 0x9e3779b97f4a7c15ull);
  with_slot(context, use, [&] { Sender(context, args, shape, use).run(); });
  auto receiver = std::make_shared<Receiver>(shape, use, result, args);
  result.hook =
      now_or_hook(context, use, args.return_recv_hook, [receiver](LowLatencyContext& where) { receiver->run(where); });
  return result;
}

}  // namespace deep_moe::cpu
