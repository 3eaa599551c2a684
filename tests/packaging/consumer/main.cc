// A program in C++ alone.
#include <dlfcn.h>

#include <cstdio>

#include <deep_moe/version.hpp>

#include "exchange.hpp"

static_assert(DEEP_MOE_VERSION_NUMBER >= DEEP_MOE_MAKE_VERSION(0, 1, 0));

int main() {
  std::printf("headers %s, library %s\n", DEEP_MOE_VERSION_STRING, deep_moe::version());
  // Where the library looks for it first.
  if (::dlsym(RTLD_DEFAULT, "deep_moe_nvshmem_plugin") != nullptr) std::printf("the network between nodes is here\n");
  return consumer::exchange() && deep_moe::abi_matches() ? 0 : 1;
}
