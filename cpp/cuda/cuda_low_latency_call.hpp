// A low-latency call whose receive half has yet to be launched; for the files that make up LowLatency.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/cuda_low_latency.hpp"

namespace deep_moe::cuda {

struct LowLatency::InFlight {
  const char* name = "";
  Launch launch;               // empty once the receive half has been launched
  std::shared_ptr<void> keep;  // tensors
  std::vector<char*> blocks;   // their memory
  LowLatencyStreams streams;
  std::shared_ptr<void> staging;
  std::int64_t* complete = nullptr;  // of the handle's meta
  std::uint64_t generation = 0;
  bool hook_called = false;
};

}  // namespace deep_moe::cuda
