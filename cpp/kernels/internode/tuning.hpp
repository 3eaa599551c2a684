// Launch numbers of the kernels between nodes, apart from their code.
#pragma once

namespace deep_moe::kernels::internode {

struct RailTuning {
  static constexpr int kWarps = 16;           // of a block that moves rows; every other one serves the rings
  static constexpr int kVectorsInFlight = 7;  // 16-byte loads of a lane that copies; a row of 14,336 bytes is 4 * 7
  static constexpr int kSumsInFlight = 4;     // of one that sums
};

}  // namespace deep_moe::kernels::internode
