// Staging: memory of all ranks, made together, which only a larger one replaces.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/call_streams.hpp"
#include "cuda/cuda_low_latency.hpp"
#include "cuda/driver.hpp"
#include "runtime/text.hpp"
#include "runtime/validate_low_latency.hpp"

namespace deep_moe::cuda {

namespace {

constexpr const char* kPhase = "low latency/grow";

}  // namespace

// All ranks have the same staging and make the same call, so all come here; `look_at_missing` finds those that do not.
// Calls in flight keep the old staging, and so do graphs.
void LowLatency::ensure_staging(std::int64_t slot_bytes, const layout::CallSignature& signature, std::uint64_t number,
                                const LowLatencyStreams& streams) {
  captured_ = captured_ || streams.captured;
  if (slot_bytes <= staging_.slot_bytes) return;
  const auto problem = [&](const std::string& what) {
    const std::int64_t bytes = std::max(slot_bytes, wanted_slot_bytes_) * layout::kLowLatencySlots;
    return std::string(call_name(signature.kind)) + ": " + std::to_string(bytes) +
           " bytes of low-latency staging needed (" + std::to_string(staging_bytes()) + " are there)" + what;
  };
  if (streams.captured) {
    const std::string reason = problem("; it cannot grow while a graph is captured: pass num_rdma_bytes");
    refuse_(signature, reason);
    throw BufferTooSmallError(reason);
  }
  const std::string failures = grow_staging(std::max(slot_bytes, wanted_slot_bytes_), static_cast<int>(2 * number),
                                            [&](int peer) { look_at_missing(peer, signature, streams.work); });
  if (!failures.empty()) throw BufferTooSmallError(problem(failures));
  go_behind(streams.work);  // of masks that the growth has made
}

// Collective. Returns what has failed, on all ranks if on one.
std::string LowLatency::grow_staging(std::int64_t slot_bytes, int id, const std::function<void(int peer)>& look) {
  std::uint64_t masked = masked_by_host();
  const std::uint64_t masked_before = masked;
  for (const DeviceWorld::Said& said :
       world_.exchange_in_call(kPhase, id, static_cast<std::uint64_t>(slot_bytes), "", look, &masked, options_.shrink))
    slot_bytes = std::max(slot_bytes, static_cast<std::int64_t>(said.value));
  slot_bytes = static_cast<std::int64_t>(layout::align_up(static_cast<std::size_t>(slot_bytes), layout::kAlign));
  Block block;
  const std::string reason = take_staging(slot_bytes * layout::kLowLatencySlots, &block);
  const std::string place =
      block ? std::to_string(block.segment) + " " + std::to_string(block.offset) + (captured_ ? " captured" : "")
            : "failed: " + reason;
  const auto said = world_.exchange_in_call(kPhase, id + 1, 0, place, look, &masked, options_.shrink);
  std::string failures;
  kernels::LowLatencyStaging staging;
  staging.slot_bytes = slot_bytes;
  for (int peer = 0; peer < world_.num_ranks(); ++peer) {
    if ((masked >> peer & 1) != 0) continue;
    const std::string& text = said[static_cast<std::size_t>(peer)].text;
    if (text.rfind("failed: ", 0) == 0) {
      failures += "; rank " + std::to_string(peer) + ": " + text.substr(8);
      continue;
    }
    char* end = nullptr;
    const long segment = std::strtol(text.c_str(), &end, 10);
    const unsigned long long offset = std::strtoull(end, &end, 10);
    captured_ = captured_ || *end != '\0';
    if (world_.near(peer))
      staging.bases[peer] = world_.address(peer, static_cast<int>(segment), static_cast<std::size_t>(offset));
  }
  for (int peer = 0; peer < world_.num_ranks(); ++peer)
    if (((masked & ~masked_before) >> peer & 1) != 0) mask(peer, world_.comm_stream());
  if (!failures.empty()) {
    if (block) world_.heap().free(block);
    return failures;
  }
  drop_staging();
  staging_owner_ = world_.heap().own(block, has_stream_ ? last_stream_ : world_.comm_stream());
  staging_ = staging;
  ++num_growths_;
  return {};
}

// Graphs, also those of peers, may write it yet.
void LowLatency::drop_staging() {
  if (captured_ && staging_owner_) kept_.push_back(std::move(staging_owner_));
  staging_owner_ = nullptr;
  staging_ = {};
}

std::string LowLatency::take_staging(std::int64_t bytes, Block* block) {
  std::string reason;
  *block = world_.allocate_or_grow(static_cast<std::size_t>(bytes), world_.comm_stream(), &reason);
  if (!*block) return reason;
  try {
    world_.wait_until_shared(block->segment, kPhase, masked_by_host());
  } catch (const BufferTooSmallError& error) {
    world_.heap().free(*block);
    *block = {};
    return error.what();
  }
  check_runtime(
      cudaMemsetAsync(block->ptr, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(world_.comm_stream())),
      "cudaMemsetAsync");
  world_.wait_idle(kPhase);
  return {};
}

// A peer that does not come may have refused this call or made another one. It has announced that in this rank's
// memory, which can be read once the kernels of the calls before are done.
void LowLatency::look_at_missing(int peer, const layout::CallSignature& signature, Stream stream) {
  for (const Stream busy : {stream, last_stream_, world_.comm_stream()})
    if (cudaStreamQuery(static_cast<cudaStream_t>(busy)) != cudaSuccess) return;
  layout::Announce record;
  if (!world_.announced(peer, &record)) return;
  layout::CallSignature expected = signature;
  expected.flags |= (num_growths_ + 1) << kFlagStagingShift;
  if (record.hash == layout::signature_hash(expected)) return;  // it has gone on; its part is on the way
  const std::string who = "rank " + std::to_string(peer);
  if (record.status != static_cast<std::uint32_t>(layout::CallStatus::kOk)) {
    const std::string reason =
        who + " refused its " + call_name(record.signature.kind) + ": " +
        std::string(record.reason, std::min<std::size_t>(record.num_reason_bytes, sizeof record.reason));
    refuse_(signature, reason);
    throw PeerRefusedError(reason);
  }
  const std::string reason = "the ranks did not make the same call: rank " + std::to_string(world_.rank()) +
                             " called " + describe_signature(signature) + ", " + who + " called " +
                             describe_signature(record.signature);
  refuse_(signature, reason);
  throw CallMismatchError(reason);
}

}  // namespace deep_moe::cuda
