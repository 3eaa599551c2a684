// Stores one token's row, with scales, ids, weights and source index, into a destination's block.
#pragma once

#include <cstdint>

#include <deep_moe/buffer.hpp>

#include "layout/rows.hpp"

namespace deep_moe::cpu {

// Where one destination wants its rows.
struct Target {
  char* base = nullptr;  // of its block
  layout::RecvBlock block;
  std::int64_t block_rows = 0;   // rows the block is laid out for
  std::int64_t first_index = 0;  // of this rank's rows at that destination
  std::int64_t num_rows = 0;     // of this rank there
  std::int64_t total_rows = 0;   // of all ranks there
  std::int64_t num_waves = 1;
  bool column_scales = false;
  int first_expert = 0, num_local_experts = 0;
};

class RowWriter {
 public:
  explicit RowWriter(const DispatchArgs& args);

  const layout::RowFormat& format() const { return format_; }
  std::int64_t scale_item() const { return scale_item_; }  // bytes of one scale
  std::int64_t num_scales() const { return num_scales_; }  // of one row
  bool column_scales() const { return column_scales_; }    // of the input

  // At row `at` of the target's block. Streaming stores need finish_streaming() on the same thread.
  void store(const Target& target, std::int64_t token, std::int64_t at, bool streaming) const;

 private:
  void store_scales(const Target& target, std::int64_t token, std::int64_t at) const;
  void store_routing(const Target& target, std::int64_t token, std::int64_t at) const;

  const DispatchArgs& args_;
  layout::RowFormat format_;
  std::int64_t token_bytes_ = 0;  // from one row of x to the next
  std::int64_t scale_item_ = 0, num_scales_ = 0;
  bool column_scales_ = false;
};

}  // namespace deep_moe::cpu
