// Device memory that other ranks can map: other processes by file descriptor, fabric handle or CUDA IPC handle, threads
// of this process by its address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/segment.hpp"

namespace deep_moe::cuda {

enum class MemoryKind : std::uint32_t {
  kAuto = 0,    // kDescriptor, or kIpc where the driver refuses that
  kDescriptor,  // virtual memory management, passed as a file descriptor
  kFabric,      // the same, passed as a fabric handle; kAuto where the machine has no fabric
  kIpc,         // cudaMalloc memory, passed as a CUDA IPC handle; freeing it waits for the kernels of the device
};
const char* memory_kind_name(MemoryKind kind);
// "auto", "fd", "fabric" or "ipc"; throws ArgumentError otherwise.
MemoryKind memory_kind(const std::string& name);

// How a peer process maps a segment; with kDescriptor an fd travels beside it.
struct Ticket {
  MemoryKind kind = MemoryKind::kAuto;
  std::uint64_t bytes = 0;
  std::array<char, 64> handle{};
};

// Nothing here waits for kernels; whoever drops the last reference sees to it that no kernel uses the memory any more.
class DeviceSegment final : public Segment {
 public:
  // At least `bytes` on `device`, rounded up to the granularity of the kind. Throws Error with the bytes and the
  // reason.
  static std::shared_ptr<DeviceSegment> create(int device, std::size_t bytes, MemoryKind kind);
  // Maps a peer process's memory for kernels of `device`; takes `fd` (-1 where the kind has none). Throws Error.
  static std::shared_ptr<DeviceSegment> map(int device, const Ticket& ticket, int fd);
  ~DeviceSegment() override;

  MemoryKind kind() const { return kind_; }
  int device() const { return device_; }
  Ticket ticket() const;
  int export_fd() const;  // a new descriptor, the caller's; -1 where the kind has none
  // Lets kernels of another device of this process use it (thread safe).
  void grant(int device);

 private:
  DeviceSegment(int device, MemoryKind kind);
  void create_vmm(std::size_t bytes, bool fabric);
  void create_ipc(std::size_t bytes);
  void map_vmm();

  const int device_;
  MemoryKind kind_;
  bool owner_ = true;
  const std::uint64_t forks_;
  std::uint64_t allocation_ = 0;  // CUmemGenericAllocationHandle; held while mapped
  bool reserved_ = false, mapped_ = false;
  std::mutex mutex_;
  std::vector<int> granted_;
};

// Throws Error that names both devices if kernels of `device` cannot use the memory of `peer_device`.
void check_peer_access(int device, int peer_device);

// A device's identity, equal in every process that sees it.
std::array<char, 16> device_uuid(int device);
int find_device(const std::array<char, 16>& uuid);  // -1: not visible here

}  // namespace deep_moe::cuda
