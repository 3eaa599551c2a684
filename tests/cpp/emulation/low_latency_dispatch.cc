// Low-latency dispatch, compiled for the CPU.
#include "kernels/low_latency/dispatch.cu"

namespace deep_moe::kernels {
namespace {

alignas(128) thread_local char shared_memory[kMostCountBytes];

}  // namespace
}  // namespace deep_moe::kernels
