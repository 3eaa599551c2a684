// Where the parts of received rows lie inside one offered block, and of a low-latency slot inside the staging.
#pragma once

#include <cstddef>
#include <cstdint>

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
  RecvBlock(const RowFormat& format, std::int64_t num_rows) {
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

// One low-latency slot of the staging of one rank. Dispatch: rows[R][M] with scales and metadata; combine: rows of
// partial or expert results. The same memory serves either kind of call.
struct LowLatencySlot {
  // Dispatch part: entry (src, i) at src * M + i.
  std::size_t row_stride = 0;   // bytes of one staged row: data, scales, then token index and local ids
  std::size_t scale_offset = 0; // inside a row
  std::size_t token_offset = 0; // i32 source token
  std::size_t ids_offset = 0;   // i32[K] local expert or -1
  std::size_t weights_offset = 0;  // f32[K], present in every row
  std::size_t dispatch_bytes = 0;
  // Combine part: per-expert entry t * K + k, pre-reduced entry (holder, i) at holder * M + i; then the weights sent
  // ahead, f32[R][M][K], addressed by (owner, i).
  std::size_t combine_row_stride = 0;
  std::size_t weights_ahead = 0;
  std::size_t combine_bytes = 0;
  std::size_t total = 0;

  LowLatencySlot() = default;
  LowLatencySlot(std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t topk, std::int64_t row_bytes,
                 std::int64_t scale_bytes, std::int64_t combine_row_bytes) {
    scale_offset = align_up(static_cast<std::size_t>(row_bytes), 16);
    token_offset = align_up(scale_offset + static_cast<std::size_t>(scale_bytes), 16);
    ids_offset = token_offset + 4;
    weights_offset = ids_offset + 4 * static_cast<std::size_t>(topk);
    row_stride = align_up(weights_offset + 4 * static_cast<std::size_t>(topk), 64);
    dispatch_bytes = align_up(row_stride * static_cast<std::size_t>(num_ranks * max_tokens), kAlign);
    combine_row_stride = align_up(static_cast<std::size_t>(combine_row_bytes), 64);
    const std::int64_t entries = max_tokens * (num_ranks > topk ? num_ranks : topk);
    weights_ahead = align_up(combine_row_stride * static_cast<std::size_t>(entries), kAlign);
    combine_bytes = align_up(weights_ahead + 4 * static_cast<std::size_t>(num_ranks * max_tokens * topk), kAlign);
    total = dispatch_bytes > combine_bytes ? dispatch_bytes : combine_bytes;
  }
};

}  // namespace deep_moe::layout
