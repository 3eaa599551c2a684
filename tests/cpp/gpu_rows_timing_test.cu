// How long whole dispatches and combines take, beside kernels that only copy as many rows on as many SMs. Prints a
// table, and a line of JSON a row where DEEP_MOE_JSON names a file; fails if a call is wildly slower than the copy.
#include <doctest/doctest.h>

#include <tuple>

#include "gpu_rows.cuh"
#include "gpu_timing.cuh"
#include "kernels/bench/copy_bound.hpp"

using namespace deep_moe;
using namespace deep_moe::test;
using deep_moe::bench::CopyBound;

namespace {

constexpr GraphRuns kRuns{10, 3, 11};
constexpr std::int64_t kTokens = 4096, kHidden = 7168;
constexpr int kExperts = 256, kTopk = 8;

// The fastest of several shapes of the copy, with rows dealt out by turns and, for SMs get unequal shares of a link, by
// tickets.
double copy_time(World& world, Rows& rows, int num_sms, const std::vector<std::pair<int, int>>& warps_and_stages,
                 const std::function<CopyBound(int)>& args) {
  std::vector<std::uint64_t*> tickets;
  for (int r = 0; r < world.num_ranks(); ++r) {
    const OnGpuOf on(r);
    if (r < num_gpus()) deep_moe::bench::prepare_copy_bound();
    tickets.push_back(reinterpret_cast<std::uint64_t*>(rows.allocate(r, 16)));
    cuda(cudaMemset(tickets.back(), 0, 16));
  }
  sync_gpus();
  double best = 1e9;
  for (const auto& [num_warps, num_stages] : warps_and_stages) {
    const deep_moe::bench::CopyShape shape{num_sms, num_warps, num_stages};
    for (const bool by_tickets : {false, true})
      best = std::min(best, time_in_graphs(world, kRuns, [&](int r) {
                        CopyBound copy = args(r);
                        if (by_tickets) copy.tickets = tickets[r];
                        deep_moe::bench::launch_copy_bound(copy, shape, world.rank(r).stream);
                      }));
  }
  return best;
}

// A line of the table, and of JSON. `copy` 0: nothing to compare with.
void report(const char* call, const char* type, int num_ranks, std::int64_t num_tokens, int num_sms, double micros,
            double copy) {
  std::printf("%-28s %5s %2d %4d %5lld %4d | %8.1f us", call, type, num_ranks, num_gpus_of(num_ranks),
              static_cast<long long>(num_tokens), num_sms, micros);
  if (copy > 0) std::printf(" %8.1f us %+7.1f us", copy, micros - copy);
  std::printf("\n");
  std::fflush(stdout);
  const char* path = std::getenv("DEEP_MOE_JSON");
  if (path == nullptr) return;
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file,
               "{\"call\": \"%s\", \"type\": \"%s\", \"ranks\": %d, \"gpus\": %d, \"tokens\": %lld, \"hidden\": %lld, "
               "\"experts\": %d, \"topk\": %d, \"sms\": %d, \"micros\": %.2f",
               call, type, num_ranks, num_gpus_of(num_ranks), static_cast<long long>(num_tokens),
               static_cast<long long>(kHidden), kExperts, kTopk, num_sms, micros);
  if (copy > 0) std::fprintf(file, ", \"copy_micros\": %.2f", copy);
  std::fprintf(file, "}\n");
  std::fclose(file);
}

void table_head() {
  std::printf("\n%-28s %5s %2s %4s %5s %4s | %11s %11s\n", "call", "type", "R", "GPUs", "T", "SMs", "call",
              "plain copy");
}

// Ranks with uniform ids and rows, and all that dispatch and combine need.
class Bench {
 public:
  Bench(int num_ranks, std::int64_t num_tokens, bool fp8)
      : num_tokens_(num_tokens),
        world(num_ranks, num_tokens, kTopk, kExperts, 8, 100.0),
        rows(world, num_tokens, shape(num_ranks, num_tokens, fp8)) {
    std::mt19937_64 random(41);
    for (int r = 0; r < num_ranks; ++r) {
      world.set_ids(r, uniform_ids(num_tokens, kTopk, kExperts, static_cast<std::uint64_t>(r)));
      rows.fill(r, random);
      out_.push_back(rows.allocate(r, num_tokens * rows.shape().row_bytes));
    }
    rows.count();
  }

  void notify(int r, bool alone = false) {
    kernels::NotifyArgs args = rows.notify_args(r, fixed_rows_ ? 0 : 1);
    args.alone = alone;
    if (fixed_rows_) fix(&args.place);
    kernels::notify(world.rank(r).domain, args, world.rank(r).stream);
  }
  void dispatch(int r) { kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream); }
  void cached_dispatch(int r) { kernels::dispatch(world.rank(r).domain, rows.cached_args(r, 0), world.rank(r).stream); }
  void combine(int r, bool weights, int num_biases = 0, bool vector_path = false) {
    const int R = world.num_ranks();
    const std::int64_t row_bytes = rows.shape().row_bytes;
    const layout::RecvBlock block(rows.format(), fixed_rows_ ? num_tokens_ * R : rows.counts().total(r, R));
    kernels::CombineArgs args;
    args.num_tokens = num_tokens_;
    args.hidden = kHidden;
    args.send_position = world.rank(r).out.send_position;
    args.rank_prefix_matrix = world.rank(r).out.prefix;
    args.segment_bases = rows.rank(r).segments;
    for (int b = 0; b < num_biases; ++b) args.bias[b] = rows.rank(r).x, args.bias_stride[b] = row_bytes;
    args.out = out_[r];
    args.out_stride = row_bytes;
    args.topk = weights ? kTopk : 0;
    args.use_vector_path = vector_path;
    args.combined_topk_weights = reinterpret_cast<float*>(rows.rank(r).weights);
    args.num_sms = rows.shape().num_sms;
    args.start.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCombine);
    args.start.place.segment = args.start.weight_place.segment = kHeapSegment;
    args.start.place.offset = rows.place_offset(r) + static_cast<std::int64_t>(block.x);
    args.start.weight_place.offset = rows.place_offset(r) + static_cast<std::int64_t>(block.topk_weights);
    kernels::combine(world.rank(r).domain, args, world.rank(r).stream);
  }
  // Fills the heaps, and the matrices that later calls read.
  void move_once() {
    run(world.num_ranks(), [&](int r) {
      notify(r);
      dispatch(r);
      cuda(cudaStreamSynchronize(world.rank(r).stream));
    });
  }
  // As with num_worst_tokens, for graphs: no counts for the host, room for all rows that there could be.
  void fix_rows() {
    fixed_rows_ = true;
    rows.shape().hard_ranks = (1 << world.num_ranks()) - 1;
  }
  char* out(int r) { return out_[r]; }

 private:
  static RowShape shape(int num_ranks, std::int64_t num_tokens, bool fp8) {
    RowShape shape;
    shape.row_bytes = fp8 ? kHidden : 2 * kHidden;
    shape.num_scales = fp8 ? kHidden / 128 : 0;
    shape.bf16_values = !fp8;
    shape.hard_tail = num_tokens * num_ranks;
    return shape;
  }
  void fix(layout::Place* place) const { place->capacity = num_tokens_ * world.num_ranks(); }

  std::int64_t num_tokens_;
  bool fixed_rows_ = false;
  std::vector<char*> out_;

 public:
  World world;
  Rows rows;
};

}  // namespace

TEST_CASE("timing: dispatch and combine beside a plain copy" * doctest::skip(no_gpu())) {
  table_head();
  for (const bool fp8 : {false, true}) {
    const char* type = fp8 ? "fp8" : "bf16";
    Bench bench(2, kTokens, fp8);
    Rows& rows = bench.rows;
    bench.move_once();
    const std::int64_t row_bytes = rows.shape().row_bytes;
    if (!fp8)
      report("layout and notify", type, 2, kTokens, 0,
             time_in_graphs(bench.world, kRuns, [&](int r) { bench.notify(r, true); }), 0);
    char *copies[2][2], *extra[2][2];
    for (int r = 0; r < 2; ++r) {
      for (char*& copy : copies[r]) copy = rows.allocate(r, kTokens * row_bytes);
      for (char*& copy : extra[r]) copy = rows.allocate(r, kTokens * 256);
    }
    for (const int num_sms : {8, 12, 16, 24}) {
      rows.shape().num_sms = num_sms;
      const double copy = copy_time(bench.world, bench.rows, num_sms, {{6, 4}, {12, 4}}, [&](int r) {
        CopyBound args;
        args.from[0] = rows.rank(r).x;
        args.extra_bytes = static_cast<int>(rows.scale_row_bytes());
        args.extra_from = rows.rank(r).scales;
        for (int d = 0; d < 2; ++d) args.extra_to[d] = extra[d][r];
        for (int d = 0; d < 2; ++d) args.to[d] = copies[d][r];
        args.num_stores = 2;
        args.wanted = bench.world.rank(r).out.is_token_in_rank;
        args.num_tokens = kTokens;
        args.row_bytes = static_cast<int>(row_bytes);
        args.chunk_bytes = 3584;
        return args;
      });
      const double whole = time_in_graphs(bench.world, kRuns, [&](int r) {
        bench.notify(r);
        bench.dispatch(r);
      });
      report("notify + dispatch", type, 2, kTokens, num_sms, whole, copy);
      report("dispatch by handle", type, 2, kTokens, num_sms,
             time_in_graphs(bench.world, kRuns, [&](int r) { bench.cached_dispatch(r); }), copy);
      CHECK_LT(whole, 2 * copy + 50);
      if (fp8) continue;

      bench.move_once();  // the last ones had no weights
      const double pull = copy_time(bench.world, bench.rows, num_sms, {{16, 3}, {12, 4}}, [&](int r) {
        CopyBound args;
        for (int d = 0; d < 2; ++d) args.from[d] = copies[d][r];
        args.to[0] = bench.out(r);
        args.num_loads = 2;
        args.wanted = bench.world.rank(r).out.is_token_in_rank;
        args.num_tokens = kTokens;
        args.row_bytes = static_cast<int>(row_bytes);
        args.chunk_bytes = 3584;
        return args;
      });
      const double combine = time_in_graphs(bench.world, kRuns, [&](int r) { bench.combine(r, true); });
      report("combine", type, 2, kTokens, num_sms, combine, pull);
      report("combine without weights", type, 2, kTokens, num_sms,
             time_in_graphs(bench.world, kRuns, [&](int r) { bench.combine(r, false); }), pull);
      report("combine, plain loads", type, 2, kTokens, num_sms,
             time_in_graphs(bench.world, kRuns, [&](int r) { bench.combine(r, true, 0, true); }), pull);
      CHECK_LT(combine, 2 * pull + 50);
    }
  }
}

TEST_CASE("timing: combine of several ranks and with biases, beside a plain copy" * doctest::skip(no_gpu())) {
  table_head();
  for (const int R : {2, 3, 4}) {
    Bench bench(R, kTokens, false);
    bench.move_once();
    for (const int num_biases : {0, 1, 2}) {
      if (R == 3 && num_biases > 0) continue;
      for (const int num_sms : {8, 16}) {
        bench.rows.shape().num_sms = num_sms;
        const std::int64_t row_bytes = bench.rows.shape().row_bytes;
        const double pull = copy_time(bench.world, bench.rows, num_sms, {{16, 3}, {12, 4}}, [&](int r) {
          CopyBound args;
          args.num_loads = R + num_biases;
          for (int d = 0; d < R; ++d) args.from[d] = bench.rows.rank(d).heap;
          for (int b = 0; b < num_biases; ++b) args.from[R + b] = bench.rows.rank(r).x;
          args.to[0] = bench.out(r);
          args.wanted = bench.world.rank(r).out.is_token_in_rank;
          args.num_wanted = R;
          args.num_tokens = kTokens;
          args.row_bytes = static_cast<int>(row_bytes);
          args.chunk_bytes = 3584;
          return args;
        });
        const std::string name = "combine, " + std::to_string(num_biases) + " biases";
        const double combine = time_in_graphs(bench.world, kRuns, [&](int r) { bench.combine(r, true, num_biases); });
        report(name.c_str(), "bf16", R, kTokens, num_sms, combine, pull);
        CHECK_LT(combine, 4 * pull + 50);
      }
    }
  }
}

TEST_CASE("timing: pairs of few tokens in a graph" * doctest::skip(no_gpu())) {
  table_head();
  for (const std::int64_t num_tokens : {1, 128, 512}) {
    Bench bench(2, num_tokens, false);
    bench.move_once();
    bench.fix_rows();
    for (const int num_sms : {8, 16, 20, 24, 32, 48, 64}) {
      if (num_tokens == 1 && num_sms != 20) continue;
      bench.rows.shape().num_sms = num_sms;
      const auto time = [&](const char* call, const std::function<void(int)>& launch) {
        const double micros = time_in_graphs(bench.world, kRuns, launch);
        report(call, "bf16", 2, num_tokens, num_sms, micros, 0);
        return micros;
      };
      time("notify + dispatch, fixed", [&](int r) { bench.notify(r), bench.dispatch(r); });
      time("combine, fixed", [&](int r) { bench.combine(r, true); });
      const double pair = time("pair", [&](int r) { bench.notify(r), bench.dispatch(r), bench.combine(r, true); });
      CHECK_LT(pair, 200.0);
    }
  }
}
