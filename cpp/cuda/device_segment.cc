#include "cuda/device_segment.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include <deep_moe/error.hpp>

#include "cuda/driver.hpp"
#include "layout/workspace.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

constexpr std::size_t kIpcGranularity = std::size_t{2} << 20;  // an allocation of its own, never part of another

static_assert(sizeof(CUmemFabricHandle) == 64 && sizeof(CUipcMemHandle) == 64);

CUmemAllocationProp vmm_properties(int device, bool fabric) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  const int types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | (fabric ? CU_MEM_HANDLE_TYPE_FABRIC : 0);
  properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
  return properties;
}

std::string of_bytes(std::size_t bytes, int device) {
  return " for " + std::to_string(bytes) + " bytes on " + device_name(device);
}

void set_access(CUdeviceptr base, std::size_t bytes, int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver().cuMemSetAccess(base, bytes, &access, 1), "cuMemSetAccess", of_bytes(bytes, device));
}

// Refusals that another kind of memory may get around; want of memory is none of them.
bool refused(CUresult status) {
  return status == CUDA_ERROR_NOT_SUPPORTED || status == CUDA_ERROR_NOT_PERMITTED ||
         status == CUDA_ERROR_INVALID_VALUE || status == CUDA_ERROR_INVALID_DEVICE;
}

bool can_make(int device, bool fabric) {
  if (attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) return false;
  if (attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0) return false;
  return !fabric || attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) != 0;
}

struct Refused : Error {
  using Error::Error;
};

}  // namespace

const char* memory_kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kAuto: return "auto";
    case MemoryKind::kDescriptor: return "fd";
    case MemoryKind::kFabric: return "fabric";
    case MemoryKind::kIpc: return "ipc";
  }
  return "unknown";
}

MemoryKind memory_kind(const std::string& name) {
  for (const MemoryKind kind : {MemoryKind::kAuto, MemoryKind::kDescriptor, MemoryKind::kFabric, MemoryKind::kIpc}) {
    if (name == memory_kind_name(kind)) return kind;
  }
  throw ArgumentError("DEEP_MOE_DEVICE_MEMORY: got '" + name + "', expected auto, fd, fabric or ipc");
}

DeviceSegment::DeviceSegment(int device, MemoryKind kind)
    : Segment(nullptr, 0), device_(device), kind_(kind), forks_(fork_count()) {}

std::shared_ptr<DeviceSegment> DeviceSegment::create(int device, std::size_t bytes, MemoryKind kind) {
  const OnDevice on_device(device);
  const OutsideCapture outside_capture;
  const auto made = [&](MemoryKind as, const auto& make) {
    std::shared_ptr<DeviceSegment> segment(new DeviceSegment(device, as));
    make(*segment);
    return segment;
  };
  if (kind == MemoryKind::kFabric && can_make(device, true)) {
    try {
      return made(MemoryKind::kFabric, [&](DeviceSegment& segment) { segment.create_vmm(bytes, true); });
    } catch (const Refused&) {  // a fabric that this process may not use
    }
  }
  if (kind == MemoryKind::kDescriptor || (kind != MemoryKind::kIpc && can_make(device, false))) {
    try {
      return made(MemoryKind::kDescriptor, [&](DeviceSegment& segment) { segment.create_vmm(bytes, false); });
    } catch (const Refused&) {
      if (kind == MemoryKind::kDescriptor) throw;
    }
  }
  return made(MemoryKind::kIpc, [&](DeviceSegment& segment) { segment.create_ipc(bytes); });
}

void DeviceSegment::create_vmm(std::size_t bytes, bool fabric) {
  const CUmemAllocationProp properties = vmm_properties(device_, fabric);
  std::size_t granularity = 0;
  const CUresult known =
      driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (refused(known)) throw Refused("cuMemGetAllocationGranularity failed: " + describe(known));
  check(known, "cuMemGetAllocationGranularity");
  bytes_ = layout::align_up(std::max<std::size_t>(bytes, 1), granularity);
  CUmemGenericAllocationHandle allocation = 0;
  const CUresult status = driver().cuMemCreate(&allocation, bytes_, &properties, 0);
  if (refused(status)) throw Refused("cuMemCreate failed" + of_bytes(bytes_, device_) + ": " + describe(status));
  check(status, "cuMemCreate", of_bytes(bytes_, device_));
  allocation_ = allocation;
  map_vmm();
}

void DeviceSegment::map_vmm() {
  CUdeviceptr base = 0;
  check(driver().cuMemAddressReserve(&base, bytes_, 0, 0, 0), "cuMemAddressReserve", of_bytes(bytes_, device_));
  base_ = to_pointer(base);
  reserved_ = true;
  check(driver().cuMemMap(base, bytes_, 0, allocation_, 0), "cuMemMap", of_bytes(bytes_, device_));
  mapped_ = true;
  set_access(base, bytes_, device_);
  granted_ = {device_};
}

void DeviceSegment::create_ipc(std::size_t bytes) {
  bytes_ = layout::align_up(std::max<std::size_t>(bytes, 1), kIpcGranularity);
  CUdeviceptr base = 0;
  check(driver().cuMemAlloc(&base, bytes_), "cuMemAlloc", of_bytes(bytes_, device_));
  base_ = to_pointer(base);
  mapped_ = true;
  granted_ = {device_};
}

std::shared_ptr<DeviceSegment> DeviceSegment::map(int device, const Ticket& ticket, int fd) {
  struct CloseFd {
    int fd;
    ~CloseFd() {
      if (fd >= 0) ::close(fd);
    }
  } const close_fd{fd};
  const OnDevice on_device(device);
  const OutsideCapture outside_capture;
  std::shared_ptr<DeviceSegment> segment(new DeviceSegment(device, ticket.kind));
  segment->owner_ = false;
  segment->bytes_ = ticket.bytes;
  if (ticket.kind == MemoryKind::kIpc) {
    CUipcMemHandle handle;
    std::memcpy(&handle, ticket.handle.data(), sizeof(handle));
    CUdeviceptr base = 0;
    check(driver().cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle",
          of_bytes(ticket.bytes, device));
    segment->base_ = to_pointer(base);
    segment->mapped_ = true;
    return segment;
  }
  CUmemGenericAllocationHandle allocation = 0;
  if (ticket.kind == MemoryKind::kFabric) {
    CUmemFabricHandle handle;
    std::memcpy(&handle, ticket.handle.data(), sizeof(handle));
    check(driver().cuMemImportFromShareableHandle(&allocation, &handle, CU_MEM_HANDLE_TYPE_FABRIC),
          "cuMemImportFromShareableHandle", of_bytes(ticket.bytes, device));
  } else {
    void* descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
    check(driver().cuMemImportFromShareableHandle(&allocation, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle", of_bytes(ticket.bytes, device));
  }
  segment->allocation_ = allocation;
  segment->map_vmm();
  return segment;
}

Ticket DeviceSegment::ticket() const {
  Ticket ticket;
  ticket.kind = kind_;
  ticket.bytes = bytes_;
  const OnDevice on_device(device_);
  if (kind_ == MemoryKind::kIpc) {
    CUipcMemHandle handle;
    check(driver().cuIpcGetMemHandle(&handle, to_device(base_)), "cuIpcGetMemHandle", of_bytes(bytes_, device_));
    std::memcpy(ticket.handle.data(), &handle, sizeof(handle));
  } else if (kind_ == MemoryKind::kFabric) {
    CUmemFabricHandle handle;
    check(driver().cuMemExportToShareableHandle(&handle, allocation_, CU_MEM_HANDLE_TYPE_FABRIC, 0),
          "cuMemExportToShareableHandle", of_bytes(bytes_, device_));
    std::memcpy(ticket.handle.data(), &handle, sizeof(handle));
  }
  return ticket;
}

int DeviceSegment::export_fd() const {
  if (kind_ != MemoryKind::kDescriptor) return -1;
  int fd = -1;
  check(driver().cuMemExportToShareableHandle(&fd, allocation_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle", of_bytes(bytes_, device_));
  return fd;
}

void DeviceSegment::grant(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(granted_.begin(), granted_.end(), device) != granted_.end()) return;
  check_peer_access(device, device_);
  if (kind_ == MemoryKind::kIpc) {
    const OnDevice on_device(device);
    const CUresult status = driver().cuCtxEnablePeerAccess(primary_context(device_), 0);
    if (status != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
      check(status, "cuCtxEnablePeerAccess", " from " + device_name(device) + " to " + device_name(device_));
  } else {
    set_access(to_device(base_), bytes_, device);
  }
  granted_.push_back(device);
}

DeviceSegment::~DeviceSegment() {
  // In a forked child the memory is the parent's, and CUDA cannot be called.
  if (forks_ != fork_count()) return;
  const OnDevice on_device = OnDevice::quiet(device_);
  if (!on_device) return;
  const OutsideCapture outside_capture;
  // Results are not looked at: at exit the driver may have let everything go already.
  const CUdeviceptr base = to_device(base_);
  if (kind_ == MemoryKind::kIpc) {
    if (mapped_) owner_ ? driver().cuMemFree(base) : driver().cuIpcCloseMemHandle(base);
    return;
  }
  if (mapped_) driver().cuMemUnmap(base, bytes_);
  if (reserved_) driver().cuMemAddressFree(base, bytes_);
  if (allocation_ != 0) driver().cuMemRelease(allocation_);
}

void check_peer_access(int device, int peer_device) {
  if (device == peer_device) return;
  CUdevice from, to;
  check(driver().cuDeviceGet(&from, device), "cuDeviceGet", " for device " + std::to_string(device));
  check(driver().cuDeviceGet(&to, peer_device), "cuDeviceGet", " for device " + std::to_string(peer_device));
  int can = 0;
  check(driver().cuDeviceCanAccessPeer(&can, from, to), "cuDeviceCanAccessPeer");
  if (can == 0)
    throw Error(device_name(device) + " cannot use the memory of " + device_name(peer_device) +
                ": the driver allows no peer-to-peer access between them (nvidia-smi topo -p2p rw shows which pairs "
                "have it)");
}

std::array<char, 16> device_uuid(int device) {
  CUdevice handle;
  CUuuid uuid{};
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", " for device " + std::to_string(device));
  check(driver().cuDeviceGetUuid(&uuid, handle), "cuDeviceGetUuid", " for " + device_name(device));
  std::array<char, 16> bytes;
  std::memcpy(bytes.data(), uuid.bytes, bytes.size());
  return bytes;
}

int find_device(const std::array<char, 16>& uuid) {
  for (int device = 0; device < num_devices(); ++device) {
    if (device_uuid(device) == uuid) return device;
  }
  return -1;
}

}  // namespace deep_moe::cuda
