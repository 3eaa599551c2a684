#include "cuda/cuda_nodes_nvshmem.hpp"

#include <cuda_runtime_api.h>
#include <dirent.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/call_streams.hpp"
#include "runtime/network.hpp"
#include "runtime/text.hpp"

namespace deep_moe::cuda {
namespace {

constexpr int kMaxBlocks = 64;

struct Block {
  char* memory;
  std::size_t bytes;
  bool free;
};

// Of the process; blocks are made by all ranks together, so they have the same numbers everywhere.
struct State {
  std::mutex mutex;
  std::vector<std::uint64_t> processes;  // of the ranks that it was started for; empty: not started
  std::vector<Block> blocks;
};
State& state() {
  static auto* const of_process = new State;
  return *of_process;
}

void check(const char* error) {
  if (error != nullptr) throw Error(std::string("NVSHMEM: ") + error);
}

using Settings = std::vector<std::pair<const char*, std::string>>;

constexpr const char* kInterface = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME";
constexpr const char* kTransport = "NVSHMEM_REMOTE_TRANSPORT";

// On one machine a network card is not needed, and none is looked for. Between machines NVSHMEM finds the cards itself,
// and posts by a thread of its own (docs/network.md). It starts over the interface by which the hosts speak.
Settings defaults(const NetworkPlace& place, std::size_t bytes) {
  Settings settings = {{"NVSHMEM_IB_ENABLE_IBGDA", "0"},
                       {"NVSHMEM_DISABLE_NVLS", "1"},
                       {"NVSHMEM_SYMMETRIC_SIZE", std::to_string(4 * bytes + (std::size_t{64} << 20))}};
  if (place.one_machine) settings.push_back({kTransport, "none"});
  if (place.one_machine || !place.interface_name.empty())
    settings.push_back({kInterface, place.interface_name.empty() ? "lo" : place.interface_name});
  return settings;
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

bool has_network_card() {
  // Not by <filesystem>: what manylinux_2_28 promises of libstdc++ lacks it.
  const std::unique_ptr<DIR, int (*)(DIR*)> cards(::opendir("/sys/class/infiniband"), ::closedir);
  if (cards == nullptr) return false;
  for (const dirent* entry = ::readdir(cards.get()); entry != nullptr; entry = ::readdir(cards.get()))
    if (entry->d_name[0] != '.') return true;
  return false;
}

void check_network_card(const NetworkPlace& place) {
  if (place.one_machine || is_set(kTransport) || has_network_card()) return;
  throw UnavailableError(
      "exchange between machines over NVSHMEM: this machine has no RDMA device (/sys/class/infiniband is empty, "
      "deep-moe "
      "doctor); where another transport serves, name it in NVSHMEM_REMOTE_TRANSPORT on all ranks");
}

void check_group(const std::vector<std::uint64_t>& processes) {
  if (std::set<std::uint64_t>(processes.begin(), processes.end()).size() != processes.size())
    throw UnavailableError(
        "exchange between nodes over NVSHMEM: some ranks are threads of one process, and NVSHMEM takes a process for "
        "each; leave DEEP_MOE_NETWORK unset");
}

// What ranks tell each other between two steps, so that nobody goes into one that others will not reach.
struct Word {
  std::uint64_t usable = 0;  // blocks, as bits
  std::uint32_t same = 0, started = 0;
  std::uint32_t failed = 0, unavailable = 0, num_reason_bytes = 0;
  char reason[400] = {};
  char id[nvshmem::kUniqueIdBytes] = {};
};

std::vector<Word> agree(const Bootstrap& bootstrap, Word mine, const std::function<void(Word*)>& step) {
  std::exception_ptr own_error;
  try {
    step(&mine);
  } catch (const Error& error) {
    own_error = std::current_exception();
    mine.failed = 1;
    mine.unavailable = dynamic_cast<const UnavailableError*>(&error) != nullptr;
    mine.num_reason_bytes = copy_text(error.what(), mine.reason, sizeof(mine.reason));
  }
  std::vector<Word> all(static_cast<std::size_t>(bootstrap.size));
  bootstrap.all_gather(&mine, all.data(), sizeof(Word));
  if (own_error) std::rethrow_exception(own_error);
  for (int rank = 0; rank < bootstrap.size; ++rank) {
    const Word& word = all[static_cast<std::size_t>(rank)];
    if (word.failed == 0) continue;
    const std::string text = "rank " + std::to_string(rank) +
                             " could not make its Buffer: " + std::string(word.reason, word.num_reason_bytes);
    if (word.unavailable != 0) throw UnavailableError(text);
    throw Error(text);
  }
  return all;
}

}  // namespace

SymmetricBlock take_symmetric_block(const Bootstrap& bootstrap, const NetworkPlace& place, std::size_t bytes,
                                    Stream stream) {
  const nvshmem::Plugin& plugin = network_plugin();
  check_group(place.processes);
  State& own = state();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto synchronize = [&] { check_runtime(cudaStreamSynchronize(cuda_stream), "cudaStreamSynchronize"); };
  bool started = true, same = true;
  std::uint64_t usable = ~std::uint64_t{0};  // blocks, as bits
  const std::vector<Word> first = agree(bootstrap, {}, [&](Word* mine) {
    const std::lock_guard<std::mutex> lock(own.mutex);
    mine->same = own.processes.empty() || own.processes == place.processes;
    mine->started = !own.processes.empty();
    for (std::size_t i = 0; i < own.blocks.size(); ++i)
      if (own.blocks[i].free && own.blocks[i].bytes >= bytes) mine->usable |= std::uint64_t{1} << i;
    if (mine->started != 0 || mine->same == 0) return;
    check_network_card(place);
    for (const auto& [name, value] : defaults(place, bytes)) ::setenv(name, value.c_str(), 0);
    if (bootstrap.rank == 0) check(plugin.unique_id(mine->id));
  });
  for (const Word& word : first) {
    same = same && word.same != 0 && word.started == first[0].started;
    usable &= word.usable;
    started = started && word.started != 0;
  }
  if (!same)
    throw UnavailableError(
        "exchange between nodes over NVSHMEM: some process has made a Buffer over other ranks before, and NVSHMEM "
        "serves one group of ranks for as long as its processes live");
  agree(bootstrap, {}, [&](Word*) {
    if (!started) {
      check(plugin.start(bootstrap.rank, bootstrap.size, first[0].id));
      own.processes = place.processes;
      check(plugin.prepare());
    }
    check(plugin.quiet(stream));
    synchronize();
  });  // nothing of anybody is on its way any more
  std::size_t index = 0;
  agree(bootstrap, {}, [&](Word*) {
    if (usable == 0) {
      if (own.blocks.size() >= kMaxBlocks) throw Error("NVSHMEM: there are too many Buffers");
      char* memory = nullptr;
      check(plugin.allocate(bytes, &memory));
      const std::lock_guard<std::mutex> lock(own.mutex);
      index = own.blocks.size();
      own.blocks.push_back({memory, bytes, false});
      return;
    }
    while ((usable >> index & 1) == 0) ++index;
    check_runtime(cudaMemsetAsync(own.blocks[index].memory, 0, own.blocks[index].bytes, cuda_stream),
                  "cudaMemsetAsync");
    synchronize();
    const std::lock_guard<std::mutex> lock(own.mutex);
    own.blocks[index].free = false;
  });  // all are clean
  const auto give_back = [index](char*) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().blocks[index].free = true;
  };
  char* const memory = own.blocks[index].memory;
  return {memory, std::shared_ptr<void>(std::shared_ptr<char>(memory, give_back))};
}

std::string describe_network() {
  std::string text = "NVSHMEM " + network_status().library;
  for (const char* name : {kTransport, "NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IB_SL", "NVSHMEM_IBGDA_NUM_RC_PER_PE",
                           kInterface, "NVSHMEM_SYMMETRIC_SIZE"})
    if (is_set(name)) text += std::string(" ") + name + "=" + std::getenv(name);
  return text;
}

}  // namespace deep_moe::cuda
