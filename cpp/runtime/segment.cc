#include "runtime/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <mutex>
#include <unordered_map>

#include <deep_moe/error.hpp>

namespace deep_moe {
namespace {

constexpr std::size_t kCheckedBytes = std::size_t{64} << 20;  // smaller segments are not worth the look

char* map_shared(int fd, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    throw Error("cannot map a segment of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  // Fewer page faults where the kernel gives huge pages to shared memory; no harm where it does not.
  ::madvise(base, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(base);
}

// Shared memory that does not fit is not refused by every kernel: some end processes instead. So ask first. Returns the
// bytes that can be had, by the machine's and by this control group's account; the largest number if neither is known.
std::size_t available_memory() {
  std::size_t available = std::numeric_limits<std::size_t>::max();
  std::ifstream memory("/proc/meminfo");
  for (std::string key; memory >> key;) {
    std::size_t kilobytes = 0;
    if (key == "MemAvailable:" && memory >> kilobytes) available = kilobytes << 10;
    memory.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  std::size_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && std::ifstream("/sys/fs/cgroup/memory.current") >> used)
    available = std::min(available, limit > used ? limit - used : 0);
  return available;
}

struct LocalSegments {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::unordered_map<int, std::weak_ptr<Segment>>> by_domain;
};

LocalSegments& local_segments() {
  static auto* segments = new LocalSegments;  // never destroyed: tensors may die after static destructors have run
  return *segments;
}

}  // namespace

std::shared_ptr<Segment> HostSegment::create(std::size_t bytes) {
  if (bytes >= kCheckedBytes) {
    if (const std::size_t available = available_memory(); bytes > available)
      throw Error("cannot get " + std::to_string(bytes) + " bytes of shared memory: " + std::to_string(available) +
                  " bytes are available on this machine");
  }
  const int fd = ::memfd_create("deep_moe", MFD_CLOEXEC);
  if (fd < 0) throw Error(std::string("cannot make shared memory (memfd_create): ") + std::strerror(errno));
  int status;
  do {
    status = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (status != 0 && errno == EINTR);
  if (status != 0) {
    const std::string reason = std::strerror(errno);
    ::close(fd);
    throw Error("cannot get " + std::to_string(bytes) + " bytes of shared memory: " + reason);
  }
  try {
    return std::shared_ptr<Segment>(new HostSegment(map_shared(fd, bytes), bytes, fd));
  } catch (...) {
    ::close(fd);
    throw;
  }
}

std::shared_ptr<Segment> HostSegment::map(int fd, std::size_t bytes) {
  try {
    std::shared_ptr<Segment> segment(new HostSegment(map_shared(fd, bytes), bytes, -1));
    ::close(fd);
    return segment;
  } catch (...) {
    ::close(fd);
    throw;
  }
}

HostSegment::~HostSegment() {
  ::munmap(base_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void register_local_segment(std::uint64_t domain_uid, int id, const std::shared_ptr<Segment>& segment) {
  LocalSegments& all = local_segments();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_domain[domain_uid][id] = segment;
}

std::shared_ptr<Segment> find_local_segment(std::uint64_t domain_uid, int id) {
  LocalSegments& all = local_segments();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto domain = all.by_domain.find(domain_uid);
  if (domain == all.by_domain.end()) return nullptr;
  const auto entry = domain->second.find(id);
  return entry == domain->second.end() ? nullptr : entry->second.lock();
}

void forget_local_segments(std::uint64_t domain_uid) {
  LocalSegments& all = local_segments();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_domain.erase(domain_uid);
}

}  // namespace deep_moe
