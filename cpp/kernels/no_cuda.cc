// kernels/api.hpp in a build without CUDA.
#include <deep_moe/error.hpp>

#include "kernels/api.hpp"

namespace deep_moe::kernels {
namespace {

[[noreturn]] void unavailable(const char* what) {
  throw UnavailableError(std::string(what) +
                         ": this build of deep_moe has no CUDA kernels. Install a CUDA package (deep-moe-cu12 or "
                         "deep-moe-cu13), or build from source where nvcc is found (DEEP_MOE_CUDA=ON)");
}

}  // namespace

bool compiled() { return false; }

void prepare() { unavailable("prepare"); }

void get_dispatch_layout(const DeviceDomain&, const LayoutArgs&, Stream) { unavailable("get_dispatch_layout"); }

void notify(const DeviceDomain&, NotifyArgs, Stream) { unavailable("notify"); }

void dispatch(const DeviceDomain&, DispatchArgs, Stream) { unavailable("dispatch"); }

void combine(const DeviceDomain&, CombineArgs, Stream) { unavailable("combine"); }

void place_by_expert(const PlaceByExpertArgs&, Stream) { unavailable("place_by_expert"); }

std::int64_t place_by_expert_words(const ExpertGroups&) { unavailable("place_by_expert_words"); }

void group_rows(const GroupRowsArgs&, Stream) { unavailable("group_rows"); }

void sum_groups(const SumGroupsArgs&, Stream) { unavailable("sum_groups"); }

void post_refusal(const DeviceDomain&, const layout::CallSignature&, const std::string&, Stream) {
  unavailable("post_refusal");
}

void clear_error(const DeviceDomain&, char*, Stream, bool) { unavailable("clear_error"); }

void reset_state(const DeviceDomain&, std::uint64_t, Stream) { unavailable("reset_state"); }

void low_latency_dispatch(const DeviceDomain&, LowLatencyDispatchArgs, Stream) { unavailable("low_latency_dispatch"); }

void low_latency_combine(const DeviceDomain&, LowLatencyCombineArgs, Stream) { unavailable("low_latency_combine"); }

std::int64_t low_latency_slot_bytes(const DeviceDomain&, const LowLatencyDispatchArgs&) {
  unavailable("low_latency_slot_bytes");
}

std::int64_t low_latency_slot_bytes(const DeviceDomain&, const LowLatencyCombineArgs&) {
  unavailable("low_latency_slot_bytes");
}

void mask_ranks(const DeviceDomain&, std::uint64_t, Stream) { unavailable("mask_ranks"); }

void query_masked(const DeviceDomain&, std::int32_t*, Stream) { unavailable("query_masked"); }

}  // namespace deep_moe::kernels
