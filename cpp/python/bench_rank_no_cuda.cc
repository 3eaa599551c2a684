// bench_rank.hpp in a build without CUDA.
#include <deep_moe/error.hpp>

#include "bench_rank.hpp"

namespace deep_moe::bench {
namespace {

[[noreturn]] void unavailable() { throw UnavailableError("timings on GPUs: this build of deep_moe has no CUDA part"); }

}  // namespace

struct Rank::State {};
Rank::Rank() { unavailable(); }
Rank::~Rank() = default;
void Rank::set_inputs(Buffer&, const Inputs&, void*) { unavailable(); }
void Rank::prepare(Buffer&, const Chain&, void*) { unavailable(); }
Times Rank::run(Buffer&, int, void*) { unavailable(); }
bool Rank::can_copy() const { unavailable(); }
Tensor Rank::received() const { unavailable(); }
Tensor Rank::combined() const { unavailable(); }
void hold(int, int, int, std::int64_t, void*) { unavailable(); }

}  // namespace deep_moe::bench
