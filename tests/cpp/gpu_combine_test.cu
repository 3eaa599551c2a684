// Combine on a GPU against the same sum on the host, bit for bit; then thousands of calls of all kinds in a row.
#include <doctest/doctest.h>

#include <deep_moe/error.hpp>

#include <memory>

#include "gpu_sums.cuh"
#include "kernels/intranode/combine.cuh"

using namespace deep_moe;
using namespace deep_moe::test;
using kernels::SumType;
using layout::NotifyOutcome;

#define GPU_TEST_CASE(name) TEST_CASE(name* doctest::skip(no_gpu()))

namespace {

constexpr double kLong = 100.0;

bool reduced() { return std::getenv("DEEP_MOE_GPU_STRESS_CALLS") != nullptr; }  // a checker is at work

// Counts of new ids on host and device, then inputs for them.
void prepare_sums(World& world, Rows& rows, Sums& sums, std::mt19937_64& random,
                  const std::vector<std::int64_t>& num_tokens) {
  for (int r = 0; r < world.num_ranks(); ++r)
    world.set_ids(
        r, random_ids(random, num_tokens[r % num_tokens.size()], world.topk(), world.num_experts(), world.id_bytes()));
  rows.count();
  run(world.num_ranks(), [&](int r) {
    kernels::notify(world.rank(r).domain, world.args(r, 0), world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  for (int r = 0; r < world.num_ranks(); ++r) sums.fill(r, random);
}

void combine_all(World& world, Sums& sums, std::uint32_t sequence, NotifyOutcome wanted = NotifyOutcome::kRowsFit,
                 const std::function<void(int, kernels::CombineArgs&)>& change = {}) {
  std::vector<NotifyOutcome> outcomes(world.num_ranks());
  run(world.num_ranks(), [&](int r) {
    kernels::CombineArgs args = sums.args(r, sequence);
    if (change) change(r, args);
    kernels::combine(world.rank(r).domain, args, world.rank(r).stream);
    outcomes[r] = world.wait_outcome(r, sequence);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  for (const NotifyOutcome outcome : outcomes) CHECK_EQ(static_cast<int>(outcome), static_cast<int>(wanted));
}

int stress_calls() {
  const char* value = std::getenv("DEEP_MOE_GPU_STRESS_CALLS");
  return value ? std::atoi(value) : 20000;
}

__global__ void count_differences(const uint4* seen, const uint4* expected, std::int64_t num_vectors,
                                  unsigned long long* differences) {
  for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors; i += gridDim.x * blockDim.x) {
    const uint4 a = seen[i], b = expected[i];
    if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w) atomicAdd(differences, 1ull);
  }
}

// Numbers first .. first + count - 1 of a 16-bit type, each with all numbers of the type: add_two() against the sum in
// fp32. Not-a-numbers may differ in their bits.
template <typename T>
__global__ void compare_pairs(std::uint32_t first, unsigned long long* differences) {
  const std::uint32_t a = first + blockIdx.x;
  const auto is_nan = [](std::uint32_t bits) {
    return std::is_same_v<T, __half> ? (bits & 0x7fffu) > 0x7c00u : (bits & 0x7fffu) > 0x7f80u;
  };
  for (std::uint32_t b = 8 * threadIdx.x; b < 65536; b += 8 * blockDim.x) {
    const std::uint32_t twice = a | a << 16;
    const uint4 x{twice, twice, twice, twice};
    const uint4 y{b | (b + 1) << 16, (b + 2) | (b + 3) << 16, (b + 4) | (b + 5) << 16, (b + 6) | (b + 7) << 16};
    float sums[8] = {};
    kernels::Vector<T>::add(sums, x);
    kernels::Vector<T>::add(sums, y);
    const uint4 expected = kernels::Vector<T>::round(sums), seen = kernels::Vector<T>::add_two(x, y);
    const std::uint32_t words[4][2] = {
        {seen.x, expected.x}, {seen.y, expected.y}, {seen.z, expected.z}, {seen.w, expected.w}};
    for (const auto& word : words) {
      for (const int shift : {0, 16}) {
        const std::uint32_t s = word[0] >> shift & 0xffff, e = word[1] >> shift & 0xffff;
        if (s != e && !(is_nan(s) && is_nan(e))) atomicAdd(differences, 1ull);
      }
    }
  }
}

}  // namespace

GPU_TEST_CASE("combine: two numbers of 16 bits summed at once are their fp32 sum rounded, whatever the two") {
  unsigned long long* differences = nullptr;
  cuda(cudaMallocManaged(&differences, sizeof(*differences)));
  *differences = 0;
  const unsigned count = reduced() ? 64 : 65536;
  for (unsigned first = 0; first < 65536; first += reduced() ? 8192 : 65536) {
    compare_pairs<__nv_bfloat16><<<count, 256>>>(first, differences);
    compare_pairs<__half><<<count, 256>>>(first, differences);
  }
  cuda(cudaGetLastError());
  cuda(cudaDeviceSynchronize());
  CHECK_EQ(*differences, 0ull);
  cuda(cudaFree(differences));
}

GPU_TEST_CASE("combine: equal to the host bit for bit, all types, shapes and biases, both paths") {
  struct Shape {
    int num_ranks, topk, num_experts;
    std::vector<std::int64_t> num_tokens;
    SumShape sum;
  };
  std::vector<Shape> shapes = {
      {2, 8, 256, {130, 77}, {SumType::kBf16, 7168, 0, true, 0, 8}},
      {2, 8, 256, {37, 5}, {SumType::kBf16, 7168, 0, true, 0, 16}},  // few tokens, whose rows go in parts
      {3, 4, 16, {63, 65, 102}, {SumType::kFp16, 2880, 1, true, 0}},
      {4, 6, 37, {0, 1, 60, 200}, {SumType::kFp32, 64, 2, true, 0}},
      {8, 8, 60, {100, 0, 57, 1}, {SumType::kBf16, 1024, 2, false, 0}},
      {1, 8, 256, {90}, {SumType::kFp16, 64, 0, true, 0}},
      {2, 64, 4096, {50, 29}, {SumType::kFp32, 8192, 1, true, 0}},
      {5, 3, 3, {120}, {SumType::kBf16, 1848, 0, true, 16}},
      {8, 10, 30, {0}, {SumType::kBf16, 128, 0, true, 0}},
      {12, 33, 130, {30, 12}, {SumType::kBf16, 264, 1, true, 2}},  // out and bias at 2-byte alignment
      {3, 1, 16, {300}, {SumType::kFp32, 20, 2, true, 4}},
      {2, 8, 256, {40}, {SumType::kBf16, 30000, 2, true, 8}},
      {20, 32, 200, {24, 7}, {SumType::kBf16, 1024, 1, true, 0, 2}},  // more rows than a set takes, and fewer
  };
  if (reduced()) shapes.erase(shapes.begin() + 7, shapes.end());
  std::mt19937_64 random(31);
  std::uint32_t sequence = 0;
  for (Shape& shape : shapes) {
    CAPTURE(shape.num_ranks);
    CAPTURE(shape.sum.hidden);
    CAPTURE(static_cast<int>(shape.sum.type));
    const std::int64_t most = *std::max_element(shape.num_tokens.begin(), shape.num_tokens.end());
    World world(shape.num_ranks, most, shape.topk, shape.num_experts, 8, kLong);
    Rows rows(world, most, {});
    Sums sums(world, rows, most, shape.sum);
    for (const bool vector_path : {false, true}) {
      CAPTURE(vector_path);
      sums.shape().vector_path = vector_path;
      for (int round = 0; round < 2; ++round) {
        prepare_sums(world, rows, sums, random, shape.num_tokens);
        combine_all(world, sums, ++sequence);
        CHECK_EQ(sums.check(), "");
      }
    }
  }
}

GPU_TEST_CASE("combine: a large call, any number of blocks, the same bits every time") {
  std::mt19937_64 random(32);
  const std::int64_t T = reduced() ? 200 : 2048;
  World world(2, T, 8, 256, 8, kLong);
  Rows rows(world, T, {});
  Sums sums(world, rows, T, {SumType::kBf16, 7168, 1, true, 0, 16});
  prepare_sums(world, rows, sums, random, {T, T / 3});
  std::uint32_t sequence = 0;
  for (const int num_sms : {1, 8, 16, 60}) {
    if (reduced() && num_sms != 8) continue;
    CAPTURE(num_sms);
    sums.shape().num_sms = num_sms;
    combine_all(world, sums, ++sequence);
    CHECK_EQ(sums.check(), "");
  }
}

GPU_TEST_CASE("combine: another handle is noticed by all, and the next call works") {
  std::mt19937_64 random(33);
  World world(3, 80, 4, 16, 8, kLong);
  Rows rows(world, 80, {});
  Sums sums(world, rows, 80, {});
  prepare_sums(world, rows, sums, random, {80, 0, 30});
  combine_all(world, sums, 1, NotifyOutcome::kMismatch, [](int r, kernels::CombineArgs& args) {
    if (r == 1) args.start.signature.handle_hash = 5;
  });
  for (int r = 0; r < 3; ++r) {
    CHECK_EQ(world.error(r).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kCallMismatch));
    CHECK_EQ(world.error(r).peer_signature.handle_hash, r == 1 ? 0 : 5);
    CHECK_EQ(world.read(r, sums.rank(r).out, 64), std::vector<char>(64, static_cast<char>(kPoison)));
    const OnGpuOf on(r);
    kernels::clear_error(world.rank(r).domain, world.rank(r).host, world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  }
  // A refusal ends it as well.
  run(3, [&](int r) {
    Rank& rank = world.rank(r);
    if (r == 2) return kernels::post_refusal(rank.domain, sums.args(2, 0).start.signature, "no heap", rank.stream);
    kernels::combine(rank.domain, sums.args(r, 2), rank.stream);
    if (world.wait_outcome(r, 2) != NotifyOutcome::kRefused) throw std::runtime_error("not refused");
  });
  CHECK_EQ(world.error(0).peer, 2);
  combine_all(world, sums, 3);
  CHECK_EQ(sums.check(), "");
}

GPU_TEST_CASE("combine: wrong arguments are refused before anything is launched") {
  World world(2, 16, 4, 8, 8, kLong);
  Rows rows(world, 16, {});
  Sums sums(world, rows, 16, {});
  world.set_ids(0, std::vector<std::int64_t>(64, 1));
  const auto refused = [&](auto change) {
    kernels::CombineArgs args = sums.args(0, 1);
    change(args);
    CHECK_THROWS_AS(kernels::combine(world.rank(0).domain, args, world.rank(0).stream), ArgumentError);
  };
  refused([](auto& args) { args.num_sms = 0; });
  refused([](auto& args) { args.hidden = 12; });
  refused([](auto& args) { args.out = nullptr; });
  refused([](auto& args) { args.topk = 65; });
  refused([](auto& args) { args.combined_topk_weights = nullptr; });
  refused([](auto& args) { args.start.place.offset = 8; });
  refused([](auto& args) { args.type = static_cast<SumType>(7); });
}

GPU_TEST_CASE("time-out: combine names the rank that does not come, and a reset makes all good") {
  constexpr double kTimeout = 0.3;
  std::mt19937_64 random(34);
  World world(3, 60, 4, 16, 8, kTimeout);
  Rows rows(world, 60, {});
  Sums sums(world, rows, 60, {});
  prepare_sums(world, rows, sums, random, {60});
  const auto launch_two = [&](std::uint32_t sequence) {
    const auto start = std::chrono::steady_clock::now();
    run(2, [&](int r) {
      kernels::combine(world.rank(r).domain, sums.args(r, sequence), world.rank(r).stream);
      CHECK_EQ(static_cast<int>(world.wait_outcome(r, sequence)), static_cast<int>(NotifyOutcome::kFailed));
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto check_record = [&](layout::WaitPhase phase, std::uint64_t epoch) {
    for (int r = 0; r < 2; ++r) {
      CAPTURE(r);
      CHECK_EQ(world.error(r).kind, static_cast<std::uint32_t>(layout::KernelErrorKind::kTimeout));
      CHECK_EQ(world.error(r).phase, static_cast<std::uint32_t>(phase));
      CHECK_EQ(world.error(r).peer, 2);
      CHECK_EQ(world.error(r).epoch, epoch);
    }
  };
  const auto reset = [&](std::uint64_t epoch) {
    run(3, [&](int r) {
      Rank& rank = world.rank(r);
      kernels::clear_error(rank.domain, rank.host, rank.stream);
      kernels::reset_state(rank.domain, epoch, rank.stream);
      cuda(cudaStreamSynchronize(rank.stream));
    });
  };
  CHECK_GE(launch_two(1), kTimeout);
  check_record(layout::WaitPhase::kAnnounce, 2);
  CHECK_LT(launch_two(2), kTimeout / 2);  // failed: every launch leaves at once
  reset(6);
  combine_all(world, sums, 3);
  CHECK_EQ(sums.check(), "");
  // Rank 2 announces epoch 8 and never says that it has read.
  for (int r = 0; r < 2; ++r) {
    const kernels::CombineArgs theirs = sums.args(2, 0);
    layout::Announce last = {};
    last.epoch = 8;
    last.hash = layout::signature_hash(theirs.start.signature);
    last.place = theirs.start.place;
    last.weight_place = theirs.start.weight_place;
    layout::Announce& slot = layout::Workspace(world.rank(r).domain.workspaces[r], 3).announce(8, 2);
    cuda(cudaMemcpyAsync(&slot, &last, sizeof(last), cudaMemcpyDefault, world.rank(r).stream));
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  }
  CHECK_GE(launch_two(4), kTimeout);
  check_record(layout::WaitPhase::kPullDone, 8);
  reset(9);
  combine_all(world, sums, 5);
  CHECK_EQ(sums.check(), "");
}

GPU_TEST_CASE("stress: thousands of dispatches, combines and cached dispatches, eager and replayed, no host between") {
  constexpr int R = 4, kTopk = 6, E = 37, kSets = 10, kMaxTokens = 60, kHidden = 128;
  std::mt19937_64 random(35);
  RowShape shape;
  shape.row_bytes = kHidden * 2;
  shape.num_scales = 5;
  shape.column_ranks = 4;
  shape.bf16_values = true;
  shape.num_sms = 4;
  struct Set {
    std::unique_ptr<World> ids;  // words are not used, only what it holds of ids and outputs
    std::unique_ptr<Rows> rows;
    std::int64_t heap_bytes = 0;
    char *heap[R], *cached_heap[R], *sum[R];
    float* weights[R];
    std::int64_t num_tokens[R];
  };
  World world(R, kMaxTokens, kTopk, E, 8, kLong);
  Rows target(world, kMaxTokens, shape);  // its heaps and segment tables
  std::vector<Set> sets(kSets);
  char* out[R];
  float* out_weights[R];
  unsigned long long* differences[R];
  for (int r = 0; r < R; ++r) {
    out[r] = target.allocate(r, kMaxTokens * shape.row_bytes);
    out_weights[r] = reinterpret_cast<float*>(target.allocate(r, 4 * kMaxTokens * kTopk + 16));
    differences[r] = reinterpret_cast<unsigned long long*>(target.allocate(r, 8));
    cuda(cudaMemset(differences[r], 0, 8));
    sync_gpus();
  }
  for (int s = 0; s < kSets; ++s) {
    Set& set = sets[s];
    set.ids = std::make_unique<World>(R, kMaxTokens, kTopk, E, 8, kLong);
    set.rows = std::make_unique<Rows>(*set.ids, kMaxTokens, shape);
    for (int r = 0; r < R; ++r) {
      set.num_tokens[r] = (s + r) % 5 == 0 ? 0 : static_cast<std::int64_t>(random() % kMaxTokens);
      set.ids->set_ids(r, random_ids(random, set.num_tokens[r], kTopk, E, 8));
      set.rows->fill(r, random);
    }
    const Counts& counts = set.rows->count();
    for (int r = 0; r < R; ++r) {
      const auto keep = [&](const void* data, std::size_t bytes) {
        char* memory = target.allocate(r, static_cast<std::int64_t>(bytes) + 16);
        target.upload(r, memory, data, bytes);
        return memory;
      };
      const std::vector<char> heap = set.rows->expected_heap(r), cached = set.rows->expected_heap(r, false);
      set.heap[r] = keep(heap.data(), heap.size());
      set.cached_heap[r] = keep(cached.data(), cached.size());
      std::vector<float> sums, weights;
      const auto* x = reinterpret_cast<const __nv_bfloat16*>(set.rows->rank(r).host_x.data());
      for (std::int64_t t = 0; t < set.num_tokens[r]; ++t) {
        int copies = 0;
        for (int holder = 0; holder < R; ++holder) copies += counts.layout[r].in_rank[t * R + holder];
        for (int h = 0; h < kHidden; ++h) {
          float sum = 0;
          for (int i = 0; i < copies; ++i) sum += __bfloat162float(x[t * kHidden + h]);
          sums.push_back(sum);
        }
        for (int k = 0; k < kTopk; ++k) {
          const std::int64_t id = set.ids->rank(r).host_ids[t * kTopk + k];
          weights.push_back(id >= 0 && id < E ? set.rows->rank(r).host_weights[t * kTopk + k] : 0.0f);
        }
      }
      const std::vector<char> sum_bytes = as_bytes(SumType::kBf16, sums);
      set.sum[r] = keep(sum_bytes.data(), sum_bytes.size());
      set.weights[r] = reinterpret_cast<float*>(keep(weights.data(), weights.size() * 4));
    }
  }

  // One round on one rank: dispatch, combine of what has arrived, dispatch by the handle; what each leaves is compared.
  const auto round = [&](Set& set, int r, bool vector_path) {
    Rank& rank = world.rank(r);
    const auto compare = [&](const void* seen, const void* expected, std::int64_t bytes) {
      if (bytes >= 16)
        count_differences<<<2, 256, 0, rank.stream>>>(static_cast<const uint4*>(seen),
                                                      static_cast<const uint4*>(expected), bytes / 16, differences[r]);
    };
    const auto onto_target = [&](auto args) {
      args.send_position = rank.out.send_position;
      args.rank_prefix_matrix = rank.out.prefix;
      args.segment_bases = target.rank(r).segments;
      args.use_vector_path = vector_path;
      return args;
    };
    kernels::NotifyArgs notify = set.rows->notify_args(r, 0);
    notify.send_position = rank.out.send_position;
    notify.rank_prefix_matrix = rank.out.prefix;
    notify.segment_bases = target.rank(r).segments;
    target.poison_heap(r);
    kernels::notify(rank.domain, notify, rank.stream);
    kernels::dispatch(rank.domain, onto_target(set.rows->dispatch_args(r)), rank.stream);
    compare(target.rank(r).heap, set.heap[r], target.heap_bytes());

    const layout::RecvBlock block(set.rows->format(), set.rows->counts().total(r, R));
    kernels::CombineArgs combine;
    combine.num_tokens = set.num_tokens[r];
    combine.hidden = kHidden;
    combine.out = out[r];
    combine.out_stride = shape.row_bytes;
    combine.topk = kTopk;
    combine.combined_topk_weights = out_weights[r];
    combine.num_sms = 5;
    combine.start.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCombine);
    combine.start.place = {kHeapSegment, 0, static_cast<std::int64_t>(set.rows->place_offset(r) + block.x), 0};
    combine.start.weight_place = {kHeapSegment, 0,
                                  static_cast<std::int64_t>(set.rows->place_offset(r) + block.topk_weights), 0};
    kernels::combine(rank.domain, onto_target(combine), rank.stream);
    compare(out[r], set.sum[r], set.num_tokens[r] * shape.row_bytes);
    compare(out_weights[r], set.weights[r], set.num_tokens[r] * kTopk * 4);

    target.poison_heap(r);
    kernels::dispatch(rank.domain, onto_target(set.rows->cached_args(r, 0)), rank.stream);
    compare(target.rank(r).heap, set.cached_heap[r], target.heap_bytes());
  };

  cudaGraphExec_t replay[R][kSets] = {};
  for (int r = 0; r < 2; ++r) {
    const OnGpuOf on(r);
    for (int s = 0; s < kSets; ++s) {
      cudaGraph_t graph;
      cuda(cudaStreamBeginCapture(world.rank(r).stream, cudaStreamCaptureModeThreadLocal));
      round(sets[s], r, s % 3 == 1);
      cuda(cudaStreamEndCapture(world.rank(r).stream, &graph));
      cuda(cudaGraphInstantiate(&replay[r][s], graph, 0));
      cuda(cudaGraphUpload(replay[r][s], world.rank(r).stream));
      cuda(cudaGraphDestroy(graph));
    }
  }
  const int num_rounds = stress_calls() / 3 + 1;
  run(R, [&](int r) {
    std::uint64_t state = 99;  // the same choices on every rank
    for (int i = 0; i < num_rounds; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const int s = static_cast<int>((state >> 33) % kSets);
      if (replay[r][s] && (state >> 50) % 2 == 0) {
        cuda(cudaGraphLaunch(replay[r][s], world.rank(r).stream));
      } else {
        round(sets[s], r, s % 3 == r % 3);
      }
      if (i % 50 == 49) cuda(cudaStreamSynchronize(world.rank(r).stream));
    }
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
  for (int r = 0; r < R; ++r) {
    CAPTURE(r);
    CHECK_EQ(world.read(r, differences[r], 1)[0], 0ull);
    CHECK_EQ(world.error(r).kind, 0u);
    const layout::NotifyState& state = world.rank(r).domain.words.state(world.rank(r).domain.workspaces[r]);
    CHECK_EQ(world.read(r, &state.epoch, 1)[0], static_cast<std::uint64_t>(3 * num_rounds));
    for (int s = 0; s < kSets; ++s)
      if (replay[r][s]) cuda(cudaGraphExecDestroy(replay[r][s]));
  }
}
