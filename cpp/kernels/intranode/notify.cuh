// Notify, as parts that a kernel is put together from: blocks that read ids, and one block that gathers what all ranks
// have counted. README.md beside this file has the words and the order among them; comments name its steps.
#pragma once

#include <cstdint>

#include "kernels/intranode/layout.cuh"
#include "kernels/protocol/announce.cuh"
#include "kernels/protocol/wait.cuh"
#include "kernels/ptx/launch.cuh"

namespace deep_moe::kernels {

// Static shared memory of either kind of block.
struct NotifyShared {
  WarpCounts warp_counts;
  std::uint64_t masks[NotifyTuning::kKeptChunks][NotifyTuning::kThreads];  // ranks of each token; read by who wrote it
  std::uint32_t block_rows[layout::kMaxKernelRanks];                       // of this block, by destination
  std::uint32_t first_row[layout::kMaxKernelRanks];                        // of the blocks before it
};

// Dynamic shared memory: a count for each expert, and the matrix of the gathering block behind it.
inline std::size_t notify_dynamic_bytes(int num_experts, int num_ranks) {
  return sizeof(std::uint32_t) *
         (static_cast<std::size_t>(num_experts) + static_cast<std::size_t>(num_ranks * num_ranks));
}

// L3: adds the block's counts to the rank's sums. Who adds last to one clears it and posts the total: rows for a rank
// to every rank, entries of an expert to its owner.
__device__ __forceinline__ void post_counts(const WaitScope& scope, const NotifyArgs& args, const Owners& owners,
                                            const std::uint32_t* block_rows, const std::uint32_t* expert_counts,
                                            int num_blocks) {
  const layout::ExpertBlocks& experts = owners.blocks;
  constexpr int kThreads = NotifyTuning::kThreads, kBatch = NotifyTuning::kSumsInFlight;
  const DeviceDomain& domain = scope.domain;
  const int dst = static_cast<int>(threadIdx.x);
  std::uint64_t* rank_sum = domain.words.rank_sums(scope.mine()) + dst;
  std::uint64_t rows_before = 0;
  if (dst < domain.num_ranks) rows_before = ptx::atom_add_relaxed_gpu(rank_sum, layout::arrive_with(block_rows[dst]));
  const auto is_last = [&](std::uint64_t before) {
    return layout::arrivals(before) == static_cast<std::uint32_t>(num_blocks - 1);
  };
  // Rows cannot move before it is there; the first of the experts' sums are on their way meanwhile.
  const auto post_rows = [&] {
    if (dst >= domain.num_ranks || !is_last(rows_before)) return;
    const std::uint32_t total = layout::tagged_count(rows_before) + block_rows[dst];
#pragma unroll 1
    for (int peer = 0; peer < domain.num_ranks; ++peer)
      ptx::st_relaxed_sys(domain.words.rank_words(domain.workspaces[peer], scope.epoch, domain.rank) + dst,
                          layout::tag_count(scope.epoch, total));
    *rank_sum = 0;
    if (args.num_tokens_per_rank) args.num_tokens_per_rank[dst] = static_cast<std::int32_t>(total);
  };
  std::uint64_t* sums = domain.words.expert_sums(scope.mine());
  for (int first = threadIdx.x;; first += kThreads * kBatch) {
    std::uint64_t before[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int e = first + i * kThreads;
      if (e < experts.num_experts)
        before[i] = ptx::atom_add_relaxed_gpu(sums + e, layout::arrive_with(expert_counts[e]));
    }
    if (first == dst) post_rows();
    if (first >= experts.num_experts) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int e = first + i * kThreads;
      if (e >= experts.num_experts || !is_last(before[i])) continue;
      const std::uint32_t total = layout::tagged_count(before[i]) + expert_counts[e];
      const int owner = owners.rank_of(e);
      std::uint64_t* words = domain.words.expert_words(domain.workspaces[owner], scope.epoch, domain.rank);
      ptx::st_relaxed_sys(words + (e - experts.first_expert(owner)), layout::tag_count(scope.epoch, total));
      sums[e] = 0;
      if (args.num_tokens_per_expert) args.num_tokens_per_expert[e] = static_cast<std::int32_t>(total);
    }
  }
}

// L4: the rows of the blocks before this one, by destination. False: the block must leave.
__device__ __forceinline__ bool wait_for_lower_blocks(const WaitScope& scope, int block, std::uint32_t* first_row) {
  const DeviceDomain& domain = scope.domain;
  const int lane = threadIdx.x % 32;
  bool ok = true;
  for (int r = threadIdx.x / 32; r < domain.num_ranks; r += NotifyTuning::kWarps) {
    std::uint32_t rows = 0;
    for (int lower = lane; lower < block; lower += 32) {
      std::uint64_t word = 0;
      const std::uint64_t* address = domain.words.block_words(scope.mine(), lower) + r;
      ok = ok &&
           wait_for_tag(
               scope, layout::WaitPhase::kBlockWords, domain.rank, [&] { return ptx::ld_relaxed_gpu(address); }, &word);
      rows += layout::tagged_count(word);
    }
    rows = __reduce_add_sync(kFullWarp, rows);
    if (lane == 0) first_row[r] = rows;
  }
  return ok;
}

// L5: where each token of the block lies among this rank's rows for each rank, in token order.
template <typename Route>
__device__ void write_positions(const NotifyArgs& args, const Route& route, int num_ranks, const TokenRange& range,
                                NotifyShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t lower_lanes = (1u << lane) - 1;
  std::uint32_t base[kRanksPerLane];
#pragma unroll
  for (int i = 0; i < kRanksPerLane; ++i) base[i] = shared.first_row[lane + 32 * i];
  for (int chunk = 0; chunk < range.num_chunks; ++chunk) {
    const std::int64_t t = range.token(chunk);
    const bool inside = t < range.end;
    std::uint64_t mask = 0;
    if (chunk < NotifyTuning::kKeptChunks) {
      mask = shared.masks[chunk][threadIdx.x];
    } else if (inside) {
      mask = route.template ranks<false>(t, nullptr);
    }

    std::uint32_t counts[kRanksPerLane] = {}, start[kRanksPerLane];
    count_ranks(mask, num_ranks, counts);
    auto& warp_counts = shared.warp_counts[chunk % 2];
    share_counts(counts, warp_counts);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRanksPerLane; ++i) {
      start[i] = base[i] + sum_warps(warp_counts, lane + 32 * i, warp);
      base[i] += sum_warps(warp_counts, lane + 32 * i, NotifyTuning::kWarps);
    }

#pragma unroll 2
    for (int r = 0; r < num_ranks; ++r) {
      const bool goes = (mask >> r) & 1;
      const std::uint32_t rows_before = __popc(__ballot_sync(kFullWarp, goes) & lower_lanes);
      const std::uint32_t position = __shfl_sync(kFullWarp, r < 32 ? start[0] : start[1], r % 32) + rows_before;
      if (!inside) continue;
      if (args.send_position) args.send_position[t * num_ranks + r] = goes ? static_cast<std::int32_t>(position) : -1;
      if (args.is_token_in_rank) args.is_token_in_rank[t * num_ranks + r] = goes;
    }
  }
}

// A block that reads ids. `block` of `num_blocks`; it waits for no block but lower ones, and for no peer.
template <typename Route>
__device__ void layout_block(const DeviceDomain& domain, const NotifyArgs& args, const Route& route,
                             const Owners& owners, int block, int num_blocks, std::uint32_t* expert_counts,
                             NotifyShared& shared) {
  const int rank = domain.rank, num_ranks = domain.num_ranks;
  layout::NotifyState& state = domain.words.state(domain.workspaces[rank]);
  const std::uint32_t failed = ptx::ld_relaxed_gpu(&state.failed);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&state.epoch) + 1};
  const TokenRange range(args.ids.num_tokens, block, num_blocks);

  // L1: count.
  count_tokens(route, owners.blocks, block, range, expert_counts, shared.warp_counts,
               [&](int chunk, std::int64_t, std::uint64_t mask) {
                 if (chunk < NotifyTuning::kKeptChunks) shared.masks[chunk][threadIdx.x] = mask;
               });
  if (__syncthreads_or(failed != 0)) return;

  // L2: this block's rows, for the blocks after it.
  if (threadIdx.x < num_ranks) {
    const std::uint32_t rows = sum_warps(shared.warp_counts[0], threadIdx.x, NotifyTuning::kWarps);
    shared.block_rows[threadIdx.x] = rows;
    ptx::st_relaxed_gpu(domain.words.block_words(scope.mine(), block) + threadIdx.x,
                        layout::tag_count(scope.epoch, rows));
  }
  post_counts(scope, args, owners, shared.block_rows, expert_counts, num_blocks);
  if (!__syncthreads_and(wait_for_lower_blocks(scope, block, shared.first_row))) return;
  write_positions(args, route, num_ranks, range, shared);
  __syncthreads();
  if (threadIdx.x == 0)
    ptx::st_release_gpu(domain.words.position_words(scope.mine()) + block,
                        layout::tag_count(scope.epoch, static_cast<std::uint32_t>(num_blocks)));
}

// G3: calls take(source, index, count) for `per_src` words of every source, those behind `skipped` others. False: the
// block must leave.
template <typename Take>
__device__ __forceinline__ bool gather_counts(const WaitScope& scope, int skipped, int per_src, Take take) {
  constexpr int kThreads = NotifyTuning::kThreads, kBatch = NotifyTuning::kWordsInFlight;
  const DeviceDomain& domain = scope.domain;
  const int num_words = domain.num_ranks * per_src;
  const auto address_of = [&](int item) {
    return domain.words.rank_words(scope.mine(), scope.epoch, item / per_src) + skipped + item % per_src;
  };
  for (int first = threadIdx.x; first < num_words; first += kThreads * kBatch) {
    std::uint64_t word[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int item = first + i * kThreads;
      if (item < num_words) word[i] = ptx::ld_relaxed_sys(address_of(item));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int item = first + i * kThreads;
      if (item >= num_words) break;
      const int src = item / per_src;
      std::uint64_t value = word[i];
      if (!layout::has_tag(value, scope.epoch)) {
        const std::uint64_t* address = address_of(item);
        if (!wait_for_tag(
                scope, layout::WaitPhase::kCountWords, src, [=] { return ptx::ld_relaxed_sys(address); }, &value))
          return false;
      }
      take(src, item % per_src, layout::tagged_count(value));
    }
  }
  return true;
}

// G4: prefix sums for this thread's destination, and what a dispatch behind this launch needs of it.
__device__ __forceinline__ std::uint32_t write_prefix(const DeviceDomain& domain, const NotifyArgs& args, int dst,
                                                      const std::uint32_t* matrix, layout::Route route) {
  const int num_ranks = domain.num_ranks;
  std::uint32_t rows = 0;
#pragma unroll 1
  for (int src = 0; src < num_ranks; ++src) {
    const int i = src * num_ranks + dst;
    if (src == domain.rank) route.first_row = static_cast<std::int32_t>(rows);
    rows += matrix[i];
    if (src == domain.rank) route.end_row = static_cast<std::int32_t>(rows);
    if (args.rank_matrix) args.rank_matrix[i] = static_cast<std::int32_t>(matrix[i]);
    if (args.rank_prefix_matrix) args.rank_prefix_matrix[i] = static_cast<std::int32_t>(rows);
  }
  route.total_rows = static_cast<std::int32_t>(rows);
  domain.words.route(domain.workspaces[domain.rank], dst) = route;
  return rows;
}

// A host that does not wait for the counts has to learn it too.
__device__ __forceinline__ void report_too_few_rows(const WaitScope& scope, int dst, std::int64_t capacity,
                                                    std::uint32_t rows) {
  report_error(scope, layout::KernelErrorKind::kTooFewRows, layout::WaitPhase::kNone, dst,
               static_cast<std::uint64_t>(capacity), rows, [](layout::ErrorRecord&) {});
}

// G5: the dispatch behind this launch runs already and waits for this word; it ends the call, unless there is none.
__device__ __forceinline__ void conclude(const WaitScope& scope, const NotifyArgs& args,
                                         layout::NotifyOutcome outcome) {
  ptx::st_release_gpu(&scope.state().outcome, layout::tag_count(scope.epoch, static_cast<std::uint32_t>(outcome)));
  if (args.alone && outcome != layout::NotifyOutcome::kFailed) ptx::st_relaxed_gpu(&scope.state().epoch, scope.epoch);
}

__device__ __forceinline__ void tell_outcome(const WaitScope& scope, const NotifyArgs& args,
                                             layout::NotifyOutcome outcome) {
  tell_host(args.sequence, &scope.domain.host_words.outcome(scope.domain.host), static_cast<std::uint32_t>(outcome));
}

// The block that speaks to the peers' gathering blocks and to the host. No block of this rank waits for it.
__device__ __forceinline__ void gather_block(const DeviceDomain& domain, const NotifyArgs& args,
                                             const layout::ExpertBlocks& experts, std::uint32_t* dynamic_shared) {
  using layout::NotifyOutcome;
  __shared__ std::uint32_t trouble;  // a NotifyOutcome: what keeps the ranks from making this call together
  const int thread = static_cast<int>(threadIdx.x), num_ranks = domain.num_ranks;
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  const WaitScope scope{domain, ptx::ld_relaxed_gpu(&state.epoch) + 1};
  const int num_local_experts = experts.num_local_experts(domain.rank);
  std::uint32_t* expert_sums = dynamic_shared;
  std::uint32_t* matrix = dynamic_shared + args.num_experts;

  if (thread == 0) {
    trouble = 0;
    tell_host(args.sequence, &domain.host_words.started(domain.host), 1);
  }
  const auto end = [&](NotifyOutcome outcome) {
    if (thread != 0) return;
    conclude(scope, args, outcome);
    tell_outcome(scope, args, outcome);
  };
  if (__syncthreads_or(ptx::ld_relaxed_gpu(&state.failed) != 0)) return end(NotifyOutcome::kFailed);

  // G1, G2: all ranks make the same call.
  layout::Route route;
  if (thread < num_ranks) {
    announce(scope, thread, args.signature, args.hash, args.ids.num_tokens, args.place, layout::Place{});
  }
  for (int l = thread; l < num_local_experts; l += NotifyTuning::kThreads) expert_sums[l] = 0;
  if (thread < num_ranks) {
    const NotifyOutcome outcome = wait_for_announcement(scope, thread, args.hash);
    if (outcome != NotifyOutcome::kNone) atomicMax(&trouble, static_cast<std::uint32_t>(outcome));
    const layout::Place& place = route.place = announcement(scope, thread).place;
    if (args.segment_bases != nullptr && place.segment >= 0 && place.segment < layout::kMaxSegments)
      route.base = reinterpret_cast<std::uint64_t>(args.segment_bases[thread * layout::kMaxSegments + place.segment]);
  }
  __syncthreads();

  if (trouble != 0) {
    // The epoch ends when this rank's own blocks have taken it, which their last word tells.
    if (thread == 0) {
      const std::uint64_t* own = domain.words.rank_words(scope.mine(), scope.epoch, domain.rank);
      std::uint64_t word;
      const bool there = wait_for_tag(
          scope, layout::WaitPhase::kCountWords, domain.rank, [=] { return ptx::ld_relaxed_sys(own); }, &word);
      end(there ? static_cast<NotifyOutcome>(trouble) : NotifyOutcome::kFailed);
    }
    return;
  }

  // G3, G4: all rows; prefix sums, what fits.
  if (!__syncthreads_and(gather_counts(
          scope, 0, num_ranks, [&](int src, int dst, std::uint32_t count) { matrix[src * num_ranks + dst] = count; })))
    return end(NotifyOutcome::kFailed);
  layout::PlaceFit fit = layout::PlaceFit::kFits;
  std::uint32_t rows = 0;
  if (thread < num_ranks) {
    const layout::Place& place = route.place;
    rows = write_prefix(domain, args, thread, matrix, route);
    if (rows > place.capacity) {
      const bool hard = (place.flags & layout::kPlaceHard) != 0;
      fit = hard ? layout::PlaceFit::kTooSmallHard : layout::PlaceFit::kTooSmall;
      if (hard) report_too_few_rows(scope, thread, place.capacity, rows);
    }
  }
  const bool too_small = __syncthreads_or(fit != layout::PlaceFit::kFits);
  const bool hard = __syncthreads_or(fit == layout::PlaceFit::kTooSmallHard);
  NotifyOutcome outcome = hard        ? NotifyOutcome::kTooSmallHard
                          : too_small ? NotifyOutcome::kTooSmall
                                      : NotifyOutcome::kRowsFit;
  if (thread == 0) conclude(scope, args, outcome);

  // G6: what the host waits for, and entries by expert, which it alone needs.
  if (thread < num_ranks) {
    tell_host(args.sequence, domain.host_words.rank_rows(domain.host) + thread, rows);
    tell_host(args.sequence, domain.host_words.rank_fit(domain.host) + thread, static_cast<std::uint32_t>(fit));
    tell_host(args.sequence, domain.host_words.source_rows(domain.host) + thread,
              matrix[thread * num_ranks + domain.rank]);
  }
  if (!__syncthreads_and(gather_counts(scope, num_ranks, num_local_experts, [&](int, int local, std::uint32_t count) {
        atomicAdd(expert_sums + local, count);
      })))
    outcome = NotifyOutcome::kFailed;
  for (int l = thread; l < num_local_experts; l += NotifyTuning::kThreads) {
    tell_host(args.sequence, domain.host_words.expert_rows(domain.host) + l, expert_sums[l]);
    if (args.recv_per_expert) args.recv_per_expert[l] = static_cast<std::int32_t>(expert_sums[l]);
  }
  if (thread == 0) tell_outcome(scope, args, outcome);
}

}  // namespace deep_moe::kernels
