#include "cuda/spill.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "cuda/call_streams.hpp"
#include "cuda/driver.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {

Spill::Spill(std::size_t bytes, int device, Stream comm, Stream work, Stream user,
             std::function<Stream()> current_stream)
    : bytes_(bytes),
      device_(device),
      comm_(comm),
      current_stream_(std::move(current_stream)),
      forks_(fork_count()),
      users_{user} {
  void* memory = nullptr;
  check_runtime(cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(work)), "cudaMallocAsync");
  data_ = static_cast<char*>(memory);
}

Spill::~Spill() {
  if (forks_ != fork_count()) return;
  const OnDevice on_device = OnDevice::quiet(device_);
  if (!on_device) return;
  const OutsideCapture outside_capture;
  cudaEvent_t event;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return;
  const auto comm = static_cast<cudaStream_t>(comm_);
  users_.push_back(current_stream_ ? current_stream_() : nullptr);
  const bool all_follow = std::all_of(users_.begin(), users_.end(), [&](Stream user) {
    return cudaEventRecord(event, static_cast<cudaStream_t>(user)) == cudaSuccess &&
           cudaStreamWaitEvent(comm, event, 0) == cudaSuccess;
  });
  if (all_follow) cudaFreeAsync(data_, comm);  // else it stays: somebody may use it yet
  cudaEventDestroy(event);
}

bool Spill::record_stream(const void* address, Stream stream) {
  if (address < data_ || address >= data_ + bytes_) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
  return true;
}

void Spills::add(const std::shared_ptr<Spill>& spill) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(spills_, [](const std::weak_ptr<Spill>& known) { return known.expired(); });
  spills_.push_back(spill);
}

bool Spills::record_stream(const void* address, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(spills_.begin(), spills_.end(), [&](const std::weak_ptr<Spill>& known) {
    const std::shared_ptr<Spill> spill = known.lock();
    return spill && spill->record_stream(address, stream);
  });
}

}  // namespace deep_moe::cuda
