#include <deep_moe/version.hpp>

namespace deep_moe {

const char* version() { return DEEP_MOE_VERSION_STRING; }

int abi_version() { return DEEP_MOE_ABI_VERSION; }

}  // namespace deep_moe
