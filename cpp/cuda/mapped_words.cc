#include "cuda/mapped_words.hpp"

#include <cstring>
#include <map>
#include <mutex>

#include <deep_moe/error.hpp>

#include "cuda/driver.hpp"
#include "layout/workspace.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

constexpr std::size_t kPageBytes = 4096;

struct Kept {
  std::mutex mutex;
  std::multimap<std::size_t, char*> by_bytes;
};

Kept& kept() {
  static auto* kept = new Kept;
  return *kept;
}

}  // namespace

MappedWords::MappedWords(int device, std::size_t bytes)
    : bytes_(layout::align_up(bytes, kPageBytes)), forks_(fork_count()) {
  const OnDevice on_device(device);
  const OutsideCapture outside_capture;
  {
    Kept& all = kept();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.by_bytes.find(bytes_);
    if (found != all.by_bytes.end()) {
      host_ = found->second;
      all.by_bytes.erase(found);
    }
  }
  if (host_ == nullptr) {
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, bytes_, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE),
          "cuMemHostAlloc", " for " + std::to_string(bytes_) + " bytes");
    host_ = static_cast<char*>(memory);
  }
  CUdeviceptr mapped = 0;
  const CUresult status = driver().cuMemHostGetDevicePointer(&mapped, host_, 0);
  if (status != CUDA_SUCCESS) keep();
  check(status, "cuMemHostGetDevicePointer");
  mapped_ = to_pointer(mapped);
  std::memset(host_, 0, bytes_);
}

void MappedWords::keep() noexcept {
  Kept& all = kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_bytes.emplace(bytes_, host_);
}

MappedWords::~MappedWords() {
  if (forks_ == fork_count()) keep();
}

}  // namespace deep_moe::cuda
