#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdio>
#include <latch>
#include <mutex>
#include <thread>
#include <utility>

namespace emulation {
namespace {

constexpr std::size_t kStackBytes = std::size_t{96} << 10;
thread_local Block* block_here = nullptr;
std::atomic<std::uint64_t> num_blocks_so_far{0};
// Kept for the blocks to come: clean memory for each fiber took a third of the time.
thread_local std::vector<std::unique_ptr<char[]>> stacks;

}  // namespace

Block& Block::here() { return *block_here; }

Block::Block(unsigned index, unsigned num_blocks, unsigned num_threads, std::function<void()> kernel)
    : block_idx{index, 0, 0},
      grid_dim{num_blocks, 1, 1},
      block_dim{num_threads, 1, 1},
      kernel_(std::move(kernel)),
      launch_(++num_blocks_so_far),
      fibers_(num_threads),
      warps_(num_threads / 32),
      live_lanes_(num_threads / 32, 32),
      lanes_(num_threads / 32) {}

void Block::enter() {
  Block& block = here();
  block.kernel_();
  block.leave();
  _longjmp(block.scheduler_, 1);
}

// A context starts a fiber alone: to switch by contexts takes a system call each time, to jump takes none.
[[gnu::noinline]] void Block::resume(Fiber& fiber) {
  if (_setjmp(scheduler_) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

[[gnu::noinline]] void Block::suspend(Fiber& fiber) {
  if (_setjmp(fiber.at) == 0) _longjmp(scheduler_, 1);
}

void Block::run() {
  block_here = this;
  live_ = static_cast<int>(fibers_.size());
  for (int i = 0; i < live_; ++i) {
    Fiber& fiber = fibers_[static_cast<std::size_t>(i)];
    const auto number = static_cast<std::size_t>(i);
    if (stacks.size() == number) stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks[number].get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, &Block::enter, 0);
    ready_.push_back(i);
  }
  for (unsigned switches = 1; live_ > 0; ++switches) {
    if (ready_.empty()) give_up();
    if (switches % 256 == 0) std::this_thread::yield();  // there are more blocks than cores
    current_ = ready_.front();
    ready_.pop_front();
    resume(fibers_[static_cast<std::size_t>(current_)]);
  }
  block_here = nullptr;
}

// Fibers wait at barriers that others will never reach.
void Block::give_up() const {
  std::fprintf(stderr, "block %u of %u: %d threads of %zu are left, none can go on; at __syncthreads: %zu", block_idx.x,
               grid_dim.x, live_, fibers_.size(), all_.waiting.size());
  for (std::size_t warp = 0; warp < warps_.size(); ++warp)
    if (!warps_[warp].waiting.empty()) std::fprintf(stderr, "; in warp %zu: %zu", warp, warps_[warp].waiting.size());
  for (int id = 0; id < 16; ++id)
    if (named_[id].arrived > 0)
      std::fprintf(stderr, "; at barrier %d: %d, %zu waiting", id, named_[id].arrived, named_[id].waiting.size());
  std::fprintf(stderr, "\n");
  std::abort();
}

void Block::yield() {
  Fiber& fiber = fibers_[static_cast<std::size_t>(current_)];
  ready_.push_back(current_);
  suspend(fiber);
}

void Block::release_if_complete(Barrier& barrier, int needed) {
  if (barrier.waiting.empty() || static_cast<int>(barrier.waiting.size()) < needed) return;
  for (const int fiber : barrier.waiting) ready_.push_back(fiber);
  barrier.waiting.clear();
}

void Block::wait(Barrier& barrier, int needed) {
  Fiber& fiber = fibers_[static_cast<std::size_t>(current_)];
  barrier.waiting.push_back(current_);
  release_if_complete(barrier, needed);
  suspend(fiber);
}

void Block::named_barrier(int id, int num_threads, bool waits) {
  NamedBarrier& barrier = named_[id];
  const int fiber = current_;
  if (waits) barrier.waiting.push_back(fiber);
  if (++barrier.arrived == num_threads) {
    for (const int waiting : barrier.waiting) ready_.push_back(waiting);
    barrier.waiting.clear();
    barrier.arrived = 0;
  }
  if (waits) suspend(fibers_[static_cast<std::size_t>(fiber)]);
}

// Those who have returned are not waited for.
void Block::leave() {
  --live_;
  --live_lanes_[warp()];
  release_if_complete(warps_[warp()], live_lanes_[warp()]);
  release_if_complete(all_, live_);
}

const std::uint64_t* Block::exchange(std::uint64_t value) {
  auto& lanes = lanes_[warp()];
  lanes[static_cast<std::size_t>(current_ % 32)] = value;
  sync_warp();
  return lanes.data();
}

// Three counts in turn: that of the next call is cleared while nobody can be in it.
int Block::count_threads(bool vote) {
  const unsigned call = fibers_[static_cast<std::size_t>(current_)].votes++;
  votes_[(call + 1) % 3] = 0;
  votes_[call % 3] += vote;
  sync_threads();
  return votes_[call % 3];
}

namespace {

// Threads that wait for their next block. Never ended: the process does that.
class Workers {
 public:
  void start(const std::function<void()>& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) {
      idle_.push_back(new Worker);
      std::thread([this, worker = idle_.back()] { serve(*worker); }).detach();
    }
    Worker* worker = idle_.back();
    idle_.pop_back();
    worker->work = work;
    worker->ready.notify_one();
  }

 private:
  struct Worker {
    std::function<void()> work;
    std::condition_variable ready;
  };
  void serve(Worker& worker) {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      worker.ready.wait(lock, [&] { return worker.work != nullptr; });
      const std::function<void()> work = std::exchange(worker.work, nullptr);
      lock.unlock();
      work();
      lock.lock();
      idle_.push_back(&worker);
    }
  }

  std::mutex mutex_;
  std::vector<Worker*> idle_;
};

}  // namespace

void run_blocks(int num_blocks, const std::function<void(int)>& body) {
  static auto* const workers = new Workers;
  const auto left = std::make_shared<std::latch>(num_blocks);
  for (int block = 0; block < num_blocks; ++block)
    workers->start([&body, block, left] {
      body(block);
      left->count_down();
    });
  left->wait();
}

}  // namespace emulation
