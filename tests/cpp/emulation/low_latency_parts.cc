// What the tests take besides the two calls: stand-ins for small kernels, without a launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/api.hpp"
#include "layout/low_latency_words.hpp"

namespace deep_moe::kernels {
namespace {

layout::LowLatencyState& low_latency_state(const DeviceDomain& domain) {
  return *reinterpret_cast<layout::LowLatencyState*>(domain.words.low_latency_state(domain.workspaces[domain.rank]));
}

void take_epoch(const DeviceDomain& domain, const layout::CallSignature& signature, layout::CallStatus status,
                const std::string& reason) {
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  const std::uint64_t epoch = layout::epoch_of(state.epoch) + 1;
  for (int peer = 0; peer < domain.num_ranks; ++peer) {
    layout::Announce& record = domain.words.announce(domain.workspaces[peer], epoch, domain.rank);
    record.status = static_cast<std::uint32_t>(status);
    record.signature = signature;
    record.hash = layout::signature_hash(signature);
    record.num_reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(record.reason)));
    std::memcpy(record.reason, reason.data(), record.num_reason_bytes);
    __atomic_store_n(&record.epoch, epoch, __ATOMIC_RELEASE);
  }
  state.epoch = epoch;
}

}  // namespace

void prepare() {}

void clear_error(const DeviceDomain& domain, char* host, Stream, bool failures) {
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  for (int kind = 0; kind < (failures ? 2 : 1); ++kind) {
    domain.host_words.error(host, kind == 1).kind = 0;
    state.error_claimed[kind] = 0;
  }
}

void mask_ranks(const DeviceDomain& domain, std::uint64_t ranks, Stream) {
  __atomic_fetch_or(&low_latency_state(domain).masked, ranks, __ATOMIC_RELAXED);
}

void post_refusal(const DeviceDomain& domain, const layout::CallSignature& signature, const std::string& reason,
                  Stream) {
  take_epoch(domain, signature, layout::CallStatus::kRefused, reason);
}

// Any other call.
void notify(const DeviceDomain& domain, NotifyArgs args, Stream) {
  take_epoch(domain, args.signature, layout::CallStatus::kOk, {});
}

}  // namespace deep_moe::kernels
