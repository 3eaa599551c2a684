// Memory for what a high-throughput call returns.
#pragma once

#include <cstdint>

#include "runtime/domain.hpp"

namespace deep_moe::cpu {

// [rows, columns]; from the heap where it has room, for its pages are warm; else from ordinary memory.
inline Tensor make_output(Domain& domain, DType dtype, std::int64_t rows, std::int64_t columns) {
  const std::int64_t bytes = rows * columns * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (bytes > 0) {
    if (const Block block = domain.heap().allocate(static_cast<std::size_t>(bytes)))
      return {TensorView::contiguous(block.ptr, dtype, {rows, columns}), domain.heap().own(block)};
  }
  return make_host_tensor(dtype, {rows, columns});
}

}  // namespace deep_moe::cpu
