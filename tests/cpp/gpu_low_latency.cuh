// Low-latency calls between the ranks of a World, checked against the scalar model that the CPU's tests use.
//
// To add a test: make LowRanks, a LowModel of all ranks' inputs, and on each rank a LowCall, whose members launch the
// halves of a dispatch and of its combine and compare what came out.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <set>

#include "gpu_world.cuh"
#include "layout/low_latency_words.hpp"
#include "low_latency_model.hpp"

namespace deep_moe::test {

inline constexpr int kLowPoison = 0x5a;

// Memory for all calls: a staging slot of `slot_bytes`, and an arena a rank from which calls take their tensors.
class LowRanks {
 public:
  LowRanks(int num_ranks, std::int64_t slot_bytes, std::int64_t arena_bytes, double timeout_seconds = 20.0)
      : world(num_ranks, 1, 1, num_ranks, 8, timeout_seconds), arena_bytes_(arena_bytes), used_(num_ranks, 0) {
    staging.slot_bytes = slot_bytes;
    for (int r = 0; r < num_ranks; ++r) {
      staging.bases[r] = allocate(r, slot_bytes * layout::kLowLatencySlots);
      arenas_.push_back(allocate(r, arena_bytes));
    }
    sync_gpus();
  }
  virtual ~LowRanks() {
    for (char* memory : allocated_) cudaFree(memory);
  }
  LowRanks(const LowRanks&) = delete;
  LowRanks& operator=(const LowRanks&) = delete;

  // On the rank's thread; all of it is taken back by clear().
  char* take(int r, std::int64_t bytes) {
    char* memory = arenas_[r] + used_[r];
    used_[r] += (bytes + 511) / 256 * 256;  // with a gap behind it
    if (used_[r] > arena_bytes_) throw std::logic_error("the arena is too small");
    return memory;
  }
  void clear(int r) { used_[r] = 0; }
  void sync(int r) { wait_for(world.rank(r).stream); }
  virtual void dispatch(int r, const kernels::LowLatencyDispatchArgs& args) {
    kernels::low_latency_dispatch(world.rank(r).domain, args, world.rank(r).stream);
  }
  virtual void combine(int r, const kernels::LowLatencyCombineArgs& args) {
    kernels::low_latency_combine(world.rank(r).domain, args, world.rank(r).stream);
  }

  // Else rows by expert are what travels as logarithms where the dispatch has brought no weights.
  virtual bool sums_logarithms_without_weights() const { return true; }

  World world;
  kernels::LowLatencyStaging staging;

 protected:
  char* allocate(int r, std::int64_t bytes) {  // zeroed
    const OnGpuOf on(r);
    void* memory = nullptr;
    cuda(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    cuda(cudaMemset(memory, 0, static_cast<std::size_t>(bytes)));
    allocated_.push_back(static_cast<char*>(memory));
    return allocated_.back();
  }

 private:
  std::int64_t arena_bytes_;
  std::vector<std::int64_t> used_;
  std::vector<char*> arenas_, allocated_;
};

struct LowMode {
  bool fp8 = false, round_scale = false, ue8m0 = false;
  bool weights = true;  // with the dispatch
  bool halves = false;  // dispatch and combine in two launches each
  bool short_ids = false;
  bool early = false;  // the launch behind starts early
  bool logfmt = false;
  int num_blocks = 9;
  std::int64_t gap = 0;  // bytes between rows of x, of the combine's input and of its output
  int scale_items = 0;   // opaque rows: scales of scale_bytes each
  int scale_bytes = 4;
};

inline kernels::SumType sum_type(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::SumType::kBf16
         : dtype == DType::kFloat16 ? kernels::SumType::kFp16
                                    : kernels::SumType::kFp32;
}

// One rank's dispatch and combine.
class LowCall {
 public:
  LowCall(LowRanks& ranks, LowModel& model, int r, const LowMode& mode)
      : ranks_(ranks), model_(&model), r_(r), mode_(mode), shape_(model.shape) {
    const std::int64_t T = shape_.num_tokens[r], K = shape_.topk, M = shape_.max_tokens, R = shape_.num_ranks;
    const std::int64_t L = model.blocks.num_local_experts(r), rows = model.expert_rows();
    const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(shape_.dtype));
    in_row_ = shape_.hidden * item;
    row_bytes_ = mode.fp8 ? shape_.hidden : in_row_;
    num_scales_ = mode.fp8 ? shape_.hidden / 128 / (mode.ue8m0 ? 4 : 1) : mode.scale_items;
    x_ = place(T * (in_row_ + mode.gap), &x_bytes_);
    ids_ = place(T * K * 8, &ids_bytes_);
    weights_ = place(T * K * 4, &weight_bytes_);
    scales_ = place(T * mode.scale_items * mode.scale_bytes, &scale_bytes_);
    recv_x_ = place(L * rows * row_bytes_, &recv_bytes_);
    recv_scales_ = place(L * rows * num_scales_ * scale_item(), &recv_scale_bytes_);
    count_ = take<std::int32_t>(L);
    src_info_ = take<std::int32_t>(L * rows);
    range_ = take<std::int64_t>(L * R);
    pos_ = take<std::int32_t>(R * (M + 1) * K);
    recv_weights_ = take<float>(R * M * K);
    stats_ = take<std::int32_t>(L);
    wait_stats_ = take<std::int64_t>(R);
    epoch_ = take<std::uint64_t>(2);
    y_ = place(L * rows * (in_row_ + mode.gap), &y_bytes_);
    out_ = place(T * (in_row_ + mode.gap), &out_bytes_);
    kept_ids_ = take<std::int32_t>(T * K);
    kept_weights_ = take<float>(T * K);
    upload();
  }

  void launch_dispatch(kernels::LowLatencyHalf half) { ranks_.dispatch(r_, dispatch_args(half)); }
  void launch_combine(kernels::LowLatencyHalf half) { ranks_.combine(r_, combine_args(half)); }
  void dispatch() {
    using kernels::LowLatencyHalf;
    if (!mode_.halves) return launch_dispatch(LowLatencyHalf::kBoth);
    send_dispatch();
    launch_dispatch(LowLatencyHalf::kReceive);
  }
  // The inputs may change once they have been sent.
  void send_dispatch() {
    launch_dispatch(kernels::LowLatencyHalf::kSend);
    fill(x_, x_bytes_), fill(scales_, scale_bytes_), fill(ids_, ids_bytes_), fill(weights_, weight_bytes_);
  }
  void receive_dispatch() { launch_dispatch(kernels::LowLatencyHalf::kReceive); }
  void restore_inputs() { upload_inputs(); }
  void combine() {
    using kernels::LowLatencyHalf;
    if (!mode_.halves) return launch_combine(LowLatencyHalf::kBoth);
    send_combine();
    launch_combine(LowLatencyHalf::kReceive);
  }
  void send_combine() {
    launch_combine(kernels::LowLatencyHalf::kSend);
    fill(y_, y_bytes_), fill(ids_, ids_bytes_), fill(weights_, weight_bytes_);
  }
  void receive_combine() { launch_combine(kernels::LowLatencyHalf::kReceive); }

  // The experts' outputs, as the model makes them, into this rank's y.
  void make_outputs() {
    const std::vector<char> y = model_->outputs(r_);
    const std::int64_t rows = static_cast<std::int64_t>(y.size()) / in_row_;
    copy_rows(y_, y.data(), rows, in_row_ + mode_.gap);
  }

  void check_dispatch() {
    const std::int64_t L = model_->blocks.num_local_experts(r_), rows = model_->expert_rows();
    LowLatencyDispatchResult result;
    const auto host = [&](const void* data, DType dtype, std::initializer_list<std::int64_t> dims) {
      Tensor tensor = make_host_tensor(dtype, dims);
      download(tensor.view.data, data, tensor.view.num_bytes());
      return tensor;
    };
    result.recv_count = host(count_, DType::kInt32, {L});
    result.handle.src_info = host(src_info_, DType::kInt32, {L, rows});
    result.handle.layout_range = host(range_, DType::kInt64, {L, shape_.num_ranks});
    const DType dtype = mode_.fp8 ? DType::kFloat8E4M3 : shape_.dtype;
    result.recv_x.data = host(recv_x_, dtype, {L, rows, shape_.hidden});
    if (mode_.fp8) {
      result.recv_x.scales = host(recv_scales_, mode_.ue8m0 ? DType::kInt32 : DType::kFloat32, {L, rows, num_scales_});
      result.recv_x.scales.view.stride[1] = 1;
      result.recv_x.scales.view.stride[2] = rows;
      model_->check_fp8_rows(r_, result, mode_.round_scale || mode_.ue8m0, mode_.ue8m0);
    } else {
      model_->check_plain_rows(r_, result);
    }
    if (mode_.scale_items > 0) check_scales();
    const Tensor stats = host(stats_, DType::kInt32, {L}),
                 waited = host(wait_stats_, DType::kInt64, {shape_.num_ranks});
    for (std::int64_t local = 0; local < L; ++local)
      expect(stats.as<std::int32_t>()[local] == 7 + result.recv_count.as<std::int32_t>()[local], "statistics");
    for (int peer = 0; peer < shape_.num_ranks; ++peer)
      expect(waited.as<std::int64_t>()[peer] >= 0 && waited.as<std::int64_t>()[peer] < 10'000'000'000, "time waited");
    check_untouched(result);
  }

  void check_combine(const std::set<int>& masked = {}) {
    const std::int64_t T = shape_.num_tokens[r_];
    std::vector<char> got(static_cast<std::size_t>(out_bytes_) + 1);
    download(got.data(), out_, static_cast<std::size_t>(out_bytes_));
    TensorView view = TensorView::contiguous(got.data(), shape_.dtype, {T, shape_.hidden});
    view.stride[0] = (in_row_ + mode_.gap) / static_cast<std::int64_t>(dtype_bytes(shape_.dtype));
    const bool pre_reduced =
        !by_expert() && (mode_.weights || !mode_.logfmt || ranks_.sums_logarithms_without_weights());
    model_->check_combined(r_, view, pre_reduced, mode_.logfmt, masked);
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t i = 0; i < mode_.gap; ++i)
        expect(got[t * (in_row_ + mode_.gap) + in_row_ + i] == kLowPoison, "bytes between rows of the output");
  }

  bool by_expert() const { return mode_.halves && !mode_.weights; }
  void poison() {
    fill(recv_x_, recv_bytes_), fill(recv_scales_, recv_scale_bytes_), fill(out_, out_bytes_);
    const std::int64_t L = model_->blocks.num_local_experts(r_), rows = model_->expert_rows();
    fill(reinterpret_cast<char*>(count_), L * 4);
    fill(reinterpret_cast<char*>(src_info_), L * rows * 4);
    fill(reinterpret_cast<char*>(range_), L * shape_.num_ranks * 8);
    fill(reinterpret_cast<char*>(pos_), shape_.num_ranks * (shape_.max_tokens + 1) * shape_.topk * 4);
    fill(reinterpret_cast<char*>(recv_weights_), shape_.num_ranks * shape_.max_tokens * shape_.topk * 4);
  }
  void set_num_blocks(int blocks) { mode_.num_blocks = blocks; }

  kernels::LowLatencyDispatchArgs dispatch_args(kernels::LowLatencyHalf half) {
    kernels::LowLatencyDispatchArgs args;
    args.call = call(half, layout::CallKind::kLowLatencyDispatch, epoch_);
    const bool reads = half != kernels::LowLatencyHalf::kReceive;
    args.x = reads ? x_ : nullptr;
    args.num_tokens = shape_.num_tokens[r_];
    args.row_bytes = row_bytes_;
    args.row_stride = in_row_ + mode_.gap;
    args.cast = mode_.fp8;
    args.x_type = sum_type(shape_.dtype);
    args.round_scale = mode_.round_scale || mode_.ue8m0;
    args.ue8m0 = mode_.ue8m0;
    args.scales.num_items = mode_.scale_items;
    args.scales.item_bytes = mode_.scale_bytes;
    if (reads && mode_.scale_items > 0) {  // column-major
      args.scales.data = scales_;
      args.scales.row_stride = mode_.scale_bytes;
      args.scales.item_stride = mode_.scale_bytes * shape_.num_tokens[r_];
    }
    args.ids = topk_ids();
    args.with_weights = mode_.weights;
    if (mode_.weights) {
      args.topk_weights = reads ? reinterpret_cast<const float*>(weights_) : nullptr;
      args.weight_stride = shape_.topk;
      args.recv_weights = recv_weights_;
    }
    args.recv_x = recv_x_;
    args.recv_scales = recv_scales_;
    args.recv_count = count_;
    args.src_info = src_info_;
    args.layout_range = range_;
    args.recv_pos = pos_;
    args.recv_stats = stats_;
    return args;
  }

  kernels::LowLatencyCombineArgs combine_args(kernels::LowLatencyHalf half) {
    kernels::LowLatencyCombineArgs args;
    args.call = call(half, layout::CallKind::kLowLatencyCombine, epoch_ + 1);
    args.by_expert = by_expert();
    args.logfmt = mode_.logfmt;
    if (args.by_expert) args.call.signature.flags |= 16;
    if (args.logfmt) args.call.signature.flags |= 32;
    args.type = sum_type(shape_.dtype);
    args.x = y_;
    args.hidden = shape_.hidden;
    args.row_stride = in_row_ + mode_.gap;
    args.expert_stride = args.row_stride * model_->expert_rows();
    args.recv_pos = pos_;
    args.recv_weights = mode_.weights ? recv_weights_ : nullptr;
    args.ids = topk_ids();
    args.topk_weights = reinterpret_cast<const float*>(weights_);
    args.weight_stride = shape_.topk;
    args.kept_ids = kept_ids_;
    args.kept_weights = kept_weights_;
    args.out = out_;
    args.out_stride = in_row_ + mode_.gap;
    return args;
  }

  cudaStream_t stream() { return ranks_.world.rank(r_).stream; }
  const kernels::DeviceDomain& domain() { return ranks_.world.rank(r_).domain; }
  // Another model of the same shape: its inputs, and outputs as if nothing had been called.
  void use(LowModel& model) {
    model_ = &model;
    upload();
  }

 private:
  template <typename T>
  T* take(std::int64_t count) {
    return reinterpret_cast<T*>(ranks_.take(r_, count * static_cast<std::int64_t>(sizeof(T))));
  }
  char* place(std::int64_t bytes, std::int64_t* size) {
    *size = bytes;
    return ranks_.take(r_, bytes);
  }
  std::int64_t scale_item() const { return mode_.fp8 ? 4 : mode_.scale_bytes; }
  void fill(char* memory, std::int64_t bytes) {
    if (bytes > 0) cuda(cudaMemsetAsync(memory, kLowPoison, static_cast<std::size_t>(bytes), stream()));
  }
  void copy(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0) cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream()));
  }
  void copy_rows(void* to, const void* from, std::int64_t rows, std::int64_t stride) {
    const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
    if (rows > 0)
      cuda(cudaMemcpy2DAsync(to, size(stride), from, size(in_row_), size(in_row_), size(rows), cudaMemcpyDefault,
                             stream()));
  }
  void download(void* to, const void* from, std::size_t bytes) {
    ranks_.sync(r_);
    copy(to, from, static_cast<std::int64_t>(bytes));
    ranks_.sync(r_);
  }
  void upload_inputs() {
    LowModel::Input& input = model_->inputs[r_];
    copy_rows(x_, input.x.data(), shape_.num_tokens[r_], in_row_ + mode_.gap);
    const std::int64_t count = shape_.num_tokens[r_] * shape_.topk;
    if (mode_.short_ids)
      copy(ids_, input.short_ids.data(), count * 4);
    else
      copy(ids_, input.ids.data(), count * 8);
    copy(weights_, input.weights.data(), count * 4);
    if (host_scales_.empty()) {
      Random random(static_cast<std::uint64_t>(r_) + 77);
      for (std::int64_t i = 0; i < scale_bytes_; ++i) host_scales_.push_back(static_cast<char>(random.next() >> 20));
    }
    copy(scales_, host_scales_.data(), scale_bytes_);
    ranks_.sync(r_);
  }
  void upload() {
    upload_inputs();
    poison();
    fill(y_, y_bytes_);
    const std::vector<std::int32_t> seven(static_cast<std::size_t>(model_->blocks.num_local_experts(r_)), 7);
    copy(stats_, seven.data(), static_cast<std::int64_t>(seven.size()) * 4);
    cuda(cudaMemsetAsync(wait_stats_, 0, static_cast<std::size_t>(shape_.num_ranks) * 8, stream()));
    ranks_.sync(r_);
  }
  kernels::TopkIds topk_ids() const {
    const int topk = static_cast<int>(shape_.topk);
    return {ids_, mode_.short_ids ? 4 : 8, topk, shape_.num_tokens[r_], topk};
  }
  kernels::LowLatencyCall call(kernels::LowLatencyHalf half, layout::CallKind kind, std::uint64_t* epoch) {
    kernels::LowLatencyCall call;
    call.half = half;
    call.staging = ranks_.staging;
    call.signature.kind = static_cast<std::uint32_t>(kind);
    call.signature.row_bytes = row_bytes_;
    call.signature.num_experts = shape_.num_experts;
    call.signature.topk = shape_.topk;
    call.signature.max_tokens = shape_.max_tokens;
    call.signature.flags = mode_.fp8 ? 1 : 0;
    call.epoch = epoch;
    call.wait_stats = wait_stats_;
    call.max_tokens = shape_.max_tokens;
    call.num_experts = static_cast<int>(shape_.num_experts);
    call.num_blocks = mode_.num_blocks;
    call.early = mode_.early;
    return call;
  }

  void check_scales() {
    const std::int64_t L = model_->blocks.num_local_experts(r_), rows = model_->expert_rows(), item = mode_.scale_bytes;
    std::vector<char> got(static_cast<std::size_t>(L * rows * num_scales_ * item));
    download(got.data(), recv_scales_, got.size());
    model_->for_each_row(r_, {}, [&](int local, std::int64_t slot, const LowModel::Source& source) {
      Random random(static_cast<std::uint64_t>(source.rank) + 77);
      std::vector<char> sent;
      for (std::int64_t i = 0; i < shape_.num_tokens[source.rank] * num_scales_ * item; ++i)
        sent.push_back(static_cast<char>(random.next() >> 20));
      for (std::int64_t s = 0; s < num_scales_; ++s)
        expect(std::memcmp(got.data() + ((local * num_scales_ + s) * rows + slot) * item,
                           sent.data() + (s * shape_.num_tokens[source.rank] + source.token) * item,
                           static_cast<std::size_t>(item)) == 0,
               "scale " + std::to_string(s));
    });
  }

  // Rows behind the counts are as they were.
  void check_untouched(const LowLatencyDispatchResult& result) const {
    const std::int64_t L = model_->blocks.num_local_experts(r_), rows = model_->expert_rows();
    for (std::int64_t local = 0; local < L; ++local) {
      const std::int64_t count = result.recv_count.as<std::int32_t>()[local];
      const char* row = result.recv_x.data.as<char>() + (local * rows + count) * row_bytes_;
      for (std::int64_t i = 0; i < (rows - count) * row_bytes_; i += 61)
        expect(row[i] == kLowPoison, "a row that nobody has sent");
    }
  }

  LowRanks& ranks_;
  LowModel* model_;
  const int r_;
  LowMode mode_;
  const LowShape shape_;
  std::int64_t in_row_ = 0, row_bytes_ = 0, num_scales_ = 0;
  std::int64_t x_bytes_ = 0, ids_bytes_ = 0, weight_bytes_ = 0, scale_bytes_ = 0, recv_bytes_ = 0;
  std::int64_t recv_scale_bytes_ = 0, y_bytes_ = 0, out_bytes_ = 0;
  char *x_, *ids_, *weights_, *scales_, *recv_x_, *recv_scales_, *y_, *out_;
  std::int32_t *count_, *src_info_, *pos_, *stats_, *kept_ids_;
  std::int64_t *range_, *wait_stats_;
  std::uint64_t* epoch_;
  float *recv_weights_, *kept_weights_;
  std::vector<char> host_scales_;
};

// Dispatch and combine of all ranks, `times` on the same staging. They meet before each: nobody copies from ordinary
// memory, which may wait for all kernels, once another rank waits for its call.
inline void check_pair(LowRanks& ranks, const LowShape& shape, const LowMode& mode, int times = 1) {
  LowModel model(shape);
  Meeting together(shape.num_ranks);
  run(shape.num_ranks, [&](int r) {
    const Meeting::Leave leave{together};
    for (int i = 0; i < times; ++i) {
      ranks.clear(r);
      LowCall call(ranks, model, r, mode);
      together.wait();
      call.dispatch();
      call.check_dispatch();
      if (mode.halves) call.restore_inputs();
      call.make_outputs();
      together.wait();
      call.combine();
      call.check_combine();
      together.wait();
    }
  });
}

}  // namespace deep_moe::test
