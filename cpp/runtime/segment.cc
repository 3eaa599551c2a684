#include "runtime/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include <deep_moe/error.hpp>

namespace deep_moe {
namespace {

char* map_shared(int fd, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    throw Error("cannot map a segment of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  // Fewer page faults where the kernel gives huge pages to shared memory; no harm where it does not.
  ::madvise(base, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(base);
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
