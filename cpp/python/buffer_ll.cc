// The low-latency mode: dispatch and combine with or without a hook, masks of ranks.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "buffer_object.hpp"
#include "layout/handle.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

// The receive half of a call, behind torch's current stream. Keeps the tensors alive that it will read and write.
class Hook {
 public:
  Hook(std::function<void()> receive, nb::object tensors, int device)
      : receive_(std::move(receive)), tensors_(std::move(tensors)), device_(device) {}

  // It may hold the last of a Buffer, whose end may wait.
  ~Hook() {
    if (receive_) without_gil([this] { receive_ = nullptr; });
  }
  Hook(Hook&&) = default;
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  void operator()() {
    const CallStream stream(device_);
    without_gil([this] { receive_(); });
    tensors_.reset();
  }

 private:
  std::function<void()> receive_;
  nb::object tensors_;
  int device_;
};

constexpr int kHandleItems = 5;
constexpr const char* kHandleNames[kHandleItems] = {"handle[0] (src_info)", "handle[1] (layout_range)",
                                                    "handle[2] (recv_pos)", "handle[3] (recv_weights)",
                                                    "handle[4] (meta)"};

constexpr int kDeviceHandleItems = 2;
constexpr const char* kDeviceHandleNames[kDeviceHandleItems] = {"handle[0] (words)", "handle[1] (meta)"};

LowLatencyHandle handle_of(const BufferObject& self, nb::handle handle) {
  if (self.device() != kCpuDevice) {
    TensorView words, meta;
    TensorView* const views[kDeviceHandleItems] = {&words, &meta};
    self.handle_items(handle, kDeviceHandleNames, kDeviceHandleItems, views);
    return low_latency_handle(words, meta, self.buffer().rank());
  }
  LowLatencyHandle out;
  TensorView* const views[kHandleItems] = {&out.src_info, &out.layout_range, &out.recv_pos, &out.recv_weights,
                                           &out.meta};
  self.handle_items(handle, kHandleNames, kHandleItems, views);
  return out;
}

// On GPUs all but meta as one tensor: each costs its microseconds.
nb::object handle_to_torch(OwnedLowLatencyHandle handle) {
  if (handle.words.defined())
    return nb::make_tuple(to_torch(std::move(handle.words)), to_torch(std::move(handle.meta)));
  return nb::make_tuple(to_torch(std::move(handle.src_info)), to_torch(std::move(handle.layout_range)),
                        to_torch(std::move(handle.recv_pos)), to_torch(std::move(handle.recv_weights)),
                        to_torch(std::move(handle.meta)));
}

nb::object low_latency_dispatch(BufferObject& self, nb::handle x, nb::handle topk_idx, nb::handle max_tokens,
                                nb::handle num_experts, nb::handle recv_stats, nb::handle wait_stats,
                                nb::handle use_fp8, nb::handle round_scale, nb::handle use_ue8m0,
                                nb::handle return_recv_hook, nb::handle topk_weights, nb::handle async_finish) {
  LowLatencyDispatchArgs args;
  self.prepare("low_latency_dispatch", [&] {
    args.x = self.payload(x);
    args.topk_idx = self.required(topk_idx, "topk_idx");
    args.topk_weights = self.view(topk_weights, "topk_weights");
    args.num_max_dispatch_tokens_per_rank = to_int(max_tokens, "num_max_dispatch_tokens_per_rank");
    args.num_experts = to_int(num_experts, "num_experts");
    args.use_fp8 = to_bool(use_fp8, "use_fp8");
    args.round_scale = to_bool(round_scale, "round_scale");
    args.use_ue8m0 = to_bool(use_ue8m0, "use_ue8m0");
    args.return_recv_hook = to_bool(return_recv_hook, "return_recv_hook");
    args.async_finish = to_bool(async_finish, "async_finish");
    args.cumulative_local_expert_recv_stats = self.view(recv_stats, "cumulative_local_expert_recv_stats");
    args.wait_recv_cost_stats = self.view(wait_stats, "dispatch_wait_recv_cost_stats");
  });
  LowLatencyDispatchResult result = self.run([&](Buffer& buffer) { return buffer.low_latency_dispatch(args); });
  const bool as_pair = result.recv_x.scales.defined();
  nb::object recv_x = payload_to_torch(std::move(result.recv_x), as_pair);
  nb::object recv_count = to_torch(std::move(result.recv_count));
  nb::object handle = handle_to_torch(std::move(result.handle));
  nb::object hook = nb::none();
  if (result.hook) {
    hook = nb::cast(Hook(std::move(result.hook),
                         nb::make_tuple(x, topk_idx, topk_weights, recv_stats, wait_stats, recv_x, recv_count, handle),
                         self.device()));
  }
  return nb::make_tuple(std::move(recv_x), std::move(recv_count), std::move(handle), std::move(hook));
}

nb::object low_latency_combine(BufferObject& self, nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                               nb::handle handle, nb::handle use_logfmt, nb::handle return_recv_hook, nb::handle out,
                               nb::handle wait_stats, nb::handle async_finish) {
  LowLatencyCombineArgs args;
  self.prepare("low_latency_combine", [&] {
    args.x = self.required(x, "x");
    args.topk_idx = self.required(topk_idx, "topk_idx");
    args.topk_weights = self.required(topk_weights, "topk_weights");
    args.handle = handle_of(self, handle);
    args.use_logfmt = to_bool(use_logfmt, "use_logfmt");
    args.return_recv_hook = to_bool(return_recv_hook, "return_recv_hook");
    args.async_finish = to_bool(async_finish, "async_finish");
    args.out = self.view(out, "out");
    args.wait_recv_cost_stats = self.view(wait_stats, "combine_wait_recv_cost_stats");
  });
  LowLatencyCombineResult result = self.run([&](Buffer& buffer) { return buffer.low_latency_combine(args); });
  nb::object combined = out.is_none() ? to_torch(std::move(result.combined_x)) : nb::borrow(out);
  nb::object hook = nb::none();
  if (result.hook) {
    hook = nb::cast(Hook(std::move(result.hook),
                         nb::make_tuple(x, topk_idx, topk_weights, handle, wait_stats, combined), self.device()));
  }
  return nb::make_tuple(std::move(combined), std::move(hook));
}

bool is_summable(std::int64_t dtype) {
  return dtype == static_cast<std::int64_t>(DType::kBFloat16) || dtype == static_cast<std::int64_t>(DType::kFloat16) ||
         dtype == static_cast<std::int64_t>(DType::kFloat32);
}

nb::object combine_input(BufferObject& self, nb::handle handle) {
  const LowLatencyHandle views = handle_of(self, handle);
  const bool fits = views.meta.dtype == DType::kInt64 && views.meta.numel() == layout::kLowLatencyMetaSize &&
                    views.meta.is_contiguous() && views.src_info.num_dims == 2;
  if (!fits)
    throw ArgumentError("handle must be what low_latency_dispatch returned, got meta " + views.meta.describe());
  const auto* meta = views.meta.as<const std::int64_t>();
  const std::int64_t dtype = meta[layout::kLowMetaXDtype];
  const DType summed = is_summable(dtype) ? static_cast<DType>(dtype) : DType::kBFloat16;
  const std::vector<std::int64_t> shape = {views.src_info.shape[0], views.src_info.shape[1],
                                           meta[layout::kLowMetaHidden]};
  if (self.buffer().options().device != kCpuDevice)
    return to_torch(self.run([&](Buffer& buffer) { return buffer.empty(summed, shape); }));
  return to_torch(make_host_tensor(summed, {shape[0], shape[1], shape[2]}));
}

void clean_buffer(BufferObject& self, nb::handle max_tokens, nb::handle hidden, nb::handle num_experts) {
  const std::int64_t tokens = to_int(max_tokens, "num_max_dispatch_tokens_per_rank");
  const std::int64_t width = to_int(hidden, "hidden");
  const std::int64_t experts = to_int(num_experts, "num_experts");
  self.run([&](Buffer& buffer) { buffer.clean_low_latency_buffer(tokens, width, experts); });
}

void update_mask(BufferObject& self, nb::handle rank, nb::handle masked) {
  const std::int64_t index = to_int(rank, "rank_to_mask");
  const bool value = to_bool(masked, "mask");
  const int num_ranks = self.buffer().num_ranks();
  if (index < 0 || index >= num_ranks) {
    throw ArgumentError("rank_to_mask must be in [0, " + std::to_string(num_ranks) + "), got " + std::to_string(index));
  }
  self.run([&](Buffer& buffer) { buffer.update_mask(static_cast<int>(index), value); });
}

void query_mask(BufferObject& self, nb::handle mask_status) {
  const TensorView status = self.required(mask_status, "mask_status");
  const std::int64_t num_ranks = self.buffer().num_ranks();
  if (status.dtype != DType::kInt32) throw ArgumentTypeError("mask_status must be int32, got " + status.describe());
  if (status.num_dims != 1 || status.shape[0] != num_ranks || !status.is_contiguous()) {
    throw ArgumentError("mask_status must be a contiguous int32 [" + std::to_string(num_ranks) + "], got " +
                        status.describe());
  }
  self.run([&](Buffer& buffer) { buffer.query_mask(status.as<std::int32_t>()); });
}

void register_calls(nb::class_<BufferObject>& cls) {
  cls.def("low_latency_dispatch", low_latency_dispatch, nb::arg("x").none(), nb::arg("topk_idx").none(),
          nb::arg("max_tokens").none(), nb::arg("num_experts").none(), nb::arg("recv_stats").none(),
          nb::arg("wait_stats").none(), nb::arg("use_fp8"), nb::arg("round_scale").none(), nb::arg("use_ue8m0"),
          nb::arg("return_recv_hook").none(), nb::arg("topk_weights").none(), nb::arg("async_finish").none(),
          nb::sig("def low_latency_dispatch(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], "
                  "topk_idx: torch.Tensor, max_tokens: int, num_experts: int, recv_stats: torch.Tensor | None, "
                  "wait_stats: torch.Tensor | None, use_fp8: bool, round_scale: bool, use_ue8m0: bool, "
                  "return_recv_hook: bool, topk_weights: torch.Tensor | None, async_finish: bool) -> "
                  "tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, "
                  "tuple[torch.Tensor, ...], Hook | None]"),
          "(recv_x, recv_count, handle, hook)");
  cls.def("low_latency_combine", low_latency_combine, nb::arg("x").none(), nb::arg("topk_idx").none(),
          nb::arg("topk_weights").none(), nb::arg("handle").none(), nb::arg("use_logfmt").none(),
          nb::arg("return_recv_hook").none(), nb::arg("out").none(), nb::arg("wait_stats").none(),
          nb::arg("async_finish").none(),
          nb::sig("def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, "
                  "topk_weights: torch.Tensor, handle: tuple[torch.Tensor, ...], use_logfmt: bool, "
                  "return_recv_hook: bool, out: torch.Tensor | None, wait_stats: torch.Tensor | None, "
                  "async_finish: bool) -> "
                  "tuple[torch.Tensor, Hook | None]"),
          "(combined_x, hook)");
}

}  // namespace

void register_low_latency(nb::module_& m, nb::class_<BufferObject>& cls) {
  nb::class_<Hook>(m, "Hook", "The receive half of a low-latency call. Call it once; tensors are complete afterwards.")
      .def("__call__", &Hook::operator());
  register_calls(cls);
  cls.def("low_latency_combine_input", combine_input, nb::arg("handle").none(),
          nb::sig("def low_latency_combine_input(self, handle: tuple[torch.Tensor, ...]) -> torch.Tensor"),
          "An uninitialised tensor of the shape and dtype that combine takes.");
  cls.def("clean_low_latency_buffer", clean_buffer, nb::arg("max_tokens").none(), nb::arg("hidden").none(),
          nb::arg("num_experts").none(),
          nb::sig("def clean_low_latency_buffer(self, max_tokens: int, hidden: int, num_experts: int) -> None"),
          "Checks the numbers; nothing needs cleaning.");
  cls.def("update_mask", update_mask, nb::arg("rank").none(), nb::arg("masked").none(),
          nb::sig("def update_mask(self, rank: int, masked: bool) -> None"), "Masks or unmasks a rank.");
  cls.def("query_mask", query_mask, nb::arg("mask_status").none(),
          nb::sig("def query_mask(self, mask_status: torch.Tensor) -> None"), "Fills [R] int32: 1 = masked.");
  cls.def(
      "clean_mask", [](BufferObject& self) { self.run([](Buffer& buffer) { buffer.clean_mask(); }); },
      "Unmasks all ranks.");
}

}  // namespace deep_moe::python
