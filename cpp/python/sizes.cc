// How much memory the library will take, before there is a Buffer.
#include <string>

#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "layout/notify_words.hpp"
#include "layout/rows.hpp"
#include "tensors.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31, kMaxCount = 1024;  // no product of them overflows

std::int64_t between(nb::handle value, const char* name, std::int64_t lowest, std::int64_t highest) {
  const std::int64_t number = to_int(value, name);
  if (number < lowest || number > highest)
    throw ArgumentError(std::string(name) + " must be " + std::to_string(lowest) + " to " + std::to_string(highest) +
                        ", got " + std::to_string(number));
  return number;
}

}  // namespace

void register_sizes(nb::module_& m) {
  m.def(
      "workspace_bytes",
      [](nb::handle num_ranks, bool cuda) {
        const int ranks = static_cast<int>(between(num_ranks, "num_ranks", 1, kMaxCount));
        return cuda ? layout::device_workspace_bytes(ranks) : layout::workspace_bytes(ranks);
      },
      nb::arg("num_ranks").none(), nb::arg("cuda"), nb::sig("def workspace_bytes(num_ranks: int, cuda: bool) -> int"),
      "Bytes of the control words of one rank.");
  m.def(
      "received_bytes",
      [](nb::handle num_rows, nb::handle row_bytes, nb::handle scale_bytes, nb::handle topk) {
        const std::int64_t ids = between(topk, "topk", 1, kMaxCount);
        const layout::RowFormat format{between(row_bytes, "row_bytes", 1, kMaxSize),
                                       between(scale_bytes, "scale_bytes", 0, kMaxSize), ids, sizeof(std::int64_t),
                                       sizeof(float)};
        return layout::RecvBlock(format, between(num_rows, "num_rows", 0, kMaxSize)).total;
      },
      nb::arg("num_rows").none(), nb::arg("row_bytes").none(), nb::arg("scale_bytes").none(), nb::arg("topk").none(),
      nb::sig("def received_bytes(num_rows: int, row_bytes: int, scale_bytes: int, topk: int) -> int"),
      "Bytes of heap for what a dispatch with int64 ids and weights receives.");
}

}  // namespace deep_moe::python
