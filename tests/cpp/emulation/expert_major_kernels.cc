// The kernels that group rows by expert, compiled for the CPU.
#include "kernels/intranode/expert_major.cu"

namespace deep_moe::kernels {

void prepare() { prepare_expert_major(); }

namespace {

alignas(16) thread_local std::int32_t expert_words[12288];

}  // namespace
}  // namespace deep_moe::kernels
