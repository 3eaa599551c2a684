// Counterparts of cpp/kernels/ptx/tma.cuh. The copy engine is as lazy as it may be, or not, by chance: it reads memory
// when a barrier is asked for the bytes, or sooner; it reads a stage, and writes memory, when the thread waits for
// that, or sooner. What is not waited for may never happen. Fences of the async proxy do nothing here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace deep_moe::ptx {

inline constexpr bool kHasTma = true;

// Of one thread of a block.
class CopyEngine {
 public:
  static CopyEngine& here() {
    thread_local std::map<unsigned, CopyEngine> engines;  // a block is a thread
    CopyEngine& engine = engines[threadIdx.x];
    if (engine.block_ != &::emulation::Block::here() || engine.launch_ != ::emulation::Block::here().launch())
      engine = CopyEngine(&::emulation::Block::here());
    return engine;
  }
  CopyEngine() = default;

  void expect(std::uint64_t* barrier, std::uint32_t bytes) { phases_[barrier] += bytes; }
  void load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
    loads_.push_back({shared, global, bytes, barrier});
    if (chance(2)) finish_loads(barrier);
  }
  bool is_complete(std::uint64_t* barrier, std::uint32_t parity) {
    ::emulation::Block::here().loads();
    if (chance(2)) finish_loads(barrier);
    return *barrier % 2 != parity;
  }
  void store(void* global, const void* shared, std::uint32_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) fail("a bulk store is not aligned");
    stores_.push_back({global, shared, bytes, group_, {}, false});
    if (chance(4)) read(stores_.back());
  }
  void commit() { ++group_; }
  void wait_read(std::uint64_t pending) {
    for (Store& store : stores_)
      if (store.group + pending < group_) read(store);
  }
  void wait(std::uint64_t pending) {
    wait_read(pending);
    std::erase_if(stores_, [&](const Store& store) {
      if (store.group + pending >= group_) return false;
      std::memcpy(store.global, store.bytes.data(), store.bytes.size());
      return true;
    });
  }

 private:
  struct Load {
    void* shared;
    const void* global;
    std::uint32_t bytes;
    std::uint64_t* barrier;
  };
  struct Store {
    void* global;
    const void* shared;
    std::uint32_t size;
    std::uint64_t group;
    std::vector<char> bytes;
    bool is_read;
  };

  explicit CopyEngine(const ::emulation::Block* block)
      : block_(block), launch_(block->launch()), random_(static_cast<std::uint32_t>(launch_) * 2654435761u + 1) {}
  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "copy engine: %s\n", what);
    std::abort();
  }
  bool chance(unsigned one_in) {
    random_ = random_ * 1664525u + 1013904223u;
    return (random_ >> 16) % one_in == 0;
  }
  // A barrier holds the number of phases that are complete.
  void finish_loads(std::uint64_t* barrier) {
    std::erase_if(loads_, [&](const Load& load) {
      if (load.barrier != barrier) return false;
      if (reinterpret_cast<std::uintptr_t>(load.global) % 16 != 0 || load.bytes % 16 != 0)
        fail("a bulk load is not aligned");
      std::memcpy(load.shared, load.global, load.bytes);
      if (phases_[barrier] < load.bytes) fail("more bytes than a barrier expects");
      if ((phases_[barrier] -= load.bytes) == 0) ++*barrier;
      return true;
    });
  }
  static void read(Store& store) {
    if (store.is_read) return;
    store.bytes.assign(static_cast<const char*>(store.shared), static_cast<const char*>(store.shared) + store.size);
    store.is_read = true;
  }

  const ::emulation::Block* block_ = nullptr;
  std::uint64_t launch_ = 0;
  std::uint32_t random_ = 0;
  std::uint64_t group_ = 0;
  std::vector<Load> loads_;
  std::vector<Store> stores_;
  std::map<std::uint64_t*, std::uint32_t> phases_;  // bytes that are still to come
};

inline void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  if (arrivals != 1) std::abort();
  *barrier = 0;
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(std::uint64_t* barrier, std::uint32_t bytes) {
  CopyEngine::here().expect(barrier, bytes);
}
inline bool mbarrier_try_wait_acquire_cta(std::uint64_t* barrier, std::uint32_t parity) {
  return CopyEngine::here().is_complete(barrier, parity);
}
inline void bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
  CopyEngine::here().load(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  CopyEngine::here().store(global, shared, bytes);
}
inline void bulk_commit_group() { CopyEngine::here().commit(); }
template <int kPending>
void bulk_wait_group_read() {
  CopyEngine::here().wait_read(kPending);
}
template <int kPending>
void bulk_wait_group() {
  CopyEngine::here().wait(kPending);
}
inline void fence_proxy_async() {}

}  // namespace deep_moe::ptx
