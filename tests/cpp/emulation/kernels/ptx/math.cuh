// Counterpart of cpp/kernels/ptx/math.cuh, wrong in the last bit more often than not.
#pragma once

#include <cmath>

namespace deep_moe::ptx {

inline float rcp_approx(float value) { return std::nextafter(1.0f / value, 0.0f); }

}  // namespace deep_moe::ptx
