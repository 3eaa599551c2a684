// Rows for the ranks of a World: inputs, heaps whose every byte is compared, and what dispatch means, on the host.
//
// To add a test: make a World for the ids and a Rows for what travels, fill both, launch through Rows::notify_args and
// Rows::dispatch_args, and compare with Rows::check_heaps.
#pragma once

#include <numeric>

#include "gpu_world.cuh"
#include "layout/rows.hpp"

namespace deep_moe::test {

inline constexpr int kPoison = 0x5a;
inline constexpr int kHeapSegment = 3, kInputSegment = 5;

// What travels with the ids of a World.
struct RowShape {
  std::int64_t row_bytes = 256;
  std::int64_t x_gap = 0;  // bytes between rows of x, and before the first
  int num_scales = 0, scale_bytes = 4;
  bool weights = true;
  int column_ranks = 0;  // ranks, as bits, whose scales are column-major
  int hard_ranks = 0;    // ranks, as bits, whose place is hard
  std::int64_t hard_tail = 37;
  int num_sms = 3;
  bool routes_found = true;  // notify looks up addresses for dispatch
  bool vector_path = false;
  bool bf16_values = false;  // x holds bf16 numbers in +-[1, 2), else any bits
};

struct Counts {
  std::vector<HostLayoutResult> layout;  // by source
  std::vector<std::int32_t> prefix;      // [R, R], inclusive over sources
  std::int32_t first(int src, int dst, int R) const { return src > 0 ? prefix[(src - 1) * R + dst] : 0; }
  std::int32_t total(int dst, int R) const { return prefix[(R - 1) * R + dst]; }
};

class Rows {
 public:
  struct PerRank {
    char *x = nullptr, *scales = nullptr, *heap = nullptr;
    float* weights = nullptr;
    char** segments = nullptr;
    std::vector<char> host_x, host_scales;
    std::vector<float> host_weights;
  };

  Rows(World& world, std::int64_t max_tokens, const RowShape& shape)
      : world_(world), shape_(shape), max_tokens_(max_tokens), ranks_(world.num_ranks()) {
    const int R = world.num_ranks();
    const std::int64_t tail = shape.hard_tail;
    heap_bytes_ = static_cast<std::int64_t>(layout::RecvBlock(format(), max_tokens * R + tail).total) + 4096;
    for (int r = 0; r < R; ++r) {
      PerRank& rank = ranks_[r];
      rank.x = allocate(r, x_stride() * max_tokens + shape.x_gap + 64);
      rank.scales = allocate(r, std::max<std::int64_t>(1, scale_row_bytes() * max_tokens));
      rank.weights = reinterpret_cast<float*>(allocate(r, 4 * max_tokens * world.topk() + 4));
      rank.heap = allocate(r, heap_bytes_);
      rank.segments = reinterpret_cast<char**>(allocate(r, sizeof(char*) * R * layout::kMaxSegments));
    }
    for (PerRank& rank : ranks_) {
      std::vector<char*> bases(R * layout::kMaxSegments, nullptr);
      for (int r = 0; r < R; ++r) bases[r * layout::kMaxSegments + kHeapSegment] = ranks_[r].heap;
      cuda(cudaMemcpy(rank.segments, bases.data(), bases.size() * sizeof(char*), cudaMemcpyDefault));
    }
  }
  ~Rows() {
    for (void* memory : allocated_) cudaFree(memory);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  RowShape& shape() { return shape_; }
  PerRank& rank(int r) { return ranks_[r]; }
  std::int64_t heap_bytes() const { return heap_bytes_; }
  std::int64_t x_stride() const { return shape_.row_bytes + shape_.x_gap; }
  std::int64_t scale_row_bytes() const { return static_cast<std::int64_t>(shape_.num_scales) * shape_.scale_bytes; }
  bool columns(int r) const { return (shape_.column_ranks >> r & 1) != 0; }
  bool hard(int r) const { return (shape_.hard_ranks >> r & 1) != 0; }
  layout::RowFormat format(bool with_ids = true) const {
    layout::RowFormat format;
    format.row_bytes = shape_.row_bytes;
    format.scale_bytes = scale_row_bytes();
    if (with_ids) {
      format.topk = world_.topk();
      format.idx_bytes = world_.id_bytes();
      format.weight_bytes = shape_.weights ? 4 : 0;
    }
    return format;
  }
  std::int64_t place_offset(int r) const { return 256 * (1 + r % 3); }

  // New rows for a rank, poison for its heap.
  void fill(int r, std::mt19937_64& random) {
    const OnGpuOf on(r);
    PerRank& rank = ranks_[r];
    const std::int64_t T = world_.rank(r).num_tokens;
    const auto bytes = [&](std::int64_t count) {
      std::vector<char> values(static_cast<std::size_t>((count + 7) / 8 * 8));
      for (std::size_t i = 0; i < values.size(); i += 8) {
        const std::uint64_t word = random();
        std::memcpy(values.data() + i, &word, 8);
      }
      return values;
    };
    rank.host_x = bytes(x_stride() * T + shape_.x_gap);
    if (shape_.bf16_values) {
      auto* values = reinterpret_cast<std::uint16_t*>(rank.host_x.data());
      for (std::size_t i = 0; i < rank.host_x.size() / 2; ++i)
        values[i] = static_cast<std::uint16_t>((values[i] & 0x807f) | 0x3f80);
    }
    rank.host_scales = bytes(scale_row_bytes() * T);
    rank.host_weights.resize(static_cast<std::size_t>(T * world_.topk()));
    for (float& weight : rank.host_weights) weight = static_cast<float>(random() % 1000 + 1) / 997.0f;
    upload(r, rank.x, rank.host_x.data(), rank.host_x.size());
    upload(r, rank.scales, rank.host_scales.data(), scale_row_bytes() * T);
    upload(r, rank.weights, rank.host_weights.data(), rank.host_weights.size() * 4);
    poison_heap(r);
    cuda(cudaStreamSynchronize(world_.rank(r).stream));
  }
  void poison_heap(int r) {
    const OnGpuOf on(r);
    cuda(cudaMemsetAsync(ranks_[r].heap, kPoison, heap_bytes_, world_.rank(r).stream));
  }

  kernels::NotifyArgs notify_args(int r, std::uint32_t sequence) {
    kernels::NotifyArgs args = world_.args(r, sequence);
    args.alone = false;  // the dispatch behind it ends the call
    args.place = place(r, hard_capacity(r));
    args.signature.row_bytes = shape_.row_bytes;
    if (shape_.routes_found) args.segment_bases = ranks_[r].segments;
    return args;
  }
  layout::Place place(int r, std::int64_t capacity) const {
    layout::Place place;
    place.segment = kHeapSegment;
    place.offset = place_offset(r);
    place.capacity = hard(r) ? capacity : max_tokens_ * world_.num_ranks();
    place.flags = (hard(r) ? layout::kPlaceHard : 0) | (columns(r) ? layout::kPlaceColumnScales : 0);
    return place;
  }
  // Rows that a hard place is laid out for.
  std::int64_t hard_capacity(int r) const {
    return counts_.prefix.empty() ? 0 : counts_.total(r, world_.num_ranks()) + shape_.hard_tail;
  }

  kernels::DispatchArgs dispatch_args(int r) {
    const Rank& words = world_.rank(r);
    const PerRank& rank = ranks_[r];
    kernels::DispatchArgs args;
    args.x = rank.x + shape_.x_gap;
    args.num_tokens = words.num_tokens;
    args.row_bytes = shape_.row_bytes;
    args.row_stride = x_stride();
    if (shape_.num_scales > 0) {
      args.scales = {rank.scales, shape_.scale_bytes, shape_.num_scales,
                     columns(r) ? shape_.scale_bytes : scale_row_bytes(),
                     columns(r) ? shape_.scale_bytes * words.num_tokens : shape_.scale_bytes};
    }
    args.ids = world_.args(r, 0).ids;
    args.num_experts = world_.num_experts();
    args.topk_weights = shape_.weights ? rank.weights : nullptr;
    args.weight_stride = world_.topk();
    args.send_position = words.out.send_position;
    args.rank_prefix_matrix = words.out.prefix;
    args.segment_bases = rank.segments;
    args.num_sms = shape_.num_sms;
    args.use_vector_path = shape_.vector_path;
    return args;
  }
  // The same without ids, as a handle has it.
  kernels::DispatchArgs cached_args(int r, std::uint32_t sequence) {
    kernels::DispatchArgs args = dispatch_args(r);
    args.ids = {};
    args.topk_weights = nullptr;
    args.cached = true;
    args.start.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kCachedDispatch);
    args.start.signature.row_bytes = shape_.row_bytes;
    args.start.signature.handle_hash = 77;
    args.start.place = place(r, hard_capacity(r));
    args.start.sequence = sequence;
    return args;
  }

  // Counts of the ids that the World holds.
  const Counts& count() {
    const int R = world_.num_ranks();
    counts_ = {};
    std::vector<std::int32_t> totals(R, 0);
    for (int src = 0; src < R; ++src) {
      counts_.layout.push_back(layout_on_host(world_.rank(src).host_ids, world_.topk(), world_.num_experts(), R));
      for (int dst = 0; dst < R; ++dst) counts_.prefix.push_back(totals[dst] += counts_.layout[src].per_rank[dst]);
    }
    return counts_;
  }
  const Counts& counts() const { return counts_; }

  // What a heap must hold, poison included.
  std::vector<char> expected_heap(int dst, bool with_ids = true) const {
    const int R = world_.num_ranks(), K = world_.topk();
    const layout::ExpertBlocks experts(world_.num_experts(), R);
    std::vector<char> heap(static_cast<std::size_t>(heap_bytes_), static_cast<char>(kPoison));
    const std::int64_t total = counts_.total(dst, R), rows = hard(dst) ? hard_capacity(dst) : total;
    const layout::RecvBlock block(format(with_ids), rows);
    char* base = heap.data() + place_offset(dst);
    const auto put_id = [&](std::int64_t at, std::int64_t id) {
      if (world_.id_bytes() == 8) {
        std::memcpy(base + block.topk_idx + at * 8, &id, 8);
      } else {
        const std::int32_t narrow = static_cast<std::int32_t>(id);
        std::memcpy(base + block.topk_idx + at * 4, &narrow, 4);
      }
    };
    const auto put_weight = [&](std::int64_t at, float weight) {
      if (shape_.weights) std::memcpy(base + block.topk_weights + at * 4, &weight, 4);
    };
    for (int src = 0; src < R; ++src) {
      const PerRank& from = ranks_[src];
      const std::int64_t T = world_.rank(src).num_tokens;
      for (std::int64_t t = 0; t < T; ++t) {
        const std::int32_t position = counts_.layout[src].position[t * R + dst];
        if (position < 0) continue;
        const std::int64_t row = counts_.first(src, dst, R) + position;
        std::memcpy(base + block.x + row * shape_.row_bytes, from.host_x.data() + shape_.x_gap + t * x_stride(),
                    shape_.row_bytes);
        const std::int32_t source = static_cast<std::int32_t>(t);
        std::memcpy(base + block.src_idx + row * 4, &source, 4);
        for (int s = 0; s < shape_.num_scales; ++s) {
          const std::int64_t at = columns(src) ? s * T + t : t * shape_.num_scales + s;
          const std::int64_t to = columns(dst) ? s * rows + row : row * shape_.num_scales + s;
          std::memcpy(base + block.scales + to * shape_.scale_bytes, from.host_scales.data() + at * shape_.scale_bytes,
                      shape_.scale_bytes);
        }
        if (!with_ids) continue;
        for (int k = 0; k < K; ++k) {
          const std::int64_t local = world_.rank(src).host_ids[t * K + k] - experts.first_expert(dst);
          const bool is_here = local >= 0 && local < experts.num_local_experts(dst);
          put_id(row * K + k, is_here ? local : -1);
          put_weight(row * K + k, is_here ? from.host_weights[t * K + k] : 0.0f);
        }
      }
    }
    for (std::int64_t row = total; row < rows; ++row) {
      const std::int32_t none = -1;
      std::memcpy(base + block.src_idx + row * 4, &none, 4);
      for (int k = 0; with_ids && k < K; ++k) put_id(row * K + k, -1), put_weight(row * K + k, 0.0f);
    }
    return heap;
  }

  // What a heap must hold whose place is a window over the rows from `first` on, poison included.
  std::vector<char> expected_window(int dst, std::int64_t first, std::int64_t capacity, bool with_ids) const {
    const std::vector<char> all = expected_heap(dst, with_ids);
    const std::int64_t total = counts_.total(dst, world_.num_ranks()),
                       all_rows = hard(dst) ? hard_capacity(dst) : total;
    const layout::RowFormat parts = format(with_ids);
    const layout::RecvBlock whole(parts, all_rows), window(parts, capacity);
    std::vector<char> heap(static_cast<std::size_t>(heap_bytes_), static_cast<char>(kPoison));
    const char* from = all.data() + place_offset(dst);
    char* to = heap.data() + place_offset(dst);
    const auto put = [&](std::size_t from_part, std::size_t to_part, std::int64_t bytes, int filler) {
      for (std::int64_t row = first; row < first + capacity; ++row) {
        char* at = to + to_part + (row - first) * bytes;
        if (row < total) {
          std::memcpy(at, from + from_part + row * bytes, static_cast<std::size_t>(bytes));
        } else if (hard(dst)) {
          std::memset(at, filler, static_cast<std::size_t>(bytes));
        }
      }
    };
    put(whole.x, window.x, parts.row_bytes, kPoison);
    put(whole.topk_idx, window.topk_idx, parts.topk * parts.idx_bytes, 0xff);
    put(whole.topk_weights, window.topk_weights, parts.topk * parts.weight_bytes, 0);
    put(whole.src_idx, window.src_idx, 4, 0xff);
    if (!columns(dst)) put(whole.scales, window.scales, parts.scale_bytes, kPoison);
    const std::int64_t item = shape_.scale_bytes;
    for (int s = 0; columns(dst) && s < shape_.num_scales; ++s)
      put(whole.scales + static_cast<std::size_t>(s * all_rows * item),
          window.scales + static_cast<std::size_t>(s * capacity * item), item, kPoison);
    return heap;
  }

  // The first byte of a heap that is not as expected, as text; empty where all are.
  std::string compare_heap(int r, const std::vector<char>& expected) {
    const std::vector<char> heap = world_.read(r, ranks_[r].heap, heap_bytes_);
    if (heap == expected) return {};
    const auto at = std::mismatch(heap.begin(), heap.end(), expected.begin()).first - heap.begin();
    const layout::RecvBlock block(format(), counts_.total(r, world_.num_ranks()));
    return "rank " + std::to_string(r) + ": byte " + std::to_string(at - place_offset(r)) + " of the block; x at " +
           std::to_string(block.x) + ", scales at " + std::to_string(block.scales) + ", ids at " +
           std::to_string(block.topk_idx) + ", weights at " + std::to_string(block.topk_weights) + ", src_idx at " +
           std::to_string(block.src_idx);
  }
  // Empty where every heap is as expected.
  std::string check_heaps(bool with_ids = true) {
    for (int r = 0; r < world_.num_ranks(); ++r) {
      const std::string difference = compare_heap(r, expected_heap(r, with_ids));
      if (!difference.empty()) return difference;
    }
    return {};
  }

  // On the rank's GPU.
  char* allocate(int r, std::int64_t bytes) {
    const OnGpuOf on(r);
    void* memory = nullptr;
    cuda(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    cuda(cudaMemset(memory, kPoison, static_cast<std::size_t>(bytes)));
    cuda(cudaDeviceSynchronize());
    allocated_.push_back(memory);
    return static_cast<char*>(memory);
  }
  void upload(int r, void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    const OnGpuOf on(r);
    cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, world_.rank(r).stream));
    cuda(cudaStreamSynchronize(world_.rank(r).stream));
  }

 private:
  World& world_;
  RowShape shape_;
  std::int64_t max_tokens_, heap_bytes_ = 0;
  std::vector<PerRank> ranks_;
  std::vector<void*> allocated_;
  Counts counts_;
};

// notify and dispatch on every rank, none waiting for its host in between.
inline void dispatch_all(World& world, Rows& rows) {
  run(world.num_ranks(), [&](int r) {
    kernels::notify(world.rank(r).domain, rows.notify_args(r, 0), world.rank(r).stream);
    kernels::dispatch(world.rank(r).domain, rows.dispatch_args(r), world.rank(r).stream);
    cuda(cudaStreamSynchronize(world.rank(r).stream));
  });
}

}  // namespace deep_moe::test
