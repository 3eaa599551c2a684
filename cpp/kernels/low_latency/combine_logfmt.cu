// Low-latency combine of rows that travel as logarithms: kernels of their own, so that those of other rows stay as they
// are.
#include "kernels/low_latency/combine_kernel.cuh"
#include "kernels/low_latency/combine_logfmt.cuh"

namespace deep_moe::kernels {
namespace {

template <typename Body>
void with_logfmt(const LowLatencyCombineArgs& args, bool plain, bool all, Body body) {
  with_type(args.type, [&](auto number) {
    using T = decltype(number);
    if (plain)
      with_half<T, Logfmt<T, true>>(args, all, body);
    else
      with_half<T, Logfmt<T, false>>(args, all, body);
  });
}

}  // namespace

CombineKernel* logfmt_combine_kernel(const LowLatencyCombineArgs& args, bool plain) {
  CombineKernel* kernel = nullptr;
  with_logfmt(args, plain, false, [&](CombineKernel* one) { kernel = one; });
  return kernel;
}

void prepare_logfmt_combine() {
  LowLatencyCombineArgs args;
  for (const SumType type : {SumType::kBf16, SumType::kFp16, SumType::kFp32})
    for (const bool plain : {true, false}) {
      args.type = type;
      with_logfmt(args, plain, true, [](CombineKernel* kernel) { load_kernel(kernel, 0); });
    }
}

}  // namespace deep_moe::kernels
