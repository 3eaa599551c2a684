// What the rest of the library may ask about CUDA devices; no CUDA header. Works without a driver and in builds without
// CUDA.
#pragma once

#include <string>

namespace deep_moe::cuda {

using Stream = void*;  // a cudaStream_t

// True where this build has CUDA, a driver is installed and a GPU is visible; otherwise why not. Never throws.
bool available(std::string* reason = nullptr);

// Devices that are visible to this process; 0 where available() is false.
int num_devices();

// The device that is current on this thread. Throws UnavailableError where available() is false.
int current_device();

// "GPU 0 (NVIDIA H200)", for errors.
std::string device_name(int device);

}  // namespace deep_moe::cuda
