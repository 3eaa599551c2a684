// Where the parts of received rows lie inside one offered block, and of a low-latency slot inside the staging.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/host_device.hpp"
#include "layout/workspace.hpp"

namespace deep_moe::layout {

// What travels with each row of a high-throughput dispatch.
struct RowFormat {
  std::int64_t row_bytes = 0;
  std::int64_t scale_bytes = 0;   // 0: none
  std::int64_t topk = 0;          // 0: no ids
  std::int64_t idx_bytes = 0;     // of one id: 4 or 8
  std::int64_t weight_bytes = 0;  // of one weight: 4, or 0: none
};

// Offsets inside a block that holds `num_rows` rows: one array a part, so that each becomes a tensor without a copy.
struct RecvBlock {
  std::size_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0, src_idx = 0, total = 0;

  RecvBlock() = default;
  DM_HOST_DEVICE RecvBlock(const RowFormat& format, std::int64_t num_rows) {
    const auto part = [&](std::int64_t bytes_per_row) {
      const std::size_t offset = total;
      total = align_up(total + static_cast<std::size_t>(bytes_per_row * num_rows), kAlign);
      return offset;
    };
    x = part(format.row_bytes);
    scales = part(format.scale_bytes);
    topk_idx = part(format.topk * format.idx_bytes);
    topk_weights = part(format.topk * format.weight_bytes);
    src_idx = part(static_cast<std::int64_t>(sizeof(std::int32_t)));
  }

  // Rows that surely fit in `bytes`.
  static std::int64_t capacity(const RowFormat& format, std::int64_t bytes) {
    const std::int64_t per_row = format.row_bytes + format.scale_bytes +
                                 format.topk * (format.idx_bytes + format.weight_bytes) +
                                 static_cast<std::int64_t>(sizeof(std::int32_t));
    const std::int64_t slack = 5 * kAlign;
    return bytes <= slack ? 0 : (bytes - slack) / per_row;
  }
};

// One low-latency slot of the staging of one rank. Each writer has its own part of it, whatever the call, so that one
// who comes late (it has been masked, or has slept through a reset) touches nobody else's rows. Only the rows of a
// combine by expert share the slot, for they would need R times the memory; where ranks may be masked they do not.
struct LowLatencySlot {
  // Dispatch: row i of the writer at i * row_stride.
  std::size_t row_stride = 0;      // bytes of one staged row: data, scales, then token index, local ids and weights
  std::size_t scale_offset = 0;    // inside a row
  std::size_t token_offset = 0;    // i32 source token
  std::size_t ids_offset = 0;      // i32[K] local expert or -1
  std::size_t weights_offset = 0;  // f32[K], present in every row
  // Combine: pre-reduced row i of the writer at i * combine_row_stride of its part, then the weights that it sends
  // ahead, f32[M][K]. Rows by expert at (t * K + k) * combine_row_stride of the slot.
  std::size_t combine_row_stride = 0;
  std::size_t weights_ahead = 0;
  std::size_t part_bytes = 0;  // of one writer
  std::size_t total = 0;

  LowLatencySlot() = default;
  LowLatencySlot(std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t topk, std::int64_t row_bytes,
                 std::int64_t scale_bytes, std::int64_t combine_row_bytes) {
    const std::size_t tokens = static_cast<std::size_t>(max_tokens), k = static_cast<std::size_t>(topk);
    scale_offset = align_up(static_cast<std::size_t>(row_bytes), 16);
    token_offset = align_up(scale_offset + static_cast<std::size_t>(scale_bytes), 16);
    ids_offset = token_offset + 4;
    weights_offset = ids_offset + 4 * k;
    row_stride = align_up(weights_offset + 4 * k, 64);
    combine_row_stride = align_up(static_cast<std::size_t>(combine_row_bytes), 64);
    weights_ahead = combine_row_stride * tokens;
    const std::size_t combine_bytes = weights_ahead + 4 * tokens * k;
    part_bytes = align_up(row_stride * tokens > combine_bytes ? row_stride * tokens : combine_bytes, kAlign);
    const std::size_t parts = part_bytes * static_cast<std::size_t>(num_ranks);
    const std::size_t by_expert = align_up(combine_row_stride * tokens * k, kAlign);
    total = parts > by_expert ? parts : by_expert;
  }
};

// kArrival and kWeightArrival hold: 28 bits of the epoch, 16 of the signature's hash, 20 of the number of rows + 1.
inline constexpr std::int64_t kMaxLowLatencyTokens = (std::int64_t{1} << 20) - 2;
DM_HOST_DEVICE std::uint64_t pack_arrival(std::uint64_t epoch, std::uint64_t hash, std::uint64_t num_rows) {
  return (epoch << 36) | ((hash & 0xffff) << 20) | (num_rows + 1);
}
DM_HOST_DEVICE bool arrival_is_of(std::uint64_t word, std::uint64_t epoch) {
  return (word >> 36) == (epoch & 0xfffffff) && (word & 0xfffff) != 0;
}
DM_HOST_DEVICE bool arrival_has_hash(std::uint64_t word, std::uint64_t hash) {
  return ((word >> 20) & 0xffff) == (hash & 0xffff);
}
DM_HOST_DEVICE std::int64_t arrival_rows(std::uint64_t word) { return static_cast<std::int64_t>(word & 0xfffff) - 1; }

}  // namespace deep_moe::layout
