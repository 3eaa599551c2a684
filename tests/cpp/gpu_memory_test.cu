// Device memory shared between ranks: segments, growth, reuse behind streams, loss of peers. Ranks are threads or
// processes.
#include <cuda_runtime.h>
#include <signal.h>

#include "cuda/device_world.hpp"
#include "gpu_programs.hpp"
#include "gpu_world.cuh"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;
using cuda::DeviceWorld;
using cuda::DeviceWorldOptions;
using cuda::MemoryKind;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

__host__ __device__ std::uint32_t pattern(std::uint32_t seed, std::size_t i) {
  return (static_cast<std::uint32_t>(i) + seed * 40503u) * 2654435761u;
}

__global__ void write_pattern(std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
    words[i] = pattern(seed, i);
}

__global__ void count_wrong(const std::uint32_t* words, std::size_t count, std::uint32_t seed, unsigned* wrong) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
    if (words[i] != pattern(seed, i)) atomicAdd(wrong, 1u);
}

// Holds a stream until the host opens the gate (mapped memory), or for 20 s.
__global__ void hold(const volatile std::uint32_t* gate) {
  const long long start = clock64();
  while (*gate == 0 && clock64() - start < 40'000'000'000ll) __nanosleep(1000);
}

cudaStream_t as_stream(cuda::Stream stream) { return static_cast<cudaStream_t>(stream); }

struct Gate {
  std::uint32_t* word = nullptr;
  Gate() {
    test::cuda(cudaHostAlloc(reinterpret_cast<void**>(&word), 64, cudaHostAllocMapped | cudaHostAllocPortable));
    *word = 0;
  }
  ~Gate() {
    open();
    cudaDeviceSynchronize();
    cudaFreeHost(word);
  }
  void open() { *static_cast<volatile std::uint32_t*>(word) = 1; }
  void hold_stream(cudaStream_t stream) {
    hold<<<1, 1, 0, stream>>>(word);
    test::cuda(cudaGetLastError());
  }
};

struct TestStream {
  cudaStream_t stream = nullptr;
  TestStream() { test::cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~TestStream() { cudaStreamDestroy(stream); }
  operator cudaStream_t() const { return stream; }
};

void write(void* memory, std::size_t bytes, std::uint32_t seed, cudaStream_t stream) {
  write_pattern<<<32, 256, 0, stream>>>(static_cast<std::uint32_t*>(memory), bytes / 4, seed);
  test::cuda(cudaGetLastError());
}

void expect_pattern(const void* memory, std::size_t bytes, std::uint32_t seed, cudaStream_t stream,
                    const std::string& what) {
  unsigned *wrong = nullptr, result = 1;
  test::cuda(cudaMallocAsync(&wrong, 4, stream));
  test::cuda(cudaMemsetAsync(wrong, 0, 4, stream));
  count_wrong<<<32, 256, 0, stream>>>(static_cast<const std::uint32_t*>(memory), bytes / 4, seed, wrong);
  test::cuda(cudaMemcpyAsync(&result, wrong, 4, cudaMemcpyDefault, stream));
  test::cuda(cudaFreeAsync(wrong, stream));
  test::cuda(cudaStreamSynchronize(stream));
  expect(result == 0, what + ": " + std::to_string(result) + " of " + std::to_string(bytes / 4) + " words are wrong");
}

DeviceWorldOptions world_options(int rank, MemoryKind memory = MemoryKind::kAuto) {
  DeviceWorldOptions options;
  options.device = rank % cuda::num_devices();
  options.memory = memory;
  options.timeout_seconds = 60;
  test::cuda(cudaSetDevice(options.device));
  return options;
}

template <typename T>
std::vector<T> gather(const Bootstrap& bootstrap, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(bootstrap.size));
  bootstrap.all_gather(&mine, all.data(), sizeof(T));
  return all;
}

void barrier(const Bootstrap& bootstrap) { gather(bootstrap, char{0}); }

struct Offer {
  int segment;
  std::size_t offset;
};

// Every rank writes a slice of a block of every rank, itself included; everybody checks all of its own.
void exchange_patterns(const Bootstrap& bootstrap, DeviceWorld& world, std::size_t slice, std::uint32_t seed) {
  const int num_ranks = bootstrap.size;
  const cudaStream_t stream = as_stream(world.comm_stream());
  const Block block = world.heap().allocate(slice * num_ranks, stream);
  expect(static_cast<bool>(block), "the heap has " + std::to_string(slice * num_ranks) + " bytes");
  expect(world.shared(block.segment), "every peer has mapped segment " + std::to_string(block.segment));
  const std::vector<Offer> offers = gather(bootstrap, Offer{block.segment, block.offset});
  for (int peer = 0; peer < num_ranks; ++peer) {
    char* there = world.address(peer, offers[peer].segment, offers[peer].offset + slice * bootstrap.rank);
    write(there, slice, seed + 100 * peer + bootstrap.rank, stream);
  }
  test::cuda(cudaStreamSynchronize(stream));
  barrier(bootstrap);
  for (int peer = 0; peer < num_ranks; ++peer)
    expect_pattern(block.ptr + slice * peer, slice, seed + 100 * bootstrap.rank + peer, stream,
                   "rank " + std::to_string(bootstrap.rank) + ", what rank " + std::to_string(peer) + " wrote");
  std::vector<char*> table(static_cast<std::size_t>(num_ranks * layout::kMaxSegments));
  test::cuda(
      cudaMemcpyAsync(table.data(), world.segment_table(), table.size() * sizeof(char*), cudaMemcpyDefault, stream));
  test::cuda(cudaStreamSynchronize(stream));
  for (int peer = 0; peer < num_ranks; ++peer) {
    char* const* row = &table[static_cast<std::size_t>(peer * layout::kMaxSegments)];
    expect(row[0] == world.domain().workspaces[peer], "the table has the workspace");
    expect(row[offers[peer].segment] == world.address(peer, offers[peer].segment, 0), "the table has the segment");
    expect(row[layout::kMaxSegments - 1] == nullptr, "the table's rest is null");
  }
  barrier(bootstrap);
  world.heap().free(block);
}

void patterns_and_growth(const Bootstrap& bootstrap, MemoryKind memory) {
  DeviceWorldOptions options = world_options(bootstrap.rank, memory);
  options.heap_bytes = 8 * kMiB;
  DeviceWorld world(bootstrap, options);
  exchange_patterns(bootstrap, world, kMiB, 7);
  // One rank grows, then all, then one that cannot: its reason reaches all, what is there goes on working.
  DeviceWorld::Growth growth = world.grow(bootstrap.rank == 1 ? 40 * kMiB : 0);
  expect(growth.everywhere, "rank 1 grew: " + growth.reasons[1]);
  exchange_patterns(bootstrap, world, kMiB, 11);
  growth = world.grow(48 * kMiB);
  expect(growth.everywhere, "all grew");
  exchange_patterns(bootstrap, world, 9 * kMiB, 13);
  growth = world.grow(bootstrap.rank == 0 ? std::size_t{1} << 46 : 0);
  expect(!growth.everywhere && !growth.reasons[0].empty() && growth.reasons[1].empty(), "rank 0 could not grow");
  expect(growth.reasons[0].find("CUDA_ERROR") != std::string::npos, "the driver's reason: " + growth.reasons[0]);
  exchange_patterns(bootstrap, world, kMiB, 17);
  // A segment that one rank appends by itself reaches the peers by and by.
  std::string reason;
  const Block block = bootstrap.rank == 0 ? world.allocate_or_grow(200 * kMiB, nullptr, &reason) : Block{};
  expect(bootstrap.rank != 0 || block, "a local segment: " + reason);
  const Offer offer = gather(bootstrap, Offer{block.segment, block.offset})[0];
  if (bootstrap.rank == 1) {
    write(world.address(0, offer.segment, offer.offset), kMiB, 23, as_stream(world.comm_stream()));
    test::cuda(cudaStreamSynchronize(as_stream(world.comm_stream())));
  }
  if (bootstrap.rank == 0) {
    world.wait_until_shared(block.segment, "mapping the local segment");
    expect(world.shared(block.segment), "all have mapped the local segment");
  }
  barrier(bootstrap);
  if (bootstrap.rank == 0) {
    expect_pattern(block.ptr, kMiB, 23, as_stream(world.comm_stream()), "the local segment");
  }
  barrier(bootstrap);
}

// layout and notify, from this layer's memory, against the host.
void notify_through_world(const Bootstrap& bootstrap) {
  constexpr int kTopk = 8, kExperts = 61, kCalls = 12;
  const int rank = bootstrap.rank, num_ranks = bootstrap.size;
  DeviceWorldOptions options = world_options(rank);
  options.heap_bytes = 16 * kMiB;
  DeviceWorld world(bootstrap, options);
  const cudaStream_t stream = as_stream(world.comm_stream());
  const layout::ExpertBlocks experts(kExperts, num_ranks);
  for (std::uint32_t call = 1; call <= kCalls; ++call) {
    std::vector<HostLayoutResult> model;
    std::vector<std::int64_t> ids;
    for (int source = 0; source < num_ranks; ++source) {
      std::mt19937_64 random(1000 * call + source);
      const auto theirs = random_ids(random, 100 * source + 37 * call, kTopk, kExperts, 8);
      model.push_back(layout_on_host(theirs, kTopk, kExperts, num_ranks));
      if (source == rank) ids = theirs;
    }
    const std::size_t num_tokens = ids.size() / kTopk;
    DeviceWorld* w = &world;
    std::vector<std::shared_ptr<void>> owners;
    const auto block = [&](std::size_t bytes) {
      const Block made = w->heap().allocate(bytes, stream);
      expect(static_cast<bool>(made), "the heap has room");
      owners.push_back(w->heap().own(made, stream));
      return static_cast<void*>(made.ptr);
    };
    kernels::NotifyArgs args;
    void* device_ids = block(ids.size() * 8);
    test::cuda(cudaMemcpyAsync(device_ids, ids.data(), ids.size() * 8, cudaMemcpyDefault, stream));
    args.ids = {device_ids, 8, kTopk, static_cast<std::int64_t>(num_tokens), kTopk};
    args.num_experts = kExperts;
    args.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kDispatch);
    args.signature.num_experts = kExperts;
    args.place = {1, 0, 0, INT64_MAX};
    args.sequence = call;
    args.alone = true;
    args.send_position = static_cast<std::int32_t*>(block(num_tokens * num_ranks * 4));
    args.rank_matrix = static_cast<std::int32_t*>(block(num_ranks * num_ranks * 4));
    args.recv_per_expert = static_cast<std::int32_t*>(block(kExperts * 4));
    kernels::notify(world.domain(), args, stream);

    const layout::HostLayout& words = world.domain().host_words;
    char* host = world.host_words();
    const auto tagged = [&](std::uint64_t& word) {
      world.wait(
          "test: words of notify",
          [&] { return layout::has_tag(std::atomic_ref<std::uint64_t>(word).load(), call) ? -1 : rank; },
          [&](int) { return "expected tag " + std::to_string(call); });
      return layout::tagged_count(word);
    };
    expect(tagged(words.outcome(host)) == static_cast<std::uint32_t>(layout::NotifyOutcome::kRowsFit), "the rows fit");
    for (int r = 0; r < num_ranks; ++r) {
      std::uint32_t rows = 0;
      for (int source = 0; source < num_ranks; ++source) rows += model[source].per_rank[r];
      expect(tagged(words.rank_rows(host)[r]) == rows, "rows of rank " + std::to_string(r));
    }
    std::vector<std::int32_t> matrix(num_ranks * num_ranks), recv(kExperts), position(num_tokens * num_ranks);
    test::cuda(cudaMemcpyAsync(matrix.data(), args.rank_matrix, matrix.size() * 4, cudaMemcpyDefault, stream));
    test::cuda(cudaMemcpyAsync(recv.data(), args.recv_per_expert, recv.size() * 4, cudaMemcpyDefault, stream));
    test::cuda(cudaMemcpyAsync(position.data(), args.send_position, position.size() * 4, cudaMemcpyDefault, stream));
    test::cuda(cudaStreamSynchronize(stream));
    expect(position == model[rank].position, "positions");
    for (int source = 0; source < num_ranks; ++source) {
      for (int r = 0; r < num_ranks; ++r)
        expect(matrix[source * num_ranks + r] == model[source].per_rank[r], "the matrix of rows");
    }
    for (int l = 0; l < experts.num_local_experts(rank); ++l) {
      std::int32_t entries = 0;
      for (int source = 0; source < num_ranks; ++source)
        entries += model[source].per_expert[experts.first_expert(rank) + l];
      expect(recv[l] == entries, "entries of local expert " + std::to_string(l));
    }
  }
  barrier(bootstrap);
}

// Rank 1 is killed; what rank 0 has mapped of it stays usable, and a wait for it ends.
void killed_peer(const Bootstrap& bootstrap) {
  DeviceWorldOptions options = world_options(bootstrap.rank);
  options.heap_bytes = 256 * kMiB;
  DeviceWorld world(bootstrap, options);
  exchange_patterns(bootstrap, world, kMiB, 3);
  if (bootstrap.rank == 1) ::raise(SIGKILL);
  const std::string text = expect_throw<PeerLostError>([&] { world.grow(kMiB); }, "rank 1 has ended");
  expect(text.find("rank 0 waited") != std::string::npos, "who waited: " + text);
  const cudaStream_t stream = as_stream(world.comm_stream());
  write(world.address(1, 1, 0), 64 * kMiB, 5, stream);
  expect_pattern(world.address(1, 1, 0), 64 * kMiB, 5, stream, "memory of a rank that was killed");
}

// Objects that end with the process, after main.
void exit_without_destroying(const Bootstrap& bootstrap) {
  static std::shared_ptr<DeviceWorld> world;
  static std::shared_ptr<void> owner;
  DeviceWorldOptions options = world_options(bootstrap.rank);
  options.heap_bytes = 8 * kMiB;
  world = cuda::make_device_world(bootstrap, options);
  const Block block = world->heap().allocate(kMiB, world->comm_stream());
  owner = world->heap().own(block, world->comm_stream());
  write(block.ptr, kMiB, 1, as_stream(world->comm_stream()));
  barrier(bootstrap);
}

// ---- Ranks as processes.

const ChildFunctions& child_functions() {
  static const ChildFunctions functions = {
      {"patterns fd", [](const Bootstrap& b) { patterns_and_growth(b, MemoryKind::kDescriptor); }},
      {"patterns ipc", [](const Bootstrap& b) { patterns_and_growth(b, MemoryKind::kIpc); }},
      {"patterns fabric", [](const Bootstrap& b) { patterns_and_growth(b, MemoryKind::kFabric); }},
      {"notify", notify_through_world},
      {"killed peer", killed_peer},
      {"exit", exit_without_destroying},
      {"no device",
       [](const Bootstrap& b) {
         std::string reason;
         expect(!cuda::available(&reason) && !reason.empty() && cuda::num_devices() == 0, "no device: " + reason);
         expect_throw<UnavailableError>([&] { cuda::make_device_world(b, {}); }, reason);
       }},
  };
  return functions;
}

void run_programs(const std::string& function, int num_ranks, const std::vector<bool>& killed = {}) {
  test::run_programs({"child of gpu_memory_test", killed, {}}, function, num_ranks);
}

std::size_t free_device_memory() {
  std::size_t free_bytes = 0, total = 0;
  test::cuda(cudaMemGetInfo(&free_bytes, &total));
  return free_bytes;
}

double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// A world of one rank for tests of the heap.
struct Alone {
  DeviceWorld world;
  explicit Alone(std::size_t heap_bytes) : world(make_thread_bootstraps(1)[0], options(heap_bytes)) {}
  static DeviceWorldOptions options(std::size_t heap_bytes) {
    DeviceWorldOptions result = world_options(0);
    result.heap_bytes = heap_bytes;
    return result;
  }
  cuda::DeviceHeap& heap() { return world.heap(); }
};

}  // namespace

TEST_CASE("child of gpu_memory_test" * doctest::skip()) { run_as_child(child_functions()); }

TEST_CASE("without a usable device the reason is told") {
  std::string reason;
  if (cuda::available(&reason)) {
    CHECK(cuda::num_devices() > 0);
    // A driver, but nothing visible.
    test::run_programs({"child of gpu_memory_test", {}, {{"CUDA_VISIBLE_DEVICES", ""}}}, "no device", 1);
  } else {
    CHECK(reason.size() > 10);
    CHECK(cuda::num_devices() == 0);
    CHECK_THROWS_AS(cuda::current_device(), UnavailableError);
    expect_throw<UnavailableError>([&] { cuda::make_device_world(make_thread_bootstraps(1)[0], {}); }, reason);
  }
}

TEST_CASE("threads write into each other's segments, also into those appended later") {
  if (no_gpu()) return;
  for (const MemoryKind memory : {MemoryKind::kAuto, MemoryKind::kIpc}) {
    for (const int num_ranks : {2, 4})
      check_all(run_threads(num_ranks, [&](const Bootstrap& b) { patterns_and_growth(b, memory); }));
  }
}

TEST_CASE("processes write into each other's segments, passed as descriptors, fabric handles and IPC handles") {
  if (no_gpu()) return;
  run_programs("patterns fd", 2);
  run_programs("patterns ipc", 2);
  run_programs("patterns fabric", 2);
}

TEST_CASE("notify between threads and between processes equals the host's layout") {
  if (no_gpu()) return;
  check_all(run_threads(3, notify_through_world));
  run_programs("notify", 2);
}

TEST_CASE("a rank that cannot be made is an error on all ranks") {
  if (no_gpu()) return;
  check_all(run_threads(3, [](const Bootstrap& bootstrap) {
    DeviceWorldOptions options = world_options(bootstrap.rank);
    if (bootstrap.rank == 1) options.device = 99;
    if (bootstrap.rank == 1) {
      expect_throw<ArgumentError>([&] { DeviceWorld(bootstrap, options); }, "device: got 99");
    } else {
      expect_throw<Error>([&] { DeviceWorld(bootstrap, options); }, "rank 1 could not make its Buffer: device: got 99");
    }
    options = world_options(bootstrap.rank);
    options.heap_bytes = bootstrap.rank == 2 ? std::size_t{1} << 46 : kMiB;
    expect_throw<Error>([&] { DeviceWorld(bootstrap, options); }, "CUDA_ERROR");
    options.heap_bytes = kMiB;
    DeviceWorld world(bootstrap, options);
    exchange_patterns(bootstrap, world, 4096, 1);
  }));
}

TEST_CASE("a killed process leaves its peer's mappings valid and nothing behind") {
  if (no_gpu()) return;
  const std::size_t before = free_device_memory();
  run_programs("killed peer", 2, {false, true});
  run_programs("exit", 2);
  std::size_t after = 0;
  for (int i = 0; i < 100 && (after = free_device_memory()) + 16 * kMiB < before; ++i) ::usleep(50000);
  CHECK(after + 16 * kMiB >= before);
}

TEST_CASE("a block is reused only behind the streams that used it") {
  if (no_gpu()) return;
  Alone alone(64 * kMiB);
  cuda::DeviceHeap& heap = alone.heap();
  const std::size_t all = static_cast<std::size_t>(heap.stats().heap_bytes), half = all / 2;
  TestStream hand_out, added, other;
  const Block probe = heap.allocate(all, other.stream);  // the rest of the heap is empty
  heap.free(probe);
  for (const bool by_record_stream : {false, true}) {
    Gate gate;
    const Block first = heap.allocate(half, hand_out.stream);
    std::shared_ptr<void> owner = heap.own(first, hand_out.stream);
    if (by_record_stream) CHECK(heap.record_stream(first.ptr + 4096, added.stream));
    const cudaStream_t user = by_record_stream ? added.stream : hand_out.stream;
    gate.hold_stream(user);
    write(first.ptr, half, 1, user);  // late: it must not land in somebody else's block
    owner.reset();
    CHECK(heap.stats().quarantined_bytes == static_cast<std::int64_t>(half));
    CHECK_FALSE(heap.record_stream(first.ptr, added.stream));
    const Block second = heap.allocate(half, other.stream);
    REQUIRE(second);
    CHECK(second.ptr != first.ptr);
    write(second.ptr, half, 2, other);
    CHECK_FALSE(heap.allocate(4096, other.stream));
    CHECK_FALSE(heap.settle(0.01));
    CHECK(cudaStreamQuery(user) == cudaErrorNotReady);
    gate.open();
    CHECK(heap.settle(10));
    CHECK(heap.stats().quarantined_bytes == 0);
    const Block third = heap.allocate(half, other.stream);
    CHECK(third.ptr == first.ptr);
    expect_pattern(third.ptr, half, 1, other, "the late write");
    expect_pattern(second.ptr, half, 2, other, "a block handed out meanwhile");
    heap.free(second);
    heap.free(third);
  }
  CHECK(heap.stats().largest_free_bytes == static_cast<std::int64_t>(all));
}

TEST_CASE("a thousand blocks dropped in any order from other threads") {
  if (no_gpu()) return;
  Alone alone(256 * kMiB);
  cuda::DeviceHeap& heap = alone.heap();
  TestStream stream;
  std::mt19937_64 random(5);
  struct Live {
    Block block;
    std::shared_ptr<void> owner;
    std::uint32_t seed;
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<Live> live;
    std::size_t bytes = 0;
    for (std::uint32_t i = 0; i < 1000; ++i) {
      const Block block = heap.allocate(1024 + random() % (192 * 1024), stream.stream);
      REQUIRE(block);
      bytes += block.bytes;
      live.push_back({block, heap.own(block, stream.stream), i});
      write_pattern<<<1, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(block.ptr), block.bytes / 4, i);
    }
    CHECK(heap.stats().live_blocks == 1000);
    CHECK(heap.stats().live_bytes == static_cast<std::int64_t>(bytes));
    std::shuffle(live.begin(), live.end(), random);
    for (std::size_t i = 0; i < live.size(); i += 97)
      expect_pattern(live[i].block.ptr, live[i].block.bytes, live[i].seed, stream, "a live block");
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = t; i < live.size(); i += 4) live[i].owner.reset();
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(heap.settle(10));
    const MemoryStats stats = heap.stats();
    CHECK(stats.live_blocks == 0);
    CHECK(stats.live_bytes == 0);
    CHECK(stats.segments == 1);
    CHECK(stats.largest_free_bytes == stats.heap_bytes);  // in one piece again
  }
}

TEST_CASE("blocks under graph capture stay with the graph") {
  if (no_gpu()) return;
  Alone alone(32 * kMiB);
  cuda::DeviceHeap& heap = alone.heap();
  TestStream stream;
  const cudaStream_t comm = as_stream(alone.world.comm_stream());
  cudaEvent_t fork = nullptr, join = nullptr;
  test::cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  test::cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  const Block eager = heap.allocate(kMiB, stream.stream);
  std::shared_ptr<void> eager_owner = heap.own(eager, stream.stream);

  cudaGraph_t graph = nullptr;
  test::cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  test::cuda(cudaEventRecord(fork, stream));
  test::cuda(cudaStreamWaitEvent(comm, fork, 0));
  const Block first = heap.allocate(4 * kMiB, comm);
  REQUIRE(first);
  std::shared_ptr<void> owner = heap.own(first, stream.stream);
  write(first.ptr, first.bytes, 1, comm);
  eager_owner.reset();  // a stream that is captured has used it
  CHECK(heap.stats().quarantined_bytes == static_cast<std::int64_t>(eager.bytes));
  owner.reset();
  const Block second = heap.allocate(3 * kMiB, comm);
  CHECK(second.ptr == first.ptr);  // inside the capture, behind its users
  owner = heap.own(second, stream.stream);
  write(second.ptr, second.bytes, 2, comm);
  const Block third = heap.allocate(2 * kMiB, comm);
  CHECK(third.ptr != second.ptr);
  std::shared_ptr<void> third_owner = heap.own(third, stream.stream);
  write(third.ptr, third.bytes, 3, comm);
  test::cuda(cudaEventRecord(join, comm));
  test::cuda(cudaStreamWaitEvent(stream, join, 0));
  test::cuda(cudaStreamEndCapture(stream, &graph));

  CHECK(heap.settle(10));  // the eager one
  const std::int64_t held = static_cast<std::int64_t>(second.bytes + third.bytes);
  CHECK(heap.stats().live_bytes == held);
  cudaGraphExec_t executable = nullptr;
  test::cuda(cudaGraphInstantiate(&executable, graph, 0));
  test::cuda(cudaGraphDestroy(graph));
  owner.reset();
  third_owner.reset();
  for (int replay = 0; replay < 3; ++replay) {
    const Block outside = heap.allocate(4 * kMiB, stream.stream);
    CHECK(outside.ptr != second.ptr);
    CHECK(outside.ptr != third.ptr);
    write(outside.ptr, outside.bytes, 9, stream);
    test::cuda(cudaGraphLaunch(executable, stream));
    expect_pattern(second.ptr, second.bytes, 2, stream, "a replayed block");
    expect_pattern(third.ptr, third.bytes, 3, stream, "another replayed block");
    expect_pattern(outside.ptr, outside.bytes, 9, stream, "a block outside the graph");
    heap.free(outside);
  }
  CHECK(heap.stats().live_bytes == held);
  test::cuda(cudaGraphLaunch(executable, stream));
  test::cuda(cudaGraphExecDestroy(executable));
  test::cuda(cudaStreamSynchronize(stream));
  bool released = false;  // CUDA lets go of it on a thread of its own
  for (int i = 0; i < 500 && !released; ++i) {
    released = heap.stats().live_bytes == 0;
    ::usleep(10000);
  }
  CHECK(released);
  CHECK(heap.stats().quarantined_bytes == 0);
  cudaEventDestroy(fork);
  cudaEventDestroy(join);
}

TEST_CASE("segments are appended while a kernel runs, and tensors outlive their world and forks") {
  if (no_gpu()) return;
  std::shared_ptr<void> owner;
  Block block;
  TestStream stream;
  {
    Gate gate;
    auto alone = std::make_unique<Alone>(8 * kMiB);
    gate.hold_stream(stream);
    DeviceWorld::Growth growth;
    const double took = milliseconds([&] { growth = alone->world.grow(512 * kMiB); });
    CHECK(growth.everywhere);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    MESSAGE("a segment of 512 MiB appended beside a running kernel: ", took, " ms");
    block = alone->heap().allocate(64 * kMiB, stream.stream);
    owner = alone->heap().own(block, stream.stream);
    write(block.ptr, block.bytes, 4, stream);  // behind the held kernel
    alone.reset();
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    gate.open();
  }
  expect_pattern(block.ptr, block.bytes, 4, stream, "a tensor of a destroyed world");
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    owner.reset();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  expect_pattern(block.ptr, block.bytes, 4, stream, "a tensor after a fork");
  Gate gate;
  gate.hold_stream(stream);
  write(block.ptr, block.bytes, 5, stream);
  owner.reset();  // the last user, with a kernel still to come: nothing is unmapped yet
  gate.open();
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
}

TEST_CASE("host cost of the heap and of waits") {
  if (no_gpu()) return;
  Alone alone(64 * kMiB);
  cuda::DeviceHeap& heap = alone.heap();
  TestStream stream;
  constexpr int kRounds = 2000;
  double allocate = 0, drop = 0;
  for (int i = 0; i < kRounds; ++i) {
    std::vector<std::shared_ptr<void>> owners(8);
    allocate += milliseconds([&] {
      for (auto& owner : owners) owner = heap.own(heap.allocate(65536, stream.stream), stream.stream);
    });
    drop += milliseconds([&] { owners.clear(); });
  }
  CHECK(heap.settle(10));
  MESSAGE("a block of two streams: ", allocate / kRounds / 8 * 1000, " us to hand out, ", drop / kRounds / 8 * 1000,
          " us to drop");
  double grow = 0;
  for (int i = 0; i < 5; ++i) grow += milliseconds([&] { CHECK(alone.world.grow(64 * kMiB).everywhere); });
  MESSAGE("an agreed growth, one rank: ", grow / 5, " ms");
}
