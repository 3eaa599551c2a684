// Received rows to groups by expert, and the sums of the groups' rows.
#include "kernels/intranode/expert_major.cuh"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/intranode/launch.hpp"

namespace deep_moe::kernels {
namespace {

using Tuning = ExpertMajorTuning;

// E1: entries of each block by expert.
template <typename Id>
__global__ void __launch_bounds__(32 * Tuning::kWarps)
    count_by_expert_kernel(const __grid_constant__ PlaceByExpertArgs args) {
  extern __shared__ std::int32_t expert_words[];
  const int num_experts = args.groups.num_experts, threads = static_cast<int>(blockDim.x);
  for (int expert = threadIdx.x; expert < num_experts; expert += threads) expert_words[expert] = 0;
  __syncthreads();
  const EntryRange range = block_entries(args.groups);
  for (std::int64_t at = range.begin + threadIdx.x; at < range.end; at += threads) {
    const int id = expert_of<Id>(args, at);
    if (id >= 0) atomicAdd(expert_words + id, 1);
  }
  __syncthreads();
  std::int32_t* counts = args.scratch + static_cast<std::int64_t>(blockIdx.x) * num_experts;
  for (int expert = threadIdx.x; expert < num_experts; expert += threads) counts[expert] = expert_words[expert];
}

template <typename Id>
__global__ void __launch_bounds__(32 * Tuning::kWarps)
    place_by_expert_kernel(const __grid_constant__ PlaceByExpertArgs args) {
  extern __shared__ std::int32_t expert_words[];
  const int num_experts = args.groups.num_experts, threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::int32_t* const total = expert_words;
  std::int32_t* const first = total + num_experts;
  std::int32_t* const next = first + num_experts;  // [warps, L]
  for (int i = threadIdx.x; i < (2 + warps) * num_experts; i += threads) expert_words[i] = 0;
  __syncthreads();

  // E2: of all blocks, of those before this one, and of this one's warps.
  const int own = static_cast<int>(blockIdx.x) * num_experts, words = static_cast<int>(gridDim.x) * num_experts;
  for (int i = threadIdx.x; i < words; i += threads) {
    const std::int32_t count = args.scratch[i];
    atomicAdd(total + i % num_experts, count);
    if (i < own) atomicAdd(first + i % num_experts, count);
  }
  const EntryRange block = block_entries(args.groups);
  const EntryRange range(block.begin, block.end, warp, warps);
  for (std::int64_t at = range.begin + threadIdx.x % 32; at < range.end; at += 32) {
    const int id = expert_of<Id>(args, at);
    if (id >= 0) atomicAdd(next + warp * num_experts + id, 1);
  }
  __syncthreads();
  if (warp == 0) scan_groups(args, total, first);
  __syncthreads();

  // E4: the first row of each warp.
  for (int expert = threadIdx.x; expert < num_experts; expert += threads) {
    std::int32_t row = first[expert];
    for (int w = 0; w < warps; ++w) {
      const std::int32_t count = next[w * num_experts + expert];
      next[w * num_experts + expert] = row;
      row += count;
    }
  }
  __syncthreads();
  place_entries<Id>(args, range, next + warp * num_experts);
  mark_padding(args, total);
}

__global__ void __launch_bounds__(32 * Tuning::kWarps) group_rows_kernel(const __grid_constant__ GroupRowsArgs args) {
  const RowPieces pieces(args.row_bytes);
  const int parts = pieces.num_pieces + (args.scales.num_items > 0);
  const std::int64_t units = args.groups.num_received * parts;
  clear_padding(args);
  for (std::int64_t unit = warp_of_grid(); unit < units; unit += warps_of_grid()) {
    const std::int64_t received = unit / parts;
    const int piece = static_cast<int>(unit - received * parts);
    const RowsOfEntries entries(args.groups, received);
    if (!entries.any()) continue;  // nothing has arrived there
    if (piece < pieces.num_pieces) {
      copy_piece(args, pieces, received, piece, entries);
    } else {
      copy_scales(args, received, entries);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * Tuning::kWarps)
    sum_groups_kernel(const __grid_constant__ SumGroupsArgs args, int alignment) {
  const RowPieces pieces(args.hidden * static_cast<std::int64_t>(sizeof(T)));
  const std::int64_t units = args.groups.num_received * pieces.num_pieces;
  for (std::int64_t unit = warp_of_grid(); unit < units; unit += warps_of_grid()) {
    const std::int64_t received = unit / pieces.num_pieces;
    const int piece = static_cast<int>(unit - received * pieces.num_pieces);
    const RowsOfEntries entries(args.groups, received);
    if (!entries.any()) continue;
    sum_piece<T>(args, pieces, alignment, received, piece, entries);
    if (piece != 0 || args.weights == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (k < args.groups.topk)
        args.out_weights[received * args.groups.topk + k] = entries.row[i] < 0 ? 0.0f : args.weights[entries.row[i]];
    }
  }
}

template <typename Body>
void with_sum_type(SumType type, Body body) {
  switch (type) {
    case SumType::kBf16: return body(__nv_bfloat16{});
    case SumType::kFp16: return body(__half{});
    case SumType::kFp32: return body(float{});
  }
  throw ArgumentError("type is " + std::to_string(static_cast<int>(type)) + "; allowed: kBf16, kFp16, kFp32");
}

int num_place_blocks(const ExpertGroups& groups) {
  const std::int64_t entries = groups.num_received * groups.topk;
  const std::int64_t blocks = (entries + Tuning::kEntriesPerBlock - 1) / Tuning::kEntriesPerBlock;
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, Tuning::kMaxPlaceBlocks));
}

// Blocks for so many units of a warp. They wait for nobody, so that they may be more than fit.
int num_copy_blocks(std::int64_t units) {
  int device = 0, num_sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const std::int64_t wanted = (units + Tuning::kWarps - 1) / Tuning::kWarps;
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, Tuning::kBlocksPerSm * num_sms));
}

void check(const ExpertGroups& groups) {
  check_range("groups.num_experts", groups.num_experts, 0, kMaxGroupedExperts);
  check_range("groups.topk", groups.topk, 1, layout::kMaxTopk);
  check_range("groups.num_received", groups.num_received, 0, INT32_MAX);
  check_range("groups.num_rows", groups.num_rows, 0, INT32_MAX);
}

}  // namespace

std::int64_t place_by_expert_words(const ExpertGroups& groups) {
  return static_cast<std::int64_t>(num_place_blocks(groups)) * groups.num_experts;
}

void place_by_expert(const PlaceByExpertArgs& args, Stream stream) {
  check(args.groups);
  if (args.alignment < 1) throw ArgumentError("alignment must be at least 1");
  const int blocks = num_place_blocks(args.groups), experts = std::max(1, args.groups.num_experts);
  const int warps = Tuning::place_warps(experts);
  const std::size_t word = sizeof(std::int32_t) * static_cast<std::size_t>(experts);
  with_id_type(args.id_bytes, [&](auto id) {
    launch(count_by_expert_kernel<decltype(id)>, blocks, Tuning::kWarps, word, stream, false,
           "launch of count_by_expert", args);
    launch(place_by_expert_kernel<decltype(id)>, blocks, warps, word * static_cast<std::size_t>(2 + warps), stream,
           false, "launch of place_by_expert", args);
  });
}

void group_rows(const GroupRowsArgs& args, Stream stream) {
  check(args.groups);
  if (args.groups.num_rows == 0) return;
  check_range("row_bytes", args.row_bytes, 16, INT64_MAX);
  if (args.row_bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(args.x) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(args.out) % 16 != 0)
    throw ArgumentError("rows must be of 16-byte pieces and aligned to them");
  const int parts = RowPieces(args.row_bytes).num_pieces + (args.scales.num_items > 0);
  launch(group_rows_kernel, num_copy_blocks(args.groups.num_received * parts), Tuning::kWarps, 0, stream, false,
         "launch of group_rows", args);
}

void sum_groups(const SumGroupsArgs& args, Stream stream) {
  check(args.groups);
  if (args.groups.num_received == 0) return;
  with_sum_type(args.type, [&](auto number) {
    using Number = decltype(number);
    const std::int64_t row_bytes = args.hidden * static_cast<std::int64_t>(sizeof(Number));
    check_range("hidden", args.hidden, 16 / static_cast<std::int64_t>(sizeof(Number)), INT64_MAX / 8);
    if (row_bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(args.out) % 16 != 0)
      throw ArgumentError("rows must be of 16-byte pieces, and out aligned to them");
    const int alignment =
        common_alignment(reinterpret_cast<std::uintptr_t>(args.x) | static_cast<std::uint64_t>(args.row_stride));
    launch(sum_groups_kernel<Number>, num_copy_blocks(args.groups.num_received * RowPieces(row_bytes).num_pieces),
           Tuning::kWarps, 0, stream, false, "launch of sum_groups", args, alignment);
  });
}

void prepare_expert_major() {
  for (const int id_bytes : {4, 8}) {
    with_id_type(id_bytes, [&](auto id) {
      load_kernel(count_by_expert_kernel<decltype(id)>, 0);
      load_kernel(place_by_expert_kernel<decltype(id)>, 0);
    });
  }
  load_kernel(group_rows_kernel, 0);
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    with_sum_type(type, [&](auto number) { load_kernel(sum_groups_kernel<decltype(number)>, 0); });
}

}  // namespace deep_moe::kernels
