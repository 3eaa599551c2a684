#include "runtime/process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>

#include "layout/hash.hpp"

namespace deep_moe {
namespace {

std::atomic<std::uint64_t> forks{0};

// A fixed table of atomics: the child's handler may run while another thread was changing it, so it takes no lock.
constexpr int kMaxDescriptors = 8192;
std::atomic<int> descriptors[kMaxDescriptors];  // fd + 1; 0: empty

void after_fork_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (auto& entry : descriptors) {
    const int fd = entry.exchange(0, std::memory_order_relaxed) - 1;
    if (fd >= 0) ::close(fd);
  }
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = layout::kFnvStart;
  for (const char c : text) hash = layout::fnv_step(hash, static_cast<unsigned char>(c));
  return hash;
}

struct Registration {
  Registration() { ::pthread_atfork(nullptr, nullptr, after_fork_in_child); }
} registration;

}  // namespace

std::uint64_t fork_count() { return forks.load(std::memory_order_relaxed); }

std::uint64_t random_uid() {
  std::random_device random;
  return (static_cast<std::uint64_t>(random()) << 32) | random() | 1;
}

std::uint64_t process_uid() {
  static const std::uint64_t first = random_uid();
  return first ^ (fork_count() << 48) ^ static_cast<std::uint64_t>(::getpid());
}

// Containers of one machine may have networks of their own, and machines that are copies of one may have the same boot.
std::uint64_t machine_uid() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  char network[64] = {};
  if (::readlink("/proc/self/ns/net", network, sizeof(network) - 1) < 0) network[0] = '\0';
  return hash_of(text + " " + name + " " + network);
}

std::uint64_t host_uid() {
  const char* name = std::getenv("DEEP_MOE_HOST_ID");
  return name != nullptr && *name != '\0' ? hash_of(name) : machine_uid();
}

void close_in_child(int fd) {
  for (auto& entry : descriptors) {
    int empty = 0;
    if (entry.load(std::memory_order_relaxed) == 0 && entry.compare_exchange_strong(empty, fd + 1)) return;
  }
}

void forget_close_in_child(int fd) {
  for (auto& entry : descriptors) {
    int expected = fd + 1;
    if (entry.load(std::memory_order_relaxed) == expected && entry.compare_exchange_strong(expected, 0)) return;
  }
}

}  // namespace deep_moe
