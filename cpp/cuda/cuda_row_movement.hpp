// What one dispatch on a GPU works with; for the files that make up CudaBuffer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/cuda_buffer.hpp"
#include "layout/rows.hpp"

namespace deep_moe::cuda {

struct CudaBuffer::RowMovement {
  explicit RowMovement(CallStreams& streams_) : streams(streams_) {}

  CallStreams& streams;
  layout::RowFormat format;
  kernels::ScaleRows scales;
  bool column_scales = false, cached = false;
  std::int64_t num_tokens = 0, num_experts = 0;
  std::int64_t worst_rows = 0;  // rows handed out whatever arrives; 0: as many as arrive
  OwnedDispatchHandle handle;   // cached: views of the caller's
  Block block;                  // offered to the peers
  layout::Place place;          // the same as they see it
  std::uint32_t sequence = 0;   // of the counts in mapped memory

  // Known once the counts are read.
  std::vector<std::int64_t> totals;       // rows that each rank receives
  std::vector<std::int64_t> source_rows;  // rows that this rank receives from each
  std::int64_t arrived = 0;
  std::vector<std::int64_t> expert_rows;
  std::uint64_t hash = 0;
  std::shared_ptr<Spill> spill;  // received rows where they came in waves, laid out like a block
};

}  // namespace deep_moe::cuda
