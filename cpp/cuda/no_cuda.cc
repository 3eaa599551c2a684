// cuda/device.hpp and the maker of DeviceWorld in a build without CUDA.
#include <deep_moe/error.hpp>

#include "cuda/device_world.hpp"
#include "runtime/buffer_impl.hpp"

namespace deep_moe::cuda {
namespace {

const char* const kReason =
    "this build of deep_moe has no CUDA part. Install a CUDA package (deep-moe-cu12 or deep-moe-cu13), or build from "
    "source where nvcc is found (DEEP_MOE_CUDA=ON)";

}  // namespace

bool available(std::string* reason) {
  if (reason != nullptr) *reason = kReason;
  return false;
}

int num_devices() { return 0; }

int current_device() { throw UnavailableError(kReason); }

std::string device_name(int device) { return "GPU " + std::to_string(device); }

std::shared_ptr<DeviceWorld> make_device_world(const Bootstrap&, const DeviceWorldOptions&) {
  throw UnavailableError(kReason);
}

std::shared_ptr<Buffer::Impl> make_buffer(const Bootstrap&, const BufferOptions&) { throw UnavailableError(kReason); }

}  // namespace deep_moe::cuda

namespace deep_moe {
bool cuda_transport_compiled() { return false; }
}  // namespace deep_moe
