// The Buffer object itself: making it, its heap, its failures. The modes are in buffer_ht.cc and buffer_ll.cc.
#include <nanobind/stl/string.h>

#include <cstring>
#include <new>
#include <string>
#include <vector>

#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "buffer_object.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

// The Python function behind a Bootstrap. Emptied once the Buffer is made, so that a copy of the Bootstrap that lives
// longer holds no Python object.
struct Gather {
  nb::object function;

  void operator()(int size, const void* send, void* recv, std::size_t bytes) {
    nb::gil_scoped_acquire gil;
    if (!function.is_valid()) throw Error("the exchange between ranks is open only while a Buffer is made");
    nb::object parts = function(nb::bytes(send, bytes));
    char* to = static_cast<char*>(recv);
    if (nb::len(parts) != static_cast<std::size_t>(size)) {
      throw ArgumentError("allgather gave " + std::to_string(nb::len(parts)) + " items for " + std::to_string(size) +
                          " ranks");
    }
    for (int rank = 0; rank < size; ++rank, to += bytes) {
      nb::object part = parts[rank];
      if (!nb::isinstance<nb::bytes>(part) || nb::len(part) != bytes) {
        throw ArgumentError("allgather gave for rank " + std::to_string(rank) + " not the " + std::to_string(bytes) +
                            " bytes that were sent");
      }
      std::memcpy(to, nb::borrow<nb::bytes>(part).data(), bytes);
    }
  }
};

void construct(BufferObject* self, int rank, int size, const nb::object& all_gather, std::int64_t num_nvl_bytes,
               std::int64_t num_rdma_bytes, bool low_latency_mode, bool enable_shrink, double timeout_seconds,
               int device, bool use_fabric) {
  BufferOptions options;
  options.num_nvl_bytes = num_nvl_bytes;
  options.num_rdma_bytes = num_rdma_bytes;
  options.low_latency_mode = low_latency_mode;
  options.enable_shrink = enable_shrink;
  options.timeout_seconds = timeout_seconds;
  options.interrupt_check = check_signals;
  options.device = device;
  options.use_fabric = use_fabric;
  if (device != kCpuDevice) options.current_stream = [device] { return current_stream(device); };

  auto gather = std::make_shared<Gather>(Gather{all_gather});
  struct Close {
    Gather& gather;
    ~Close() { gather.function.reset(); }
  } close{*gather};
  Bootstrap bootstrap;
  bootstrap.rank = rank;
  bootstrap.size = size;
  bootstrap.all_gather = [gather, size](const void* send, void* recv, std::size_t bytes) {
    (*gather)(size, send, recv, bytes);
  };
  const CallStream stream(device);
  new (self) BufferObject(without_gil([&] { return std::make_unique<Buffer>(bootstrap, options); }));
}

nb::dict memory_stats(BufferObject& self) {
  const MemoryStats stats = self.run([](Buffer& buffer) { return buffer.memory_stats(); });
  nb::dict named;
  named["heap_bytes"] = stats.heap_bytes;
  named["live_bytes"] = stats.live_bytes;
  named["live_blocks"] = stats.live_blocks;
  named["quarantined_bytes"] = stats.quarantined_bytes;
  named["peak_bytes"] = stats.peak_bytes;
  named["free_bytes"] = stats.free_bytes;
  named["segments"] = stats.segments;
  named["largest_free_bytes"] = stats.largest_free_bytes;
  named["ll_staging_bytes"] = stats.ll_staging_bytes;
  return named;
}

nb::object empty(BufferObject& self, nb::handle shape, nb::handle dtype) {
  const DType type = dtype_of(dtype, "dtype");
  std::vector<std::int64_t> extents;
  if (PyTuple_Check(shape.ptr()) == 0 && PyList_Check(shape.ptr()) == 0) {
    extents.push_back(to_int(shape, "shape"));
  } else {
    for (nb::handle extent : shape) extents.push_back(to_int(extent, "shape"));
  }
  if (extents.size() > static_cast<std::size_t>(kMaxTensorDims)) {
    throw ArgumentError("shape has " + std::to_string(extents.size()) + " dimensions; at most " +
                        std::to_string(kMaxTensorDims) + " are taken");
  }
  for (const std::int64_t extent : extents) {
    if (extent < 0) throw ArgumentError("shape: no extent may be negative, got " + std::to_string(extent));
  }
  return to_torch(self.run([&](Buffer& buffer) { return buffer.empty(type, extents); }));
}

nb::object local_buffer(BufferObject& self, nb::handle offset, nb::handle num_bytes, bool use_rdma_buffer) {
  const std::int64_t begin = to_int(offset, "offset");
  const std::int64_t length = to_int(num_bytes, "num_bytes");
  return to_torch(self.run([&](Buffer& buffer) { return buffer.local_buffer(begin, length, use_rdma_buffer); }));
}

void record_stream(BufferObject& self, nb::handle tensor, nb::handle stream) {
  const TensorView view = self.required(tensor, "tensor");
  void* const handle = to_pointer(stream, "stream");
  self.run([&](Buffer& buffer) { buffer.record_stream(view, handle); });
}

void refuse(BufferObject& self, const std::string& call, const std::string& reason) {
  self.run([&](Buffer& buffer) { buffer.refuse(call, reason); });
}

}  // namespace

bool is_pair(nb::handle x) { return PyTuple_Check(x.ptr()) != 0 || PyList_Check(x.ptr()) != 0; }

TensorView BufferObject::required(nb::handle tensor, const char* name) const {
  const TensorView found = view(tensor, name);
  if (!found.defined()) throw ArgumentTypeError(std::string(name) + " must be a torch.Tensor, got None");
  return found;
}

Payload BufferObject::payload(nb::handle x) const {
  Payload payload;
  if (!is_pair(x)) {
    payload.data = view(x, "x");
    if (!payload.data.defined()) throw ArgumentTypeError("x must be a torch.Tensor or (data, scales), got None");
    return payload;
  }
  if (nb::len(x) != 2) throw ArgumentTypeError("x must be a torch.Tensor or (data, scales), got " + describe(x));
  payload.data = view(nb::object(x[0]), "x[0]");
  payload.scales = view(nb::object(x[1]), "x[1]");
  if (!payload.data.defined() || !payload.scales.defined()) {
    throw ArgumentTypeError("x must be a torch.Tensor or (data, scales), got a pair with None");
  }
  return payload;
}

nb::object payload_to_torch(OwnedPayload payload, bool as_pair) {
  nb::object data = to_torch(std::move(payload.data));
  if (!as_pair) return data;
  return nb::make_tuple(std::move(data), to_torch(std::move(payload.scales)));
}

void BufferObject::handle_items(nb::handle handle, const char* const* names, int count,
                                TensorView* const* views) const {
  if (!is_pair(handle) || nb::len(handle) != static_cast<std::size_t>(count)) {
    throw ArgumentTypeError("handle must be what the dispatch returned (" + std::to_string(count) +
                            " tensors, as any tuple), got " + describe(handle));
  }
  for (int item = 0; item < count; ++item) {
    const bool is_meta = item == count - 1;
    *views[item] = view_of(nb::object(handle[item]), names[item], is_meta ? kCpuDevice : device());
    if (!views[item]->defined())
      throw ArgumentTypeError(std::string(names[item]) + " must be a torch.Tensor, got None");
  }
}

nb::class_<BufferObject> register_buffer(nb::module_& m) {
  nb::class_<BufferObject> cls(m, "Buffer", "One rank's end of the exchange; deep_moe.Buffer wraps it.");
  cls.def("__init__", construct, nb::arg("rank"), nb::arg("size"), nb::arg("all_gather"), nb::arg("num_nvl_bytes"),
          nb::arg("num_rdma_bytes"), nb::arg("low_latency_mode"), nb::arg("enable_shrink"), nb::arg("timeout_seconds"),
          nb::arg("device"), nb::arg("use_fabric"),
          nb::sig("def __init__(self, rank: int, size: int, all_gather: "
                  "collections.abc.Callable[[bytes], collections.abc.Sequence[bytes]], num_nvl_bytes: int, "
                  "num_rdma_bytes: int, low_latency_mode: bool, enable_shrink: bool, timeout_seconds: float, "
                  "device: int, use_fabric: bool) -> None"),
          "Collective. all_gather is called a few times and only in here. device: a CUDA ordinal, or -1 for the CPU.");
  cls.def_prop_ro("rank", [](const BufferObject& self) { return self.buffer().rank(); });
  cls.def_prop_ro("num_ranks", [](const BufferObject& self) { return self.buffer().num_ranks(); });
  cls.def(
      "get_num_rdma_ranks", [](const BufferObject& self) { return self.buffer().num_nodes(); }, "Nodes of the group.");
  cls.def("get_rdma_rank", [](const BufferObject& self) { return self.buffer().node(); }, "This rank's node.");
  cls.def_prop_ro(
      "comm_stream",
      [](const BufferObject& self) { return reinterpret_cast<std::uintptr_t>(self.buffer().comm_stream()); },
      nb::sig("def comm_stream(self) -> int"), "The cudaStream_t of the Buffer's calls; 0 on the CPU.");
  cls.def("record_stream", record_stream, nb::arg("tensor").none(), nb::arg("stream").none(),
          nb::sig("def record_stream(self, tensor: torch.Tensor, stream: int) -> None"),
          "The memory of the tensor is reused only behind the work of this cudaStream_t too.");
  cls.def("empty", empty, nb::arg("shape").none(), nb::arg("dtype").none(),
          nb::sig("def empty(self, shape: int | collections.abc.Sequence[int], dtype: torch.dtype) -> torch.Tensor"),
          "A tensor in the heap.");
  cls.def("local_buffer", local_buffer, nb::arg("offset").none(), nb::arg("num_bytes").none(),
          nb::arg("use_rdma_buffer"),
          nb::sig("def local_buffer(self, offset: int, num_bytes: int, use_rdma_buffer: bool) -> torch.Tensor"),
          "[num_bytes] uint8 of scratch memory that no call uses.");
  cls.def_prop_ro(
      "memory_kind", [](BufferObject& self) { return self.run([](Buffer& buffer) { return buffer.memory_kind(); }); },
      nb::sig("def memory_kind(self) -> str"), "How ranks share memory: memfd, fd, fabric or ipc.");
  cls.def("memory_stats", memory_stats, nb::sig("def memory_stats(self) -> dict[str, int]"),
          "Bytes and blocks of the heap.");
  cls.def("refuse", refuse, nb::arg("call"), nb::arg("reason"),
          "Tells the peers that this rank refuses the arguments of its next call.");
  cls.def(
      "check", [](BufferObject& self) { self.run([](Buffer& buffer) { buffer.check(); }); },
      "Raises what has failed the Buffer, if anything.");
  cls.def(
      "reset", [](BufferObject& self) { self.run([](Buffer& buffer) { buffer.reset(); }); },
      "Collective, after a failure.");
  cls.def(
      "destroy", [](BufferObject& self) { self.run([](Buffer& buffer) { buffer.destroy(); }); },
      "Local and idempotent.");
  return cls;
}

}  // namespace deep_moe::python
