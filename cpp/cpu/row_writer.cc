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

void RowWriter::store(const Target& target, std::int64_t token, std::int64_t at, bool streaming) const {
  copy_row(target.base + target.block.x + at * format_.row_bytes, args_.x.data.as<char>() + token * token_bytes_,
           format_.row_bytes, streaming);
  const std::int32_t src = static_cast<std::int32_t>(token);
  std::memcpy(target.base + target.block.src_idx + at * 4, &src, 4);
  if (num_scales_ > 0) store_scales(target, token, at);
  if (format_.topk > 0) store_routing(target, token, at);
}

void RowWriter::store_routing(const Target& target, std::int64_t token, std::int64_t at) const {
  char* ids = target.base + target.block.topk_idx + at * format_.topk * format_.idx_bytes;
  float* weights = reinterpret_cast<float*>(target.base + target.block.topk_weights) + at * format_.topk;
  const TensorView& given = args_.topk_weights;
  const float* own = given.defined() ? given.as<float>() + token * given.stride[0] : nullptr;
  for (std::int64_t k = 0; k < format_.topk; ++k) {
    std::int64_t local = topk_id(args_.topk_idx, token, k) - target.first_expert;
    if (local < 0 || local >= target.num_local_experts) local = -1;
    if (format_.idx_bytes == 8) {
      reinterpret_cast<std::int64_t*>(ids)[k] = local;
    } else {
      reinterpret_cast<std::int32_t*>(ids)[k] = static_cast<std::int32_t>(local);
    }
    if (own != nullptr) weights[k] = local >= 0 ? own[k] : 0.0f;
  }
}

void RowWriter::store_scales(const Target& target, std::int64_t token, std::int64_t at) const {
  const TensorView& scales = args_.x.scales;
  const char* from = scales.as<char>() + token * scales.stride[0] * scale_item_;
  char* to = target.base + target.block.scales;
  const std::int64_t from_step = scales.num_dims == 2 ? scales.stride[1] * scale_item_ : 0;
  if (!target.column_scales && (from_step == scale_item_ || num_scales_ == 1)) {
    std::memcpy(to + at * format_.scale_bytes, from, static_cast<std::size_t>(format_.scale_bytes));
    return;
  }
  const std::int64_t first = target.column_scales ? at * scale_item_ : at * format_.scale_bytes;
  const std::int64_t step = target.column_scales ? target.block_rows * scale_item_ : scale_item_;
  for (std::int64_t s = 0; s < num_scales_; ++s)
    std::memcpy(to + first + s * step, from + s * from_step, static_cast<std::size_t>(scale_item_));
}

}  // namespace deep_moe::cpu
