// Launch numbers of the kernels between nodes, apart from their code.
#pragma once

namespace deep_moe::kernels::internode {

// Every other warp of a block serves the rings.
struct RailTuning {
  static constexpr int kCopyWarps = 14;       // of a block of dispatch
  static constexpr int kPieceBytes = 7168;    // of a row, moved as one by the copy engine
  static constexpr int kPieces = 2;           // of a warp in shared memory
  static constexpr int kVectorsInFlight = 7;  // 16-byte loads of a lane without it
  static constexpr int kSumWarps = 24;        // of a block of combine
  static constexpr int kSumsInFlight = 3;     // 16-byte loads of a lane, of each row
};

// Of low-latency calls.
struct DirectTuning {
  static constexpr int kWarps = 16;        // of a block, with a thread for each rank
  static constexpr int kRowsInFlight = 4;  // of a warp that sums
};

}  // namespace deep_moe::kernels::internode
