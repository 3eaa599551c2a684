// Counterpart of cpp/kernels/internode/tuning.hpp: few fibers.
#pragma once

namespace deep_moe::kernels::internode {

struct RailTuning {
  static constexpr int kWarps = 4;
  static constexpr int kVectorsInFlight = 4;
  static constexpr int kSumsInFlight = 4;
};

}  // namespace deep_moe::kernels::internode
