// A dispatch whose rows do not fit what some rank has offered: the heaps grow together; where that cannot be, rows come
// in waves through a window that the receiver moves over them.
#include <algorithm>
#include <cstdio>

#include "cuda/cuda_call.hpp"
#include "cuda/cuda_row_movement.hpp"

namespace deep_moe::cuda {

using layout::RecvBlock;

namespace {

// Blocks that were dropped may be in use for a while yet; waited for before waves, which cost more.
constexpr double kSettleSeconds = 1.0;

}  // namespace

// All ranks come here alike. Room for as much again is asked for: the combine of these rows may need staging.
void CudaBuffer::grow_and_move(const DispatchArgs& args, RowMovement* move) {
  const std::size_t bytes = RecvBlock(move->format, move->arrived).total;
  const bool fits = move->place.capacity >= move->arrived;
  if (!fits) free_block(move);
  const DeviceWorld::Growth growth = world_->grow(fits ? 0 : bytes, fits ? 0 : 3 * bytes);
  std::string reason = growth.reasons[static_cast<std::size_t>(rank)];
  if (!fits) {
    move->block = world_->heap().allocate(bytes, move->streams.work());
    if (!growth.everywhere && !(move->block && world_->shared(move->block.segment))) {
      const std::string why = offer_window(move);
      if (reason.empty()) reason = why;
    }
    const bool whole = move->block && move->block.bytes >= bytes;
    if (growth.everywhere && !move->block) throw Error("dispatch: the heap has grown, and has no room yet");
    move->place.segment = move->block.segment;
    move->place.offset = static_cast<std::int64_t>(move->block.offset);
    move->place.capacity =
        whole ? move->arrived : RecvBlock::capacity(move->format, static_cast<std::int64_t>(move->block.bytes));
  }
  const std::int64_t num_waves = growth.everywhere ? 1 : count_waves(move, reason);
  if (num_waves > 1 && world_->nodes() != nullptr) {
    free_block(move);
    throw BufferTooSmallError(
        "dispatch: rows do not fit the heap of some rank, which cannot grow (raise num_nvl_bytes or "
        "DEEP_MOE_MAX_HEAP_BYTES, or free received tensors), and between nodes GPUs take no rows in waves yet: " +
        (reason.empty() ? "this rank has room" : reason));
  }
  if (num_waves == 1) {
    launch_placed(args, move);
  } else {
    move_in_waves(args, move, num_waves);
  }
}

// The largest block that every peer reaches, and ordinary memory for all rows. The reason where there is none.
std::string CudaBuffer::offer_window(RowMovement* move) {
  const std::size_t bytes = RecvBlock(move->format, move->arrived).total;
  free_block(move);
  world_->heap().settle(kSettleSeconds);
  move->block = world_->heap().allocate_largest(bytes, move->streams.work());
  if (move->block && !world_->shared(move->block.segment)) free_block(move);
  if (!move->block) return "its heap has no free memory";
  if (move->block.bytes >= bytes) return {};
  try {
    move->spill = std::make_shared<Spill>(bytes, world_->device(), comm_stream_, move->streams.work(),
                                          move->streams.caller(), options.current_stream);
    spills_.add(move->spill);
    return {};
  } catch (const Error& error) {
    free_block(move);
    return error.what();
  }
}

// Every rank says how many rows it can take at a time. BufferTooSmallError where some rank can take none.
std::int64_t CudaBuffer::count_waves(RowMovement* move, const std::string& reason) {
  const std::vector<DeviceWorld::Said> all =
      world_->exchange("dispatch/windows", static_cast<std::uint64_t>(move->place.capacity), reason);
  std::int64_t num_waves = 1;
  std::string failures;
  for (int peer = 0; peer < num_ranks; ++peer) {
    const DeviceWorld::Said& said = all[static_cast<std::size_t>(peer)];
    const std::int64_t capacity = static_cast<std::int64_t>(said.value);
    const std::int64_t total = move->totals[static_cast<std::size_t>(peer)];
    if (total == 0) continue;
    if (capacity == 0) {
      failures += "; rank " + std::to_string(peer) + " has no heap for the " + std::to_string(total) +
                  " rows that arrive there: " + said.text;
    } else {
      num_waves = std::max(num_waves, (total + capacity - 1) / capacity);
    }
  }
  if (failures.empty()) return num_waves;
  free_block(move);
  throw BufferTooSmallError(
      "dispatch: the heap cannot grow (raise num_nvl_bytes or DEEP_MOE_MAX_HEAP_BYTES, or free "
      "received tensors)" +
      failures);
}

// Every rank makes as many launches as the rank with the most windows needs.
void CudaBuffer::move_in_waves(const DispatchArgs& args, RowMovement* move, std::int64_t num_waves) {
  const std::int64_t arrived = move->arrived;
  if (!move->spill) move->place.capacity = arrived;  // one window over all of it
  const std::int64_t capacity = move->place.capacity;
  if (move->spill && !waves_logged_) {
    waves_logged_ = true;
    std::fprintf(stderr,
                 "deep_moe: rank %d receives %lld rows in %lld waves, which is slow: its heap cannot grow (raise "
                 "num_nvl_bytes or DEEP_MOE_MAX_HEAP_BYTES, or free received tensors)\n",
                 rank, static_cast<long long>(arrived), static_cast<long long>(num_waves));
  }
  move->place.flags |= layout::kPlaceWindow;
  for (std::int64_t wave = 0; wave < num_waves; ++wave) {
    const std::int64_t first = std::min(wave * capacity, arrived);
    move->place.first_row = first;
    launch_placed(args, move);
    if (move->spill) copy_out(*move, std::min(capacity, arrived - first));
  }
}

// The rows of the window, to where all rows go.
void CudaBuffer::copy_out(const RowMovement& move, std::int64_t num_rows) {
  if (num_rows <= 0) return;
  const layout::RowFormat& format = move.format;
  const RecvBlock from(format, move.place.capacity), to(format, move.arrived);
  const std::int64_t first = move.place.first_row;
  const auto stream = static_cast<cudaStream_t>(move.streams.work());
  const auto copy = [&](std::size_t source, std::size_t target, std::int64_t bytes_per_row) {
    if (bytes_per_row == 0) return;
    check_runtime(cudaMemcpyAsync(move.spill->data() + target + first * bytes_per_row, move.block.ptr + source,
                                  static_cast<std::size_t>(num_rows * bytes_per_row), cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync");
  };
  copy(from.x, to.x, format.row_bytes);
  copy(from.topk_idx, to.topk_idx, format.topk * format.idx_bytes);
  copy(from.topk_weights, to.topk_weights, format.topk * format.weight_bytes);
  copy(from.src_idx, to.src_idx, static_cast<std::int64_t>(sizeof(std::int32_t)));
  if (!move.column_scales) return copy(from.scales, to.scales, format.scale_bytes);
  const std::size_t item = static_cast<std::size_t>(move.scales.item_bytes);
  check_runtime(
      cudaMemcpy2DAsync(move.spill->data() + to.scales + static_cast<std::size_t>(first) * item,
                        static_cast<std::size_t>(move.arrived) * item, move.block.ptr + from.scales,
                        static_cast<std::size_t>(move.place.capacity) * item, static_cast<std::size_t>(num_rows) * item,
                        static_cast<std::size_t>(move.scales.num_items), cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpy2DAsync");
}

}  // namespace deep_moe::cuda
