// Counterpart of cpp/kernels/internode/tuning.hpp: few fibers.
#pragma once

namespace deep_moe::kernels::internode {

struct RailTuning {
  static constexpr int kCopyWarps = 4;
  static constexpr int kPieceBytes = 256;
  static constexpr int kPieces = 2;
  static constexpr int kVectorsInFlight = 4;
  static constexpr int kSumWarps = 4;
  static constexpr int kSumsInFlight = 4;
};

struct DirectTuning {
  static constexpr int kWarps = 4;
  static constexpr int kRowsInFlight = 4;
};

}  // namespace deep_moe::kernels::internode
