#include <deep_moe/bootstrap.hpp>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include <deep_moe/error.hpp>

namespace deep_moe {
namespace {

// One all-gather after the other; a round is open until its last rank has taken the result. Ranks that pass different
// numbers of bytes have lost each other for good.
class ThreadExchange {
 public:
  explicit ThreadExchange(int num_ranks) : num_ranks_(num_ranks) {}

  void all_gather(int rank, const void* send, void* recv, std::size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !leaving_ || broken_; });
    if (!broken_ && num_here_ == 0) data_.assign(bytes * static_cast<std::size_t>(num_ranks_), 0);
    if (data_.size() != bytes * static_cast<std::size_t>(num_ranks_)) {
      broken_ = true;
      changed_.notify_all();
    }
    check_broken();
    std::memcpy(data_.data() + bytes * static_cast<std::size_t>(rank), send, bytes);
    if (++num_here_ == num_ranks_) {
      leaving_ = true;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return leaving_ || broken_; });
    if (!leaving_) check_broken();
    std::memcpy(recv, data_.data(), data_.size());
    if (--num_here_ == 0) {
      leaving_ = false;
      changed_.notify_all();
    }
  }

 private:
  void check_broken() const {
    if (broken_) throw Error("all_gather: the ranks pass different numbers of bytes");
  }

  const int num_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> data_;
  int num_here_ = 0;
  bool leaving_ = false, broken_ = false;
};

}  // namespace

std::vector<Bootstrap> make_thread_bootstraps(int num_ranks) {
  if (num_ranks < 1) throw ArgumentError("num_ranks: got " + std::to_string(num_ranks) + ", expected >= 1");
  auto exchange = std::make_shared<ThreadExchange>(num_ranks);
  std::vector<Bootstrap> bootstraps;
  for (int rank = 0; rank < num_ranks; ++rank) {
    bootstraps.push_back({rank, num_ranks, [exchange, rank](const void* send, void* recv, std::size_t bytes) {
                            exchange->all_gather(rank, send, recv, bytes);
                          }});
  }
  return bootstraps;
}

}  // namespace deep_moe
