#include <cuda_runtime.h>

#include <thread>

namespace emulation {
namespace {

constexpr std::size_t kStackBytes = std::size_t{96} << 10;
thread_local Block* block_here = nullptr;

}  // namespace

Block& Block::here() { return *block_here; }

Block::Block(unsigned index, unsigned num_blocks, unsigned num_threads, std::function<void()> kernel)
    : block_idx{index, 0, 0},
      grid_dim{num_blocks, 1, 1},
      block_dim{num_threads, 1, 1},
      kernel_(std::move(kernel)),
      fibers_(num_threads),
      warps_(num_threads / 32),
      live_lanes_(num_threads / 32, 32),
      lanes_(num_threads / 32) {}

void Block::enter() {
  here().kernel_();
  here().leave();
}

void Block::run() {
  block_here = this;
  live_ = static_cast<int>(fibers_.size());
  for (int i = 0; i < live_; ++i) {
    Fiber& fiber = fibers_[static_cast<std::size_t>(i)];
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
    ready_.push_back(i);
  }
  for (unsigned switches = 1; live_ > 0; ++switches) {
    if (ready_.empty()) std::abort();                    // fibers wait at barriers that others will never reach
    if (switches % 256 == 0) std::this_thread::yield();  // there are more blocks than cores
    current_ = ready_.front();
    ready_.pop_front();
    swapcontext(&scheduler_, &fibers_[static_cast<std::size_t>(current_)].context);
  }
  block_here = nullptr;
}

void Block::yield() {
  Fiber& fiber = fibers_[static_cast<std::size_t>(current_)];
  ready_.push_back(current_);
  swapcontext(&fiber.context, &scheduler_);
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
  swapcontext(&fiber.context, &scheduler_);
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

}  // namespace emulation
