#include "cpu/output_pool.hpp"

#include <cstdlib>
#include <new>

#include "runtime/process.hpp"

namespace deep_moe::cpu {
namespace {

constexpr std::size_t kMinBytes = 64 << 10;  // below, the system's allocator is as good
constexpr std::size_t kMaxKept = 16;         // chunks: a few tensors for each call in flight

}  // namespace

OutputPool::~OutputPool() {
  for (const Chunk& chunk : kept_) std::free(chunk.memory);
}

OutputPool::Chunk OutputPool::take(std::size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto chunk = kept_.begin(); chunk != kept_.end(); ++chunk) {
      if (chunk->bytes < bytes || chunk->bytes / 2 > bytes) continue;
      const Chunk taken = *chunk;
      kept_.erase(chunk);
      return taken;
    }
  }
  void* const memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, bytes};
}

void OutputPool::give(const Chunk& chunk) {
  Chunk oldest{nullptr, 0};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() == kMaxKept) {
      oldest = kept_.front();
      kept_.erase(kept_.begin());
    }
    kept_.push_back(chunk);
  }
  std::free(oldest.memory);
}

Tensor OutputPool::make(DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor tensor;
  tensor.view = TensorView::contiguous(nullptr, dtype, shape);
  if (tensor.view.num_bytes() < kMinBytes) return make_host_tensor(dtype, shape);
  const Chunk chunk = take((tensor.view.num_bytes() + 63) / 64 * 64);
  tensor.view.data = chunk.memory;
  tensor.owner = std::shared_ptr<void>(chunk.memory, [pool = shared_from_this(), chunk, forks = fork_count()](void*) {
    if (forks == fork_count()) pool->give(chunk);  // a child's copy of the lock may be held by nobody
  });
  return tensor;
}

}  // namespace deep_moe::cpu
