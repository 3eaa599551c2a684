#include "cpu/worker_pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <system_error>

#include <deep_moe/error.hpp>

namespace deep_moe::cpu {

WorkerPool::WorkerPool(int num_threads) {
  try {
    for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { run(index); });
  } catch (const std::system_error& error) {
    stop();
    throw Error("cannot start " + std::to_string(num_threads) + " threads (DEEP_MOE_CPU_THREADS): " + error.what());
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::run(int index) {
  std::uint64_t seen = 0;
  for (;;) {
    const std::function<void(std::int64_t, std::int64_t)>* body;
    std::int64_t begin, end;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      body = body_;
      begin = std::min(count_, index * part_);
      end = std::min(count_, begin + part_);
    }
    if (begin < end) (*body)(begin, end);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--pending_ == 0) done_.notify_one();
  }
}

void WorkerPool::parallel_for(std::int64_t count, std::int64_t grain,
                              const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  if (threads_.empty() || count <= grain) return body(0, count);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    count_ = count;
    part_ = std::max(grain, (count + num_threads() - 1) / num_threads());
    pending_ = static_cast<int>(threads_.size());
    ++round_;
  }
  start_.notify_all();
  body(0, std::min(count, part_));
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return pending_ == 0; });
}

int default_num_threads(int ranks_here) {
  if (const char* text = std::getenv("DEEP_MOE_CPU_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < 1 || value > 1024)
      throw ArgumentError(std::string("DEEP_MOE_CPU_THREADS: got '") + text + "', expected 1 to 1024");
    return static_cast<int>(value);
  }
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::clamp(cores / std::max(1, ranks_here), 1, 16);
}

}  // namespace deep_moe::cpu
