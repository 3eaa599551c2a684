// What `deep-moe bench` drives from C++: chains of calls on a Buffer without Python between them. Private.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include <deep_moe/error.hpp>

#include "bench_rank.hpp"
#include "bindings.hpp"
#include "buffer_object.hpp"

namespace nb = nanobind;

namespace deep_moe::bench {

Step step_of(const std::string& name) {
  static constexpr std::array<std::pair<const char*, Step>, 9> kSteps = {{
      {"layout", Step::kLayout},
      {"dispatch", Step::kDispatch},
      {"dispatch_v1", Step::kDispatchV1},
      {"dispatch_by_handle", Step::kDispatchByHandle},
      {"combine", Step::kCombine},
      {"combine_with_weights", Step::kCombineWithWeights},
      {"combine_ordinary", Step::kCombineOrdinary},
      {"copy_for_dispatch", Step::kCopyForDispatch},
      {"copy_for_combine", Step::kCopyForCombine},
  }};
  std::string known;
  for (const auto& [text, step] : kSteps) {
    if (name == text) return step;
    known += known.empty() ? text : std::string(", ") + text;
  }
  throw ArgumentError("steps: got " + name + "; allowed: " + known);
}

}  // namespace deep_moe::bench

namespace deep_moe::python {
namespace {

class BenchRank {
  // Without the GIL, behind torch's current stream.
  template <typename F>
  auto run_on_stream(F&& f) {
    return buffer_.run([&](Buffer& buffer) { return f(buffer, current_stream(device_)); });
  }

 public:
  explicit BenchRank(nb::object buffer)
      : keep_(std::move(buffer)), buffer_(nb::cast<BufferObject&>(keep_)), device_(buffer_.device()) {
    if (device_ == kCpuDevice) throw ArgumentError("buffer is on the CPU; allowed: one on a GPU");
  }

  void set_inputs(nb::handle x, nb::handle topk_idx, nb::handle topk_weights, nb::handle num_experts,
                  nb::handle ordinary, const std::vector<std::uintptr_t>& landing) {
    bench::Inputs inputs;
    inputs.x = buffer_.payload(x);
    inputs.topk_idx = buffer_.required(topk_idx, "topk_idx");
    inputs.topk_weights = buffer_.required(topk_weights, "topk_weights");
    inputs.num_experts = to_int(num_experts, "num_experts");
    inputs.ordinary = buffer_.required(ordinary, "ordinary");
    for (const std::uintptr_t address : landing) inputs.landing.push_back(reinterpret_cast<char*>(address));
    run_on_stream([&](Buffer& buffer, void* stream) { rank_.set_inputs(buffer, inputs, stream); });
    inputs_ = nb::make_tuple(x, topk_idx, topk_weights, ordinary);
  }

  void prepare(const std::vector<std::string>& steps, int num_sms, int graph_repeats, int copy_warps, int copy_stages,
               bool copy_tickets) {
    bench::Chain chain{{}, num_sms, graph_repeats, copy_warps, copy_stages, copy_tickets};
    for (const std::string& step : steps) chain.steps.push_back(bench::step_of(step));
    run_on_stream([&](Buffer& buffer, void* stream) { rank_.prepare(buffer, chain, stream); });
  }

  nb::tuple run(int count) {
    const bench::Times times =
        run_on_stream([&](Buffer& buffer, void* stream) { return rank_.run(buffer, count, stream); });
    return nb::make_tuple(times.device_us, times.issue_us, times.wall_us);
  }

  bool can_copy() const { return rank_.can_copy(); }
  nb::object received() const { return to_torch(rank_.received()); }
  nb::object combined() const { return to_torch(rank_.combined()); }

 private:
  nb::object keep_, inputs_;
  BufferObject& buffer_;
  int device_;
  bench::Rank rank_;
};

}  // namespace

void register_bench(nb::module_& m) {
  nb::class_<BenchRank> cls(m, "BenchRank",
                            "One rank of a timing, driven from C++: chains of calls on a Buffer of a GPU, and plain "
                            "copies of\nthe same rows. For `deep-moe bench`; cpp/python/bench_rank.hpp says what each "
                            "step is.");
  cls.def(nb::init<nb::object>(), nb::arg("buffer"), nb::sig("def __init__(self, buffer: Buffer) -> None"));
  cls.def("set_inputs", &BenchRank::set_inputs, nb::arg("x"), nb::arg("topk_idx"), nb::arg("topk_weights"),
          nb::arg("num_experts"), nb::arg("ordinary"), nb::arg("landing"),
          nb::sig("def set_inputs(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], topk_idx: torch.Tensor, "
                  "topk_weights: torch.Tensor, num_experts: int, ordinary: torch.Tensor, "
                  "landing: collections.abc.Sequence[int]) -> None"),
          "Collective: one dispatch. Keeps the tensors; landing: addresses of R places for plain copies, or none.");
  cls.def("prepare", &BenchRank::prepare, nb::arg("steps"), nb::arg("num_sms"), nb::arg("graph_repeats"),
          nb::arg("copy_warps"), nb::arg("copy_stages"), nb::arg("copy_tickets"),
          nb::sig("def prepare(self, steps: collections.abc.Sequence[str], num_sms: int, graph_repeats: int, "
                  "copy_warps: int, copy_stages: int, copy_tickets: bool) -> None"),
          "Gets a chain ready. Local; no kernel that waits for a peer may be running on any rank.");
  cls.def("run", &BenchRank::run, nb::arg("count"), nb::sig("def run(self, count: int) -> tuple[float, float, float]"),
          "Runs the chain once, then `count` times; microseconds a chain by events on the current stream, until the\n"
          "last call has returned, and until the stream is idle.");
  cls.def("can_copy", &BenchRank::can_copy,
          "Whether this GPU has the copy engine that plain copies use; known after set_inputs.");
  cls.def("received", &BenchRank::received, nb::sig("def received(self) -> torch.Tensor | None"),
          "Rows of the last dispatch.");
  cls.def("combined", &BenchRank::combined, nb::sig("def combined(self) -> torch.Tensor | None"),
          "Rows of the last combine.");
  m.def(
      "bench_hold",
      [](int device, int num_sms, int num_ranks, std::int64_t nanoseconds, nb::handle stream) {
        bench::hold(device, num_sms, num_ranks, nanoseconds, to_pointer(stream, "stream"));
      },
      nb::arg("device"), nb::arg("num_sms"), nb::arg("num_ranks"), nb::arg("nanoseconds"), nb::arg("stream"),
      nb::sig("def bench_hold(device: int, num_sms: int, num_ranks: int, nanoseconds: int, stream: int) -> None"),
      "Holds multiprocessors with the blocks, threads and shared memory of a dispatch, without using them.");
}

}  // namespace deep_moe::python
