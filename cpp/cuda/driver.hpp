// The CUDA driver's functions, looked up when first needed: nothing links libcuda, so that the library loads and its
// CPU backend works where there is no driver. For .cc files of this folder.
#pragma once

#include <cuda.h>

#include <string>

#include "cuda/device.hpp"

namespace deep_moe::cuda {

// The functions in use, with the signatures of the toolkit that this is compiled with.
#define DEEP_MOE_DRIVER_FUNCTIONS(X)   \
  X(cuGetErrorName)                    \
  X(cuGetErrorString)                  \
  X(cuDeviceGet)                       \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceGetUuid)                   \
  X(cuDeviceCanAccessPeer)             \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuCtxGetStreamPriorityRange)       \
  X(cuCtxEnablePeerAccess)             \
  X(cuMemGetAllocationGranularity)     \
  X(cuMemCreate)                       \
  X(cuMemRelease)                      \
  X(cuMemAddressReserve)               \
  X(cuMemAddressFree)                  \
  X(cuMemMap)                          \
  X(cuMemUnmap)                        \
  X(cuMemSetAccess)                    \
  X(cuMemExportToShareableHandle)      \
  X(cuMemImportFromShareableHandle)    \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuIpcGetMemHandle)                 \
  X(cuIpcOpenMemHandle)                \
  X(cuIpcCloseMemHandle)               \
  X(cuMemHostAlloc)                    \
  X(cuMemHostGetDevicePointer)         \
  X(cuMemFreeHost)                     \
  X(cuMemsetD8Async)                   \
  X(cuMemcpyHtoDAsync)                 \
  X(cuMemcpyDtoHAsync)                 \
  X(cuStreamCreateWithPriority)        \
  X(cuStreamDestroy)                   \
  X(cuStreamQuery)                     \
  X(cuStreamWaitEvent)                 \
  X(cuStreamGetCaptureInfo)            \
  X(cuStreamGetId)                     \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuEventQuery)                      \
  X(cuUserObjectCreate)                \
  X(cuUserObjectRelease)               \
  X(cuGraphRetainUserObject)

struct Driver {
#define DEEP_MOE_DRIVER_MEMBER(name) decltype(&::name) name;
  DEEP_MOE_DRIVER_FUNCTIONS(DEEP_MOE_DRIVER_MEMBER)
#undef DEEP_MOE_DRIVER_MEMBER
};

// Throws UnavailableError with what available() says, or the name of a function that the driver lacks.
const Driver& driver();
// The same where some call has been through before; for destructors.
const Driver* driver_if_loaded() noexcept;

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
std::string describe(CUresult status);
// Throws Error "<call> failed<about>: <describe(status)>".
void check(CUresult status, const char* call, const std::string& about = {});

int attribute(int device, CUdevice_attribute which);

// The context that the runtime and frameworks use; kept for the process's life.
CUcontext primary_context(int device);

// Makes a device current for a scope, by its primary context.
class OnDevice {
 public:
  explicit OnDevice(int device);               // throws Error
  static OnDevice quiet(int device) noexcept;  // false where there is no driver any more (at exit)
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  explicit operator bool() const { return pushed_; }

 private:
  OnDevice() = default;
  bool pushed_ = false;
};

// Calls in this scope neither disturb nor join a capture that this or another thread has under way.
class OutsideCapture {
 public:
  OutsideCapture() noexcept;
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_ = false;
};

// What a stream is captured into.
struct Capture {
  bool active = false;
  bool known = true;  // false: the legacy stream while some other stream is captured; nothing can be recorded on it
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
};
Capture capture_of(Stream stream) noexcept;

inline CUdeviceptr to_device(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }
inline char* to_pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

}  // namespace deep_moe::cuda
