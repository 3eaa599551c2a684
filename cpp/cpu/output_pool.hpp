// Memory for the outputs of low-latency calls where the heap has no room. The packed tensors are large, mostly
// untouched, and wanted again by the next call: memory that comes back is kept, for its pages are there already.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include <deep_moe/tensor.hpp>

namespace deep_moe::cpu {

// Thread safe; lives as long as any tensor made from it.
class OutputPool : public std::enable_shared_from_this<OutputPool> {
 public:
  OutputPool() = default;
  ~OutputPool();
  OutputPool(const OutputPool&) = delete;
  OutputPool& operator=(const OutputPool&) = delete;

  // Row-major, uninitialised.
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape);

 private:
  struct Chunk {
    void* memory;
    std::size_t bytes;
  };
  Chunk take(std::size_t bytes);
  void give(const Chunk& chunk);

  std::mutex mutex_;
  std::vector<Chunk> kept_;  // oldest first
};

}  // namespace deep_moe::cpu
