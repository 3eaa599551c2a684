// deep_moe::Buffer as a Python object: what the methods of all modes share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include <deep_moe/buffer.hpp>

#include "interrupts.hpp"
#include "streams.hpp"
#include "tensors.hpp"

namespace deep_moe::python {

// Methods take every argument as a bare Python object that may be None (nb::arg(...).none()) and convert it themselves,
// so that a refusal names the argument and reaches the peers.
class BufferObject {
 public:
  explicit BufferObject(std::unique_ptr<Buffer> buffer) : buffer_(std::move(buffer)) {}

  const Buffer& buffer() const { return *buffer_; }
  // Where tensors are: a CUDA ordinal or kCpuDevice.
  int device() const { return buffer_->options().device; }

  TensorView view(nanobind::handle tensor, const char* name) const { return view_of(tensor, name, device()); }
  // The same, refusing None.
  TensorView required(nanobind::handle tensor, const char* name) const;
  // x as one tensor or as (data, scales).
  Payload payload(nanobind::handle x) const;
  // The items of a handle: any tuple or list of `count` tensors. Borrowed from `handle`. The last one, meta, is on the
  // CPU in every handle.
  void handle_items(nanobind::handle handle, const char* const* names, int count, TensorView* const* views) const;

  // The end may have to wait for a hook that runs on another thread and asks for the GIL.
  ~BufferObject() {
    without_gil([this] { buffer_.reset(); });
  }
  BufferObject(const BufferObject&) = delete;
  BufferObject& operator=(const BufferObject&) = delete;

  // Runs f(buffer) without the GIL, behind torch's current stream.
  template <typename F>
  auto run(F&& f) {
    const CallStream stream(device());
    return without_gil([&] { return std::forward<F>(f)(*buffer_); });
  }

  // Runs what prepares the arguments of the collective `call`. If they are refused here, before the Buffer has seen the
  // call, the peers are told so that they raise as well instead of waiting.
  template <typename F>
  auto prepare(const char* call, F&& f) {
    try {
      return std::forward<F>(f)();
    } catch (const std::invalid_argument& error) {
      run([&](Buffer& buffer) { buffer.refuse(call, error.what()); });
      throw;
    }
  }

 private:
  std::unique_ptr<Buffer> buffer_;
};

bool is_pair(nanobind::handle x);
// As one tensor or as (data, scales).
nanobind::object payload_to_torch(OwnedPayload payload, bool as_pair);

}  // namespace deep_moe::python
