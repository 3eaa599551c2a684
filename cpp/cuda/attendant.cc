#include "cuda/attendant.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

// A process that ends takes CUDA down while attendants may run: they stop before. The handler is registered once CUDA
// is in use, so it runs before CUDA's own.
struct ProcessEnd {
  std::shared_mutex serving;
  bool ended = false;

  ProcessEnd() {
    std::atexit([] { process_end().stop(); });
  }
  static ProcessEnd& process_end() {
    static auto* end = new ProcessEnd;
    return *end;
  }
  void stop() {
    const std::lock_guard<std::shared_mutex> lock(serving);
    ended = true;
  }
};

}  // namespace

Attendant::Attendant(const ControlChannel& channel, std::function<void()> serve) {
  ProcessEnd::process_end();
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw Error(std::string("eventfd failed: ") + std::strerror(errno));
  close_in_child(wake_fd_);
  // Signals are the business of the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([&channel, serve = std::move(serve), wake_fd = wake_fd_] {
    for (;;) {
      channel.wait_readable(wake_fd);
      std::uint64_t woken = 0;
      if (::read(wake_fd, &woken, sizeof(woken)) == static_cast<ssize_t>(sizeof(woken))) return;
      ProcessEnd& end = ProcessEnd::process_end();
      const std::shared_lock<std::shared_mutex> lock(end.serving);
      if (end.ended) return;
      serve();
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Attendant::~Attendant() {
  const std::uint64_t wake = 1;
  while (::write(wake_fd_, &wake, sizeof(wake)) < 0 && errno == EINTR) {
  }
  thread_.join();
  forget_close_in_child(wake_fd_);
  ::close(wake_fd_);
}

}  // namespace deep_moe::cuda
