// What the low-latency calls of this backend check beyond runtime/validate_low_latency.hpp.
#include "cpu/low_latency_call.hpp"

namespace deep_moe::cpu {

void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyDispatchArgs& args) {
  deep_moe::validate(args, domain.rank(), domain.num_ranks(), true);
  check_in_flight(state.num_in_flight(), "low_latency_dispatch");
}

void validate(const Domain& domain, const LowLatencyState& state, const LowLatencyCombineArgs& args) {
  deep_moe::validate(args, domain.rank(), domain.num_ranks(), true);
  check_in_flight(state.num_in_flight(), "low_latency_combine");
}

}  // namespace deep_moe::cpu
