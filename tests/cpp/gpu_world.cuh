// Ranks that are threads of this process and go round its GPUs: plain pointers instead of mapped peers, a stream each.
//
// To add a test: make a World for its rank count and largest shapes, fill ids with World::set_ids, call run(R, body)
// with a body that launches on world.rank(r).stream, and compare what World::read gives with layout_on_host. Where the
// main thread launches, records or captures for a rank, it holds an OnGpuOf.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpu_devices.hpp"
#include "kernels/api.hpp"
#include "layout/experts.hpp"

namespace deep_moe::test {

// The one place where GPU tests are skipped. With DEEP_MOE_EXPECT_GPUS above 0 a machine without a GPU is an error.
inline bool no_gpu() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // a queue a stream: ranks never wait behind each other
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return false;
  const char* expected = std::getenv("DEEP_MOE_EXPECT_GPUS");
  if (expected && std::atoi(expected) > 0) return false;
  static const bool told = std::fprintf(stderr, "GPU tests are skipped: no CUDA device\n") > 0;
  return told;
}

// Nothing may allocate, free or wait for the whole device while ranks run; so everything is allocated here.
struct RankOutputs {
  std::int32_t* send_position = nullptr;
  bool* is_token_in_rank = nullptr;
  std::int32_t *per_rank = nullptr, *per_expert = nullptr, *matrix = nullptr, *prefix = nullptr, *recv = nullptr;
};

struct Rank {
  cudaStream_t stream = nullptr;
  char* host = nullptr;  // mapped words
  void* ids = nullptr;
  RankOutputs out;
  kernels::DeviceDomain domain;
  std::vector<std::int64_t> host_ids;  // what `ids` holds
  std::int64_t num_tokens = 0;
  bool use_mask = false;  // routing by the next two, which say the same as the ids
  bool* mask = nullptr;
  std::int32_t* counts = nullptr;
};

// What layout means, on the host.
struct HostLayoutResult {
  std::vector<std::int32_t> position;    // [T, R]
  std::vector<std::uint8_t> in_rank;     // [T, R]
  std::vector<std::int32_t> per_rank;    // [R]
  std::vector<std::int32_t> per_expert;  // [E]
};

inline HostLayoutResult layout_on_host(const std::vector<std::int64_t>& ids, int topk, int num_experts, int num_ranks) {
  const layout::ExpertBlocks experts(num_experts, num_ranks);
  const std::size_t num_tokens = ids.size() / topk;
  HostLayoutResult result{std::vector<std::int32_t>(num_tokens * num_ranks, -1),
                          std::vector<std::uint8_t>(num_tokens * num_ranks, 0), std::vector<std::int32_t>(num_ranks, 0),
                          std::vector<std::int32_t>(num_experts, 0)};
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts) continue;
    const int expert_idx = static_cast<int>(ids[i]), rank = experts.rank_of(expert_idx);
    ++result.per_expert[expert_idx];
    const std::size_t at = i / topk * num_ranks + rank;
    if (result.in_rank[at]) continue;
    result.in_rank[at] = 1;
    result.position[at] = result.per_rank[rank]++;
  }
  return result;
}

class World {
 public:
  World(int num_ranks, std::int64_t max_tokens, int topk, int num_experts, int id_bytes, double timeout_seconds)
      : num_ranks_(num_ranks),
        topk_(topk),
        num_experts_(num_experts),
        id_bytes_(id_bytes),
        max_tokens_(max_tokens),
        ranks_(num_ranks) {
    connect_gpus();
    reserve_local_memory_of_tools();
    for (int r = 0; r < num_ranks; ++r) {
      const OnGpuOf on(r);
      if (r < num_gpus()) kernels::prepare();
      Rank& rank = ranks_[r];
      cuda(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      rank.ids = device<char>(max_tokens * topk * id_bytes);
      rank.mask = device<bool>(max_tokens * num_ranks);
      rank.counts = device<std::int32_t>(num_experts);
      rank.out.send_position = device<std::int32_t>(max_tokens * num_ranks);
      rank.out.is_token_in_rank = device<bool>(max_tokens * num_ranks);
      rank.out.per_rank = device<std::int32_t>(num_ranks);
      rank.out.per_expert = device<std::int32_t>(num_experts);
      rank.out.matrix = device<std::int32_t>(num_ranks * num_ranks);
      rank.out.prefix = device<std::int32_t>(num_ranks * num_ranks);
      rank.out.recv = device<std::int32_t>(num_experts);
      const std::size_t host_bytes = layout::host_words_bytes(num_ranks);
      cuda(
          cudaHostAlloc(reinterpret_cast<void**>(&rank.host), host_bytes, cudaHostAllocMapped | cudaHostAllocPortable));
      std::memset(rank.host, 0, host_bytes);
    }
    const std::size_t bytes = layout::device_workspace_bytes(num_ranks);
    for (int r = 0; r < num_ranks; ++r) {
      const OnGpuOf on(r);
      workspaces_.push_back(device<char>(static_cast<std::int64_t>(bytes)));
    }
    for (int r = 0; r < num_ranks; ++r) {
      const OnGpuOf on(r);
      kernels::DeviceDomain& domain = ranks_[r].domain;
      domain.rank = r;
      domain.num_ranks = num_ranks;
      domain.words = layout::DeviceLayout(num_ranks);
      domain.host_words = layout::HostLayout(num_ranks);
      for (int peer = 0; peer < num_ranks; ++peer) domain.workspaces[peer] = workspaces_[peer];
      void* mapped = nullptr;
      cuda(cudaHostGetDevicePointer(&mapped, ranks_[r].host, 0));
      domain.host = static_cast<char*>(mapped);
      domain.timeout_ns = static_cast<std::uint64_t>(timeout_seconds * 1e9);
    }
    sync_gpus();
  }
  ~World() {
    for (void* memory : allocated_) cudaFree(memory);
    for (Rank& rank : ranks_) {
      cudaFreeHost(rank.host);
      cudaStreamDestroy(rank.stream);
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int num_ranks() const { return num_ranks_; }
  int topk() const { return topk_; }
  int num_experts() const { return num_experts_; }
  int id_bytes() const { return id_bytes_; }
  Rank& rank(int r) { return ranks_[r]; }

  // New ids for a rank, stream-ordered.
  void set_ids(int r, const std::vector<std::int64_t>& ids) {
    const OnGpuOf on(r);
    Rank& rank = ranks_[r];
    rank.host_ids = ids;
    rank.num_tokens = static_cast<std::int64_t>(ids.size()) / topk_;
    if (rank.num_tokens > max_tokens_) throw std::logic_error("more tokens than the World was made for");
    const std::vector<std::int32_t> narrow(ids.begin(), ids.end());
    const void* data = id_bytes_ == 8 ? static_cast<const void*>(ids.data()) : narrow.data();
    const HostLayoutResult same = layout_on_host(ids, topk_, num_experts_, num_ranks_);
    const auto upload = [&](void* to, const void* from, std::size_t bytes) {
      if (bytes > 0) cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, rank.stream));
    };
    upload(rank.ids, data, ids.size() * static_cast<std::size_t>(id_bytes_));
    upload(rank.mask, same.in_rank.data(), same.in_rank.size());
    upload(rank.counts, same.per_expert.data(), same.per_expert.size() * 4);
    cuda(cudaStreamSynchronize(rank.stream));
  }

  // Every output of a rank is overwritten, so that what a kernel does not write is seen.
  void poison(int r) {
    const OnGpuOf on(r);
    Rank& rank = ranks_[r];
    const auto fill = [&](void* memory, std::int64_t bytes) {
      cuda(cudaMemsetAsync(memory, 0x5a, bytes, rank.stream));
    };
    fill(rank.out.send_position, 4 * max_tokens_ * num_ranks_);
    fill(rank.out.is_token_in_rank, max_tokens_ * num_ranks_);
    fill(rank.out.per_rank, 4 * num_ranks_);
    fill(rank.out.per_expert, 4 * num_experts_);
    fill(rank.out.matrix, 4 * num_ranks_ * num_ranks_);
    fill(rank.out.prefix, 4 * num_ranks_ * num_ranks_);
    fill(rank.out.recv, 4 * num_experts_);
  }

  kernels::NotifyArgs args(int r, std::uint32_t sequence) {
    const Rank& rank = ranks_[r];
    kernels::NotifyArgs args;
    args.ids = {rank.ids, id_bytes_, topk_, rank.num_tokens, topk_};
    if (rank.use_mask) {
      args.ids = {};
      args.ids.num_tokens = rank.num_tokens;
      args.token_in_rank = rank.mask;
      args.expert_counts = rank.counts;
    }
    args.num_experts = num_experts_;
    args.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kDispatch);
    args.signature.num_experts = num_experts_;
    args.signature.topk = topk_;
    args.place.segment = 1;
    args.place.capacity = INT64_MAX;
    args.sequence = sequence;
    args.alone = true;
    args.send_position = rank.out.send_position;
    args.is_token_in_rank = rank.out.is_token_in_rank;
    args.num_tokens_per_rank = rank.out.per_rank;
    args.num_tokens_per_expert = rank.out.per_expert;
    args.rank_matrix = rank.out.matrix;
    args.rank_prefix_matrix = rank.out.prefix;
    args.recv_per_expert = rank.out.recv;
    return args;
  }

  template <typename T>
  std::vector<T> read(int r, const T* source, std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    if (count == 0) return values;
    const OnGpuOf on(r);
    cuda(cudaMemcpyAsync(values.data(), source, count * sizeof(T), cudaMemcpyDefault, ranks_[r].stream));
    cuda(cudaStreamSynchronize(ranks_[r].stream));
    return values;
  }
  std::vector<std::uint8_t> read(int r, const bool* source, std::int64_t count) {
    return read(r, reinterpret_cast<const std::uint8_t*>(source), count);
  }

  layout::ErrorRecord& error(int r) {  // a failure, if there is one
    const layout::HostLayout& words = ranks_[r].domain.host_words;
    layout::ErrorRecord& failure = words.error(ranks_[r].host, true);
    return failure.kind != 0 ? failure : words.error(ranks_[r].host, false);
  }

  // Waits as a host would: for a word of mapped memory with the tag of the call.
  std::uint32_t wait_host(int r, std::uint64_t& word, std::uint32_t sequence) {
    const auto load = [&] { return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_acquire); };
    std::uint64_t value = load();
    if (layout::has_tag(value, sequence)) return layout::tagged_count(value);
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!layout::has_tag(value = load(), sequence)) {
      if (std::chrono::steady_clock::now() > give_up) {
        throw std::runtime_error("rank " + std::to_string(r) + ": no word with sequence " + std::to_string(sequence));
      }
      std::this_thread::yield();
    }
    return layout::tagged_count(value);
  }
  layout::NotifyOutcome wait_outcome(int r, std::uint32_t sequence) {
    return static_cast<layout::NotifyOutcome>(
        wait_host(r, ranks_[r].domain.host_words.outcome(ranks_[r].host), sequence));
  }

 private:
  template <typename T>
  T* device(std::int64_t count) {
    void* memory = nullptr;
    cuda(cudaMalloc(&memory, static_cast<std::size_t>(count + 1) * sizeof(T)));
    cuda(cudaMemset(memory, 0, static_cast<std::size_t>(count + 1) * sizeof(T)));
    allocated_.push_back(memory);
    return static_cast<T*>(memory);
  }

  int num_ranks_, topk_, num_experts_, id_bytes_;
  std::int64_t max_tokens_;
  std::vector<Rank> ranks_;
  std::vector<char*> workspaces_;
  std::vector<void*> allocated_;
};

// Runs body(r) on a thread for each rank, whose GPU is current there; rethrows what the first of them throws.
inline void run(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(num_ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        cuda(cudaSetDevice(gpu_of(r)));
        body(r);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// All ranks wait here for each other, as often as they like. One that throws lets the others go: each holds a Leave.
class Meeting {
 public:
  explicit Meeting(int num_ranks) : num_ranks_(num_ranks) {}
  void wait() {
    const std::int64_t all = (arrived_.fetch_add(1) / num_ranks_ + 1) * num_ranks_;
    while (arrived_ < all && !left_) std::this_thread::yield();
  }
  struct Leave {
    Meeting& meeting;
    int exceptions = std::uncaught_exceptions();
    ~Leave() {
      if (std::uncaught_exceptions() > exceptions) meeting.left_ = true;
    }
  };

 private:
  const int num_ranks_;
  std::atomic<std::int64_t> arrived_{0};
  std::atomic<bool> left_{false};
};

// Ids as users send them and as they should not: -1, duplicates in a row, values outside [0, E), skew, empty rows.
inline std::vector<std::int64_t> random_ids(std::mt19937_64& random, std::int64_t num_tokens, int topk, int num_experts,
                                            int id_bytes) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(num_tokens * topk));
  // The last one is in range if its upper half is lost.
  const std::int64_t outside[] = {num_experts, num_experts + 7, -2, INT32_MIN, id_bytes == 8 ? 1ll << 40 : INT32_MAX};
  const bool skewed = random() % 3 == 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t choice = random() % 100;
    std::int64_t id = static_cast<std::int64_t>(random() % num_experts);
    if (skewed) id = id * id / num_experts;
    if (choice < 12) id = -1;
    if (choice >= 12 && choice < 20) id = outside[random() % 5];
    if (choice >= 20 && choice < 30 && i % topk > 0) id = ids[i - 1];
    ids[i] = id;
  }
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    if (random() % 16 == 0) std::fill_n(ids.begin() + t * topk, topk, -1);
  }
  return ids;
}

}  // namespace deep_moe::test
