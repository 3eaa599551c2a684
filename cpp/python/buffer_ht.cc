// The high-throughput mode: layout, dispatch, combine.
#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "buffer_object.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

// A handle between nodes, and one of expert-major rows, has so many tensors more each, before meta.
constexpr int kHandleItems = 5, kMoreItems = 3;

DispatchHandle handle_of(const BufferObject& self, nb::handle handle) {
  DispatchHandle out;
  TensorView* views[kHandleItems + 2 * kMoreItems];
  const char* names[kHandleItems + 2 * kMoreItems];
  int count = 0;
  const auto add = [&](const char* name, TensorView* view) { names[count] = name, views[count++] = view; };
  add("handle.rank_prefix_matrix", &out.rank_prefix_matrix);
  add("handle.recv_src_idx", &out.recv_src_idx);
  add("handle.is_token_in_rank", &out.is_token_in_rank);
  add("handle.send_index", &out.send_index);
  if (self.buffer().num_nodes() > 1) {
    add("handle.send_rdma_index", &out.send_rdma_index);
    add("handle.recv_rdma_rank_prefix_sum", &out.recv_rdma_rank_prefix_sum);
    add("handle.send_nvl_index", &out.send_nvl_index);
  }
  if (is_pair(handle) && nb::len(handle) == static_cast<std::size_t>(count + 1 + kMoreItems)) {
    add("handle.expert_offsets", &out.expert_offsets);
    add("handle.expert_counts", &out.expert_counts);
    add("handle.expert_rows", &out.expert_rows);
  }
  add("handle.meta", &out.meta);
  self.handle_items(handle, names, count, views);
  return out;
}

nb::object handle_to_torch(OwnedDispatchHandle handle) {
  nb::list items;
  const auto add = [&](std::initializer_list<Tensor*> parts) {
    for (Tensor* part : parts) items.append(to_torch(std::move(*part)));
  };
  add({&handle.rank_prefix_matrix, &handle.recv_src_idx, &handle.is_token_in_rank, &handle.send_index});
  if (handle.send_rdma_index.view.defined())
    add({&handle.send_rdma_index, &handle.recv_rdma_rank_prefix_sum, &handle.send_nvl_index});
  if (handle.expert_rows.view.defined()) add({&handle.expert_offsets, &handle.expert_counts, &handle.expert_rows});
  add({&handle.meta});
  return nb::tuple(items);
}

StreamOptions streams_of(nb::handle previous_event, nb::handle async_finish) {
  StreamOptions streams;
  streams.previous_event = to_pointer(previous_event, "previous_event");
  streams.async_finish = to_bool(async_finish, "async_finish");
  return streams;
}

int sms_of(nb::handle num_sms) {
  const std::int64_t number = to_int(num_sms, "num_sms");
  if (number < 1) throw ArgumentError("num_sms must be at least 1, got " + std::to_string(number));
  return static_cast<int>(std::min<std::int64_t>(number, std::numeric_limits<int>::max()));
}

nb::object get_dispatch_layout(BufferObject& self, nb::handle topk_idx, nb::handle num_experts,
                               nb::handle previous_event, nb::handle async_finish) {
  const TensorView ids = self.required(topk_idx, "topk_idx");
  const std::int64_t experts = to_int(num_experts, "num_experts");
  const StreamOptions streams = streams_of(previous_event, async_finish);
  LayoutResult layout = self.run([&](Buffer& buffer) { return buffer.get_dispatch_layout(ids, experts, streams); });
  return nb::make_tuple(
      to_torch(std::move(layout.num_tokens_per_rank)), to_torch(std::move(layout.num_tokens_per_rdma_rank)),
      to_torch(std::move(layout.num_tokens_per_expert)), to_torch(std::move(layout.is_token_in_rank)));
}

// The outputs of get_dispatch_layout as the user passes them back.
struct GivenLayout {
  TensorView num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert;
};

void check_vector(const TensorView& view, const char* name, std::int64_t length) {
  if (!view.defined()) return;
  if (view.dtype != DType::kInt32) {
    throw ArgumentTypeError(std::string(name) + " must be int32, got " + view.describe());
  }
  if (view.num_dims != 1 || (length >= 0 && view.shape[0] != length)) {
    const std::string allowed = length >= 0 ? std::to_string(length) : "num_experts";
    throw ArgumentError(std::string(name) + " must be int32 [" + allowed + "], got " + view.describe());
  }
}

void check_layout(const GivenLayout& layout, const TensorView& data, const Buffer& buffer) {
  const int num_ranks = buffer.num_ranks();
  check_vector(layout.num_tokens_per_rank, "num_tokens_per_rank", num_ranks);
  check_vector(layout.num_tokens_per_rdma_rank, "num_tokens_per_rdma_rank", buffer.num_nodes());
  check_vector(layout.num_tokens_per_expert, "num_tokens_per_expert", -1);
  const TensorView& in_rank = layout.is_token_in_rank;
  if (!in_rank.defined()) return;
  if (in_rank.dtype != DType::kBool) {
    throw ArgumentTypeError("is_token_in_rank must be bool, got " + in_rank.describe());
  }
  if (in_rank.num_dims != 2 || in_rank.shape[0] != data.shape[0] || in_rank.shape[1] != num_ranks) {
    throw ArgumentError("is_token_in_rank must be bool [" + std::to_string(data.shape[0]) + ", " +
                        std::to_string(num_ranks) + "], as x has " + std::to_string(data.shape[0]) +
                        " tokens and the group " + std::to_string(num_ranks) + " ranks; got " + in_rank.describe());
  }
}

// The number of experts comes from num_experts or from the length of num_tokens_per_expert.
std::int64_t experts_of(nb::handle num_experts, const GivenLayout& layout) {
  const bool has_counts = layout.num_tokens_per_expert.defined();
  if (num_experts.is_none()) return has_counts ? layout.num_tokens_per_expert.shape[0] : 0;
  const std::int64_t experts = to_int(num_experts, "num_experts");
  if (has_counts && experts != layout.num_tokens_per_expert.shape[0]) {
    throw ArgumentError("num_experts is " + std::to_string(experts) + ", but num_tokens_per_expert has " +
                        std::to_string(layout.num_tokens_per_expert.shape[0]) + " entries; give one of the two");
  }
  if (experts < 1) throw ArgumentError("num_experts must be at least 1, got " + std::to_string(experts));
  return experts;
}

// What the user gave, apart from the handle: the layout either follows from topk_idx and the number of experts, or
// comes from is_token_in_rank and num_tokens_per_expert.
void check_routing(const DispatchArgs& args) {
  if (args.topk_idx.defined()) {
    if (args.num_experts == 0) {
      throw ArgumentError(
          "topk_idx alone does not say how many experts there are: pass num_experts=, or num_tokens_per_rank, "
          "is_token_in_rank and num_tokens_per_expert as get_dispatch_layout returned them");
    }
    return;
  }
  if (args.topk_weights.defined()) throw ArgumentError("topk_weights needs topk_idx as well");
  if (!args.is_token_in_rank.defined() || !args.num_tokens_per_expert.defined()) {
    throw ArgumentError(
        "nothing says where rows go: pass topk_idx with num_experts=, or is_token_in_rank and "
        "num_tokens_per_expert as get_dispatch_layout returned them, or the handle of an earlier dispatch");
  }
}

nb::object dispatch(BufferObject& self, nb::handle x, nb::handle handle, nb::handle num_tokens_per_rank,
                    nb::handle num_tokens_per_rdma_rank, nb::handle is_token_in_rank, nb::handle num_tokens_per_expert,
                    nb::handle topk_idx, nb::handle topk_weights, nb::handle expert_alignment,
                    nb::handle num_worst_tokens, nb::handle num_experts, nb::handle expert_major, nb::handle num_sms,
                    nb::handle previous_event, nb::handle async_finish) {
  DispatchHandle cached;
  DispatchArgs args;
  self.prepare("dispatch", [&] {
    args.x = self.payload(x);
    args.num_sms = sms_of(num_sms);
    args.streams = streams_of(previous_event, async_finish);
    args.expert_alignment = to_int(expert_alignment, "expert_alignment");
    args.num_worst_tokens = to_int(num_worst_tokens, "num_worst_tokens");
    args.expert_major = to_bool(expert_major, "expert_major");
    if (!handle.is_none()) {
      if (!topk_idx.is_none() || !topk_weights.is_none()) {
        throw ArgumentError(
            "handle together with topk_idx or topk_weights: a handle repeats an earlier dispatch and its choice of "
            "ranks; pass one or the other");
      }
      cached = handle_of(self, handle);
      args.handle = &cached;
      return;
    }
    const GivenLayout layout{self.view(num_tokens_per_rank, "num_tokens_per_rank"),
                             self.view(num_tokens_per_rdma_rank, "num_tokens_per_rdma_rank"),
                             self.view(is_token_in_rank, "is_token_in_rank"),
                             self.view(num_tokens_per_expert, "num_tokens_per_expert")};
    args.topk_idx = self.view(topk_idx, "topk_idx");
    args.topk_weights = self.view(topk_weights, "topk_weights");
    check_layout(layout, args.x.data, self.buffer());
    args.num_experts = experts_of(num_experts, layout);
    args.is_token_in_rank = layout.is_token_in_rank;
    args.num_tokens_per_expert = layout.num_tokens_per_expert;
    check_routing(args);
  });
  DispatchResult result = self.run([&](Buffer& buffer) { return buffer.dispatch(args); });
  const bool as_pair = is_pair(x);
  if (args.handle != nullptr) {
    return nb::make_tuple(payload_to_torch(std::move(result.recv_x), as_pair), nb::none(), nb::none(), nb::none(),
                          nb::none());
  }
  nb::list counts;
  for (const std::int64_t count : result.num_recv_tokens_per_expert) counts.append(count);
  return nb::make_tuple(payload_to_torch(std::move(result.recv_x), as_pair), to_torch(std::move(result.recv_topk_idx)),
                        to_torch(std::move(result.recv_topk_weights)), std::move(counts),
                        handle_to_torch(std::move(result.handle)));
}

void read_bias(const BufferObject& self, nb::handle bias, CombineArgs* args) {
  if (!is_pair(bias)) {
    args->bias0 = self.view(bias, "bias");
    return;
  }
  if (nb::len(bias) != 2) {
    throw ArgumentTypeError("bias must be None, a torch.Tensor or a pair of them, got " + describe(bias));
  }
  args->bias0 = self.view(nb::object(bias[0]), "bias[0]");
  args->bias1 = self.view(nb::object(bias[1]), "bias[1]");
}

nb::object combine(BufferObject& self, nb::handle x, nb::handle handle, nb::handle topk_weights, nb::handle bias,
                   nb::handle out, nb::handle row_weights, nb::handle num_sms, nb::handle previous_event,
                   nb::handle async_finish) {
  CombineArgs args;
  self.prepare("combine", [&] {
    args.x = self.required(x, "x");
    args.num_sms = sms_of(num_sms);
    args.streams = streams_of(previous_event, async_finish);
    args.handle = handle_of(self, handle);
    args.topk_weights = self.view(topk_weights, "topk_weights");
    read_bias(self, bias, &args);
    args.out = self.view(out, "out");
    args.row_weights = self.view(row_weights, "row_weights");
  });
  CombineResult result = self.run([&](Buffer& buffer) { return buffer.combine(args); });
  nb::object combined = out.is_none() ? to_torch(std::move(result.combined_x)) : nb::borrow(out);
  return nb::make_tuple(std::move(combined), to_torch(std::move(result.combined_topk_weights)));
}

}  // namespace

void register_high_throughput(nb::class_<BufferObject>& cls) {
  cls.def(
      "get_dispatch_layout", get_dispatch_layout, nb::arg("topk_idx").none(), nb::arg("num_experts").none(),
      nb::arg("previous_event").none(), nb::arg("async_finish").none(),
      nb::sig("def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: int, "
              "async_finish: bool) -> "
              "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]"),
      "(num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank); local. The second is\n"
      "None on one node. previous_event: a cudaEvent_t, or 0.");
  cls.def(
      "dispatch", dispatch, nb::arg("x").none(), nb::arg("handle").none(), nb::arg("num_tokens_per_rank").none(),
      nb::arg("num_tokens_per_rdma_rank").none(), nb::arg("is_token_in_rank").none(),
      nb::arg("num_tokens_per_expert").none(), nb::arg("topk_idx").none(), nb::arg("topk_weights").none(),
      nb::arg("expert_alignment").none(), nb::arg("num_worst_tokens").none(), nb::arg("num_experts").none(),
      nb::arg("expert_major").none(), nb::arg("num_sms").none(), nb::arg("previous_event").none(),
      nb::arg("async_finish").none(),
      nb::sig("def dispatch(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], "
              "handle: tuple[torch.Tensor, ...] | None, num_tokens_per_rank: torch.Tensor | None, "
              "num_tokens_per_rdma_rank: torch.Tensor | None, is_token_in_rank: torch.Tensor | None, "
              "num_tokens_per_expert: torch.Tensor | None, "
              "topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, expert_alignment: int, "
              "num_worst_tokens: int, num_experts: int | None, expert_major: bool, num_sms: int, previous_event: int, "
              "async_finish: bool) -> "
              "tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor | None, "
              "torch.Tensor | None, list[int] | None, "
              "tuple[torch.Tensor, ...] | None]"),
      "(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert, handle); with a handle given, all\n"
      "but recv_x are None.");
  cls.def("combine", combine, nb::arg("x").none(), nb::arg("handle").none(), nb::arg("topk_weights").none(),
          nb::arg("bias").none(), nb::arg("out").none(), nb::arg("row_weights").none(), nb::arg("num_sms").none(),
          nb::arg("previous_event").none(), nb::arg("async_finish").none(),
          nb::sig("def combine(self, x: torch.Tensor, handle: tuple[torch.Tensor, ...], "
                  "topk_weights: torch.Tensor | None, "
                  "bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None, "
                  "out: torch.Tensor | None, row_weights: torch.Tensor | None, num_sms: int, previous_event: int, "
                  "async_finish: bool) -> "
                  "tuple[torch.Tensor, torch.Tensor | None]"),
          "(combined_x, combined_topk_weights)");
}

}  // namespace deep_moe::python
