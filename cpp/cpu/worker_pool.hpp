// Threads of one rank that copy and sum rows. The calling thread takes part; with one thread nothing is started.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace deep_moe::cpu {

class WorkerPool {
 public:
  explicit WorkerPool(int num_threads);  // throws Error where the system gives no more threads
  ~WorkerPool();
  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }
  // body(begin, end) over [0, count), in contiguous parts of at least `grain`. Returns when all is done.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  void run(int index);
  void stop();
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(std::int64_t, std::int64_t)>* body_ = nullptr;
  std::int64_t count_ = 0, part_ = 0;
  std::uint64_t round_ = 0;
  int pending_ = 0;
  bool stop_ = false;
};

// Threads a rank of `ranks_here` on this machine should use: DEEP_MOE_CPU_THREADS, or cores / ranks.
int default_num_threads(int ranks_here);

}  // namespace deep_moe::cpu
