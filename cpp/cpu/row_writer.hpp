// Stores one token's row, with scales, ids, weights and source index, into a destination's block.
#pragma once

#include <cstdint>

#include <deep_moe/buffer.hpp>

#include "layout/rail.hpp"
#include "layout/rows.hpp"

namespace deep_moe::cpu {

// One row as it lies in the caller's tensors, or in a slot of a ring.
struct Row {
  const char* x = nullptr;
  const char* scales = nullptr;
  std::int64_t scale_step = 0;  // bytes from one scale to the next
  const char* ids = nullptr;    // [K], global
  const float* weights = nullptr;
  std::int32_t token = 0;
};

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

  Row row_of(std::int64_t token) const;
  // At row `at` of the target's block. Streaming stores need finish_streaming() on the same thread.
  void store(const Target& target, const Row& row, std::int64_t at, bool streaming) const;

  // How a row lies in a slot between nodes of L ranks; into a slot, all but the
  // positions; out of one.
  layout::RailRow rail_row(int num_local_ranks) const;
  void pack(char* slot, const layout::RailRow& where, const Row& row) const;
  Row unpack(const char* slot, const layout::RailRow& where) const;

 private:
  void store_scales(const Target& target, const Row& row, std::int64_t at) const;
  void store_routing(const Target& target, const Row& row, std::int64_t at) const;
  std::int64_t id(const Row& row, std::int64_t k) const;

  const DispatchArgs& args_;
  layout::RowFormat format_;
  std::int64_t token_bytes_ = 0;  // from one row of x to the next
  std::int64_t scale_item_ = 0, num_scales_ = 0;
  bool column_scales_ = false;
};

}  // namespace deep_moe::cpu
