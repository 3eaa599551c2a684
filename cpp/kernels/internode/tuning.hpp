// Launch numbers of the kernels between nodes, apart from their code.
#pragma once

namespace deep_moe::kernels::internode {

struct RailTuning {
  static constexpr int kWarps = 16;  // of a block that moves rows; every other one serves the rings
};

}  // namespace deep_moe::kernels::internode
