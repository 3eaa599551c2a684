#include "runtime/network.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include <deep_moe/error.hpp>

namespace deep_moe {
namespace {

constexpr const char* kFile = "libdeep_moe_nvshmem.so";
constexpr const char* kEntry = "deep_moe_nvshmem_plugin";
constexpr const char* kInstall = "pip install 'nvidia-nvshmem-cu13>=3.4.5,<3.5' (or -cu12, as the CUDA of this build)";
// Queue pairs are laid out otherwise from 3.5 on, and what was built against a version does not load on an older one.
constexpr int kOldest[3] = {3, 4, 5}, kTooNew[2] = {3, 5};

struct Loaded {
  NetworkStatus status;
  const nvshmem::Plugin* plugin = nullptr;
};

std::string path_of_plugin() {
  if (const char* path = std::getenv("DEEP_MOE_NVSHMEM_PLUGIN"); path != nullptr && *path != '\0') return path;
  Dl_info here;
  if (::dladdr(reinterpret_cast<void*>(&path_of_plugin), &here) == 0 || here.dli_fname == nullptr) return kFile;
  const std::string file = here.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? kFile : file.substr(0, slash + 1) + kFile;
}

bool serves(const int version[3]) {
  const bool old =
      version[0] < kOldest[0] ||
      (version[0] == kOldest[0] && (version[1] < kOldest[1] || (version[1] == kOldest[1] && version[2] < kOldest[2])));
  return !old && version[0] == kTooNew[0] && version[1] < kTooNew[1];
}

// The plug-in's entry. Null: `status` says why.
nvshmem::GetPlugin find_entry(NetworkStatus& status) {
  // A program that links deep_moe::internode has it already.
  if (void* linked = ::dlsym(RTLD_DEFAULT, kEntry); linked != nullptr) {
    Dl_info there;
    status.path = ::dladdr(linked, &there) != 0 && there.dli_fname != nullptr ? there.dli_fname : kFile;
    return reinterpret_cast<nvshmem::GetPlugin>(linked);
  }
  status.path = path_of_plugin();
  if (::access(status.path.c_str(), R_OK) != 0) {
    status.problem = "there is no " + status.path + ": this build has no network part; build deep_moe with " +
                     "DEEP_MOE_NVSHMEM_DIR, the folder nvidia/nvshmem of the package: " + kInstall;
    return nullptr;
  }
  // Its symbols stay its own; it is never closed, for NVSHMEM has threads and is never finalised.
  void* library = ::dlopen(status.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    status.problem = std::string("the network part does not load (") + ::dlerror() + "): " + kInstall;
    return nullptr;
  }
  void* entry = ::dlsym(library, kEntry);
  if (entry == nullptr) status.problem = status.path + " is not the network part of deep_moe: it has no " + kEntry;
  return reinterpret_cast<nvshmem::GetPlugin>(entry);
}

Loaded load() {
  Loaded loaded;
  NetworkStatus& status = loaded.status;
  const nvshmem::GetPlugin get = find_entry(status);
  if (get == nullptr) return loaded;
  const nvshmem::Plugin* plugin = get();
  if (plugin == nullptr || plugin->version != nvshmem::kPluginVersion) {
    status.problem = status.path + " is of another version of deep_moe: install deep_moe again";
    return loaded;
  }
  status.built_against = plugin->built_against;
  int version[3] = {};
  plugin->library_version(version);
  status.library = std::to_string(version[0]) + "." + std::to_string(version[1]) + "." + std::to_string(version[2]);
  if (!serves(version)) {
    status.problem = "NVSHMEM " + status.library + " is loaded, and 3.4.5 up to 3.5 (not 3.5) serves: " + kInstall;
    return loaded;
  }
  loaded.plugin = plugin;
  return loaded;
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

}  // namespace

const NetworkStatus& network_status() { return loaded().status; }

const nvshmem::Plugin& network_plugin() {
  if (loaded().plugin == nullptr) throw UnavailableError("exchange between nodes on GPUs: " + network_status().problem);
  return *loaded().plugin;
}

}  // namespace deep_moe
