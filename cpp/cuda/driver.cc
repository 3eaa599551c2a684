#include "cuda/driver.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include <deep_moe/error.hpp>

namespace deep_moe::cuda {
namespace {

std::string describe_runtime(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

// The version whose signatures cuda.h declares: that of the toolkit.
void* find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, CUDA_VERSION, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (status == cudaSuccess && result == cudaDriverEntryPointSuccess && function != nullptr) return function;
  cudaGetLastError();
  int version = 0;
  cudaDriverGetVersion(&version);
  throw UnavailableError("the CUDA driver of this machine (for CUDA " + std::to_string(version / 1000) + "." +
                         std::to_string(version % 1000 / 10) + ") has no function " + name +
                         ": install a newer driver");
}

std::atomic<const Driver*> loaded{nullptr};

const Driver* load() {
  std::string reason;
  if (!available(&reason)) throw UnavailableError("no CUDA device can be used: " + reason);
  auto* table = new Driver;  // kept: destructors use it after static objects are gone
#define DEEP_MOE_DRIVER_LOOK_UP(name) table->name = reinterpret_cast<decltype(table->name)>(find(#name));
  DEEP_MOE_DRIVER_FUNCTIONS(DEEP_MOE_DRIVER_LOOK_UP)
#undef DEEP_MOE_DRIVER_LOOK_UP
  return table;
}

}  // namespace

bool available(std::string* reason) {
  const auto no = [&](const std::string& why) {
    if (reason != nullptr) *reason = why;
    cudaGetLastError();  // ours, not the next caller's
    return false;
  };
  int version = 0;
  const cudaError_t known = cudaDriverGetVersion(&version);
  if (known != cudaSuccess) return no(describe_runtime(known));
  if (version == 0) return no("no CUDA driver is installed (libcuda.so.1 was not found)");
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInitializationError)
    return no("CUDA cannot be used here: " + describe_runtime(counted) +
              "; a process that was forked after its parent had used CUDA cannot use it: start it by exec (spawn)");
  if (counted != cudaSuccess) return no(describe_runtime(counted));
  if (count == 0) return no("a CUDA driver is installed, but no GPU is visible (CUDA_VISIBLE_DEVICES?)");
  return true;
}

int num_devices() {
  int count = 0;
  return available() && cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int current_device() {
  driver();
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) throw Error("cudaGetDevice failed: " + describe_runtime(status));
  return device;
}

std::string device_name(int device) {
  cudaDeviceProp properties{};
  std::string name = "GPU " + std::to_string(device);
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
    name += std::string(" (") + properties.name + ")";
  } else {
    cudaGetLastError();
  }
  return name;
}

const Driver& driver() {
  static const Driver* table = load();  // if that throws, the next call tries again
  loaded.store(table, std::memory_order_release);
  return *table;
}

const Driver* driver_if_loaded() noexcept { return loaded.load(std::memory_order_acquire); }

std::string describe(CUresult status) {
  const char *name = nullptr, *text = nullptr;
  if (driver().cuGetErrorName(status, &name) != CUDA_SUCCESS) name = nullptr;
  if (driver().cuGetErrorString(status, &text) != CUDA_SUCCESS) text = nullptr;
  return std::string(name ? name : ("CUDA error " + std::to_string(status)).c_str()) + " (" +
         (text ? text : "no text") + ")";
}

void check(CUresult status, const char* call, const std::string& about) {
  if (status != CUDA_SUCCESS) throw Error(std::string(call) + " failed" + about + ": " + describe(status));
}

int attribute(int device, CUdevice_attribute which) {
  CUdevice handle;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", " for device " + std::to_string(device));
  int value = 0;
  return driver().cuDeviceGetAttribute(&value, which, handle) == CUDA_SUCCESS ? value : 0;
}

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static auto* contexts = new std::vector<CUcontext>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (static_cast<std::size_t>(device) >= contexts->size()) contexts->resize(static_cast<std::size_t>(device) + 1);
  CUcontext& context = (*contexts)[static_cast<std::size_t>(device)];
  if (context == nullptr) {
    CUdevice handle;
    check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", " for device " + std::to_string(device));
    check(driver().cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain",
          " for " + device_name(device));
  }
  return context;
}

OnDevice::OnDevice(int device) {
  check(driver().cuCtxPushCurrent(primary_context(device)), "cuCtxPushCurrent", " for " + device_name(device));
  pushed_ = true;
}

OnDevice OnDevice::quiet(int device) noexcept {
  try {
    if (driver_if_loaded() != nullptr) return OnDevice(device);
  } catch (...) {  // the driver is shutting down
  }
  return OnDevice();
}

OnDevice::~OnDevice() {
  CUcontext context;
  if (pushed_) driver_if_loaded()->cuCtxPopCurrent(&context);
}

OutsideCapture::OutsideCapture() noexcept {
  const Driver* table = driver_if_loaded();
  exchanged_ = table != nullptr && table->cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
}

OutsideCapture::~OutsideCapture() {
  if (exchanged_) driver_if_loaded()->cuThreadExchangeStreamCaptureMode(&mode_);
}

Capture capture_of(Stream stream) noexcept {
  Capture capture;
  const Driver* table = driver_if_loaded();
  if (table == nullptr) return capture;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
#if CUDA_VERSION >= 13000
  const CUresult result = table->cuStreamGetCaptureInfo(static_cast<CUstream>(stream), &status, &capture.id,
                                                        &capture.graph, nullptr, nullptr, nullptr);
#else
  const CUresult result = table->cuStreamGetCaptureInfo(static_cast<CUstream>(stream), &status, &capture.id,
                                                        &capture.graph, nullptr, nullptr);
#endif
  capture.active = result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  capture.known = capture.active || (result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE);
  return capture;
}

}  // namespace deep_moe::cuda
