// What a spinning thread does between two looks.
#pragma once

#include <thread>

namespace deep_moe {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace deep_moe
