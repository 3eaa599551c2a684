// What the tests take from the intranode kernels, and the dynamic shared memory of each kernel.
#include <cuda_runtime.h>

#include <cstring>

#include "kernels/api.hpp"

namespace deep_moe::kernels {

void prepare() {}

void clear_error(const DeviceDomain& domain, char* host, Stream, bool failures) {
  layout::NotifyState& state = domain.words.state(domain.workspaces[domain.rank]);
  for (int kind = 0; kind < (failures ? 2 : 1); ++kind) {
    domain.host_words.error(host, kind == 1).kind = 0;
    state.error_claimed[kind] = 0;
  }
}

void reset_state(const DeviceDomain& domain, std::uint64_t epoch, Stream) {
  char* const base = domain.workspaces[domain.rank];
  const std::size_t first = layout::region_offset(layout::NotifyRegion::kState, domain.num_ranks);
  std::memset(base + first, 0, layout::region_offset(layout::NotifyRegion::kCountWords, domain.num_ranks) - first);
  layout::NotifyState& state = domain.words.state(base);
  state.epoch = state.reset_epoch = epoch;
}

namespace internode {

alignas(16) thread_local std::uint32_t expert_counts[layout::kMaxExperts];
alignas(128) thread_local char dynamic_shared[1 << 17];

}  // namespace internode
}  // namespace deep_moe::kernels
