#include "cuda/cuda_nodes_nvshmem.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/call_streams.hpp"
#include "runtime/network.hpp"

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

// With these a machine without a network card will do; what the user has set stays.
void set_defaults(std::size_t bytes) {
  const std::pair<const char*, std::string> defaults[] = {
      {"NVSHMEM_REMOTE_TRANSPORT", "none"},
      {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"},
      {"NVSHMEM_IB_ENABLE_IBGDA", "0"},
      {"NVSHMEM_DISABLE_NVLS", "1"},
      {"NVSHMEM_SYMMETRIC_SIZE", std::to_string(4 * bytes + (std::size_t{64} << 20))},
  };
  for (const auto& [name, value] : defaults) ::setenv(name, value.c_str(), 0);
}

void start(const Bootstrap& bootstrap, const nvshmem::Plugin& plugin, std::size_t bytes) {
  set_defaults(bytes);
  struct Id {
    char bytes[nvshmem::kUniqueIdBytes] = {};
  } mine;
  if (bootstrap.rank == 0) check(plugin.unique_id(mine.bytes));
  std::vector<Id> all(static_cast<std::size_t>(bootstrap.size));
  bootstrap.all_gather(&mine, all.data(), sizeof(Id));
  check(plugin.start(bootstrap.rank, bootstrap.size, all[0].bytes));
}

void check_group(const std::vector<std::uint64_t>& processes) {
  if (std::set<std::uint64_t>(processes.begin(), processes.end()).size() != processes.size())
    throw UnavailableError(
        "exchange between nodes over NVSHMEM: some ranks are threads of one process, and NVSHMEM takes a process for "
        "each; leave DEEP_MOE_NETWORK unset");
}

}  // namespace

SymmetricBlock take_symmetric_block(const Bootstrap& bootstrap, const std::vector<std::uint64_t>& processes,
                                    std::size_t bytes, Stream stream) {
  const nvshmem::Plugin& plugin = network_plugin();
  check_group(processes);
  State& own = state();
  std::uint64_t usable = 0;  // blocks, as bits
  bool same = true;
  {
    const std::lock_guard<std::mutex> lock(own.mutex);
    same = own.processes.empty() || own.processes == processes;
    for (std::size_t i = 0; i < own.blocks.size(); ++i)
      if (own.blocks[i].free && own.blocks[i].bytes >= bytes) usable |= std::uint64_t{1} << i;
  }
  struct Word {
    std::uint64_t usable;
    std::uint32_t same, started;
  } mine{usable, same, !own.processes.empty()};
  std::vector<Word> all(processes.size());
  bootstrap.all_gather(&mine, all.data(), sizeof(Word));
  bool started = true;
  for (const Word& word : all) {
    if (word.same == 0 || word.started != mine.started)
      throw UnavailableError(
          "exchange between nodes over NVSHMEM: some process has made a Buffer over other ranks before, and NVSHMEM "
          "serves one group of ranks for as long as its processes live");
    usable &= word.usable;
    started = started && word.started != 0;
  }
  if (!started) {
    start(bootstrap, plugin, bytes);
    own.processes = processes;
    check(plugin.prepare());
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  check(plugin.quiet(stream));
  check_runtime(cudaStreamSynchronize(cuda_stream), "cudaStreamSynchronize");
  bootstrap.all_gather(&mine, all.data(), sizeof(Word));  // nothing of anybody is on its way any more
  std::size_t index = 0;
  if (usable == 0) {
    if (own.blocks.size() >= kMaxBlocks) throw Error("NVSHMEM: there are too many Buffers");
    char* memory = nullptr;
    check(plugin.allocate(bytes, &memory));
    const std::lock_guard<std::mutex> lock(own.mutex);
    index = own.blocks.size();
    own.blocks.push_back({memory, bytes, false});
  } else {
    while ((usable >> index & 1) == 0) ++index;
    check_runtime(cudaMemsetAsync(own.blocks[index].memory, 0, own.blocks[index].bytes, cuda_stream),
                  "cudaMemsetAsync");
    check_runtime(cudaStreamSynchronize(cuda_stream), "cudaStreamSynchronize");
    const std::lock_guard<std::mutex> lock(own.mutex);
    own.blocks[index].free = false;
  }
  bootstrap.all_gather(&mine, all.data(), sizeof(Word));  // all are clean
  const auto give_back = [index](char*) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().blocks[index].free = true;
  };
  char* const memory = own.blocks[index].memory;
  return {memory, std::shared_ptr<void>(std::shared_ptr<char>(memory, give_back))};
}

}  // namespace deep_moe::cuda
