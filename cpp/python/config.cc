// Config and the size hints.
#include <nanobind/stl/string.h>

#include <limits>
#include <new>
#include <string>

#include <deep_moe/config.hpp>
#include <deep_moe/error.hpp>

#include "bindings.hpp"
#include "tensors.hpp"

namespace nb = nanobind;

namespace deep_moe::python {
namespace {

int to_count(nb::handle value, const char* name, int lowest) {
  const std::int64_t number = to_int(value, name);
  if (number < lowest || number > std::numeric_limits<int>::max()) {
    throw ArgumentError(std::string(name) + " must be at least " + std::to_string(lowest) + ", got " +
                        std::to_string(number));
  }
  return static_cast<int>(number);
}

std::size_t to_bytes(nb::handle value, const char* name) {
  const std::int64_t number = to_int(value, name);
  if (number < 0) throw ArgumentError(std::string(name) + " must not be negative, got " + std::to_string(number));
  return static_cast<std::size_t>(number);
}

void construct(Config* self, nb::handle num_sms, nb::handle nvl_send, nb::handle nvl_recv, nb::handle rdma_send,
               nb::handle rdma_recv) {
  new (self) Config(to_count(num_sms, "num_sms", 1), to_count(nvl_send, "num_max_nvl_chunked_send_tokens", 1),
                    to_count(nvl_recv, "num_max_nvl_chunked_recv_tokens", 1),
                    to_count(rdma_send, "num_max_rdma_chunked_send_tokens", 1),
                    to_count(rdma_recv, "num_max_rdma_chunked_recv_tokens", 1));
}

nb::tuple numbers(const Config& config) {
  return nb::make_tuple(config.num_sms, config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens,
                        config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens);
}

bool equal(const Config& config, nb::handle other) {
  return nb::isinstance<Config>(other) && numbers(config).equal(numbers(nb::cast<const Config&>(other)));
}

std::string text_of(const Config& config) {
  return "Config(num_sms=" + std::to_string(config.num_sms) +
         ", num_max_nvl_chunked_send_tokens=" + std::to_string(config.num_max_nvl_chunked_send_tokens) +
         ", num_max_nvl_chunked_recv_tokens=" + std::to_string(config.num_max_nvl_chunked_recv_tokens) +
         ", num_max_rdma_chunked_send_tokens=" + std::to_string(config.num_max_rdma_chunked_send_tokens) +
         ", num_max_rdma_chunked_recv_tokens=" + std::to_string(config.num_max_rdma_chunked_recv_tokens) + ")";
}

void register_config_class(nb::module_& m) {
  nb::class_<Config>(
      m, "Config",
      "Tuning numbers of the high-throughput mode. All are checked; num_sms alone is used, on GPUs.\n\n"
      "Args:\n"
      "    num_sms: multiprocessors that a call may use.\n"
      "    num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: tokens of a chunk within a node.\n"
      "    num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same between nodes.\n\n"
      "Raises:\n"
      "    ValueError: unless each send number is below its recv number and rdma send is at most half\n"
      "        of rdma recv (which is first rounded up to a multiple of rdma send).")
      .def("__init__", construct, nb::arg("num_sms").none() = 20, nb::arg("num_max_nvl_chunked_send_tokens").none() = 6,
           nb::arg("num_max_nvl_chunked_recv_tokens").none() = 256,
           nb::arg("num_max_rdma_chunked_send_tokens").none() = 6,
           nb::arg("num_max_rdma_chunked_recv_tokens").none() = 256,
           nb::sig("def __init__(self, num_sms: int = 20, num_max_nvl_chunked_send_tokens: int = 6, "
                   "num_max_nvl_chunked_recv_tokens: int = 256, num_max_rdma_chunked_send_tokens: int = 6, "
                   "num_max_rdma_chunked_recv_tokens: int = 256) -> None"))
      .def_ro("num_sms", &Config::num_sms, "As given.")
      .def_ro("num_max_nvl_chunked_send_tokens", &Config::num_max_nvl_chunked_send_tokens, "As given.")
      .def_ro("num_max_nvl_chunked_recv_tokens", &Config::num_max_nvl_chunked_recv_tokens, "As given.")
      .def_ro("num_max_rdma_chunked_send_tokens", &Config::num_max_rdma_chunked_send_tokens, "As given.")
      .def_ro("num_max_rdma_chunked_recv_tokens", &Config::num_max_rdma_chunked_recv_tokens, "Rounded up.")
      .def(
          "get_nvl_buffer_size_hint",
          [](const Config& self, nb::handle hidden_bytes, nb::handle num_ranks) {
            return self.get_nvl_buffer_size_hint(to_bytes(hidden_bytes, "hidden_bytes"),
                                                 to_count(num_ranks, "num_ranks", 1));
          },
          nb::arg("hidden_bytes").none(), nb::arg("num_ranks").none(),
          nb::sig("def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int"),
          "Bytes for num_nvl_bytes with which rows of hidden_bytes bytes need no growth of the heap at usual sizes,\n"
          "among num_ranks ranks.")
      .def(
          "get_rdma_buffer_size_hint",
          [](const Config& self, nb::handle hidden_bytes, nb::handle num_ranks) {
            return self.get_rdma_buffer_size_hint(to_bytes(hidden_bytes, "hidden_bytes"),
                                                  to_count(num_ranks, "num_ranks", 1));
          },
          nb::arg("hidden_bytes").none(), nb::arg("num_ranks").none(),
          nb::sig("def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int"),
          "Bytes for num_rdma_bytes in the high-throughput mode between nodes, for rows of hidden_bytes bytes among\n"
          "num_ranks ranks; 0 on one node.")
      .def("__repr__", text_of)
      .def("__eq__", equal, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Config& self) { return nb::hash(numbers(self)); })
      .def("__getstate__", numbers, nb::sig("def __getstate__(self) -> tuple[int, int, int, int, int]"))
      .def(
          "__setstate__",
          [](Config* self, const nb::tuple& state) {
            if (state.size() != 5) throw ArgumentError("Config: the pickled state has five numbers");
            construct(self, state[0], state[1], state[2], state[3], state[4]);
          },
          nb::sig("def __setstate__(self, state: tuple[int, int, int, int, int], /) -> None"));
}

}  // namespace

void register_config(nb::module_& m) {
  register_config_class(m);
  const auto tuned = [](const Config& found, nb::handle num_sms) {
    Config config = found;
    config.num_sms = to_count(num_sms, "num_sms", 1);
    return config;
  };
  m.def(
      "dispatch_config",
      [tuned](nb::handle num_ranks, nb::handle num_sms) {
        return tuned(dispatch_config(to_count(num_ranks, "num_ranks", 1)), num_sms);
      },
      nb::arg("num_ranks").none(), nb::arg("num_sms").none(),
      nb::sig("def dispatch_config(num_ranks: int, num_sms: int) -> Config"), "The tuned numbers for dispatch.");
  m.def(
      "combine_config",
      [tuned](nb::handle num_ranks, nb::handle num_sms) {
        return tuned(combine_config(to_count(num_ranks, "num_ranks", 1)), num_sms);
      },
      nb::arg("num_ranks").none(), nb::arg("num_sms").none(),
      nb::sig("def combine_config(num_ranks: int, num_sms: int) -> Config"), "The tuned numbers for combine.");
  m.def(
      "low_latency_size_hint",
      [](nb::handle max_tokens, nb::handle hidden, nb::handle num_ranks, nb::handle num_experts) {
        return low_latency_size_hint(to_count(max_tokens, "num_max_dispatch_tokens_per_rank", 1),
                                     to_count(hidden, "hidden", 1), to_count(num_ranks, "num_ranks", 1),
                                     to_count(num_experts, "num_experts", 1));
      },
      nb::arg("num_max_dispatch_tokens_per_rank").none(), nb::arg("hidden").none(), nb::arg("num_ranks").none(),
      nb::arg("num_experts").none(),
      nb::sig("def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, "
              "num_experts: int) -> int"),
      "Bytes of low-latency staging.");
}

}  // namespace deep_moe::python
