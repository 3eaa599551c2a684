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

namespace internode {

alignas(16) thread_local std::uint32_t expert_counts[layout::kMaxExperts];
alignas(128) thread_local char dynamic_shared[1 << 17];

}  // namespace internode
}  // namespace deep_moe::kernels
