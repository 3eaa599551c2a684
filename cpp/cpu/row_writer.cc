#include "cpu/row_writer.hpp"

#include <cstring>

#include "cpu/copy.hpp"
#include "cpu/route.hpp"

namespace deep_moe::cpu {

RowWriter::RowWriter(const DispatchArgs& args) : args_(args) {
  const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(args.x.data.dtype));
  token_bytes_ = args.x.data.stride[0] * item;
  format_.row_bytes = args.x.data.shape[1] * item;
  if (const TensorView& scales = args.x.scales; scales.defined()) {
    scale_item_ = static_cast<std::int64_t>(dtype_bytes(scales.dtype));
    num_scales_ = scales.num_dims == 2 ? scales.shape[1] : 1;
    format_.scale_bytes = scale_item_ * num_scales_;
    column_scales_ = scales.num_dims == 2 && num_scales_ > 1 && scales.stride[0] == 1;
  }
  if (args.topk_idx.defined()) {
    format_.topk = args.topk_idx.shape[1];
    format_.idx_bytes = static_cast<std::int64_t>(dtype_bytes(args.topk_idx.dtype));
    format_.weight_bytes = args.topk_weights.defined() ? 4 : 0;
  }
}

Row RowWriter::row_of(std::int64_t token) const {
  Row row;
  row.x = args_.x.data.as<char>() + token * token_bytes_;
  row.token = static_cast<std::int32_t>(token);
  if (const TensorView& scales = args_.x.scales; num_scales_ > 0) {
    row.scales = scales.as<char>() + token * scales.stride[0] * scale_item_;
    row.scale_step = scales.num_dims == 2 ? scales.stride[1] * scale_item_ : scale_item_;
  }
  if (format_.topk == 0) return row;
  row.ids = args_.topk_idx.as<char>() + token * args_.topk_idx.stride[0] * format_.idx_bytes;
  if (const TensorView& weights = args_.topk_weights; weights.defined())
    row.weights = weights.as<float>() + token * weights.stride[0];
  return row;
}

void RowWriter::store(const Target& target, const Row& row, std::int64_t at, bool streaming) const {
  copy_row(target.base + target.block.x + at * format_.row_bytes, row.x, format_.row_bytes, streaming);
  std::memcpy(target.base + target.block.src_idx + at * 4, &row.token, 4);
  if (num_scales_ > 0) store_scales(target, row, at);
  if (format_.topk > 0) store_routing(target, row, at);
}

std::int64_t RowWriter::id(const Row& row, std::int64_t k) const {
  return format_.idx_bytes == 8 ? reinterpret_cast<const std::int64_t*>(row.ids)[k]
                                : reinterpret_cast<const std::int32_t*>(row.ids)[k];
}

void RowWriter::store_routing(const Target& target, const Row& row, std::int64_t at) const {
  char* ids = target.base + target.block.topk_idx + at * format_.topk * format_.idx_bytes;
  float* weights = reinterpret_cast<float*>(target.base + target.block.topk_weights) + at * format_.topk;
  for (std::int64_t k = 0; k < format_.topk; ++k) {
    std::int64_t local = id(row, k) - target.first_expert;
    if (local < 0 || local >= target.num_local_experts) local = -1;
    if (format_.idx_bytes == 8) {
      reinterpret_cast<std::int64_t*>(ids)[k] = local;
    } else {
      reinterpret_cast<std::int32_t*>(ids)[k] = static_cast<std::int32_t>(local);
    }
    if (row.weights != nullptr) weights[k] = local >= 0 ? row.weights[k] : 0.0f;
  }
}

void RowWriter::store_scales(const Target& target, const Row& row, std::int64_t at) const {
  char* to = target.base + target.block.scales;
  if (!target.column_scales && (row.scale_step == scale_item_ || num_scales_ == 1)) {
    std::memcpy(to + at * format_.scale_bytes, row.scales, static_cast<std::size_t>(format_.scale_bytes));
    return;
  }
  const std::int64_t first = target.column_scales ? at * scale_item_ : at * format_.scale_bytes;
  const std::int64_t step = target.column_scales ? target.block_rows * scale_item_ : scale_item_;
  for (std::int64_t s = 0; s < num_scales_; ++s)
    std::memcpy(to + first + s * step, row.scales + s * row.scale_step, static_cast<std::size_t>(scale_item_));
}

layout::RailRow RowWriter::rail_row(int num_local_ranks) const {
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  return {bytes(format_.row_bytes), bytes(format_.scale_bytes), bytes(format_.topk * format_.idx_bytes),
          bytes(format_.topk * format_.weight_bytes), num_local_ranks};
}

void RowWriter::pack(char* slot, const layout::RailRow& where, const Row& row) const {
  std::memcpy(slot, row.x, static_cast<std::size_t>(format_.row_bytes));
  for (std::int64_t s = 0; s < num_scales_; ++s)
    std::memcpy(slot + where.scales + s * scale_item_, row.scales + s * row.scale_step,
                static_cast<std::size_t>(scale_item_));
  if (row.ids != nullptr)
    std::memcpy(slot + where.topk_idx, row.ids, static_cast<std::size_t>(format_.topk * format_.idx_bytes));
  if (row.weights != nullptr)
    std::memcpy(slot + where.topk_weights, row.weights, static_cast<std::size_t>(format_.topk * 4));
  std::memcpy(slot + where.token, &row.token, 4);
}

Row RowWriter::unpack(const char* slot, const layout::RailRow& where) const {
  Row row;
  row.x = slot;
  if (num_scales_ > 0) {
    row.scales = slot + where.scales;
    row.scale_step = scale_item_;
  }
  if (format_.topk > 0) row.ids = slot + where.topk_idx;
  if (format_.weight_bytes > 0) row.weights = reinterpret_cast<const float*>(slot + where.topk_weights);
  std::memcpy(&row.token, slot + where.token, 4);
  return row;
}

}  // namespace deep_moe::cpu
