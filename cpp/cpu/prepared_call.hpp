// A call in two steps: what fails while it is prepared is this rank's refusal, before anything was announced.
#pragma once

#include "cpu/protocol.hpp"
#include "runtime/validate.hpp"

namespace deep_moe::cpu {

// `Call` has a constructor (context, args), prepare(), and run().
template <typename Call, typename Args>
auto run_prepared(Context context, const Args& args) {
  Call call(context, args);
  try {
    call.prepare();
  } catch (const BufferTooSmallError& error) {
    context.domain.announce_refusal(signature(args), error.what());
    throw;
  }
  return call.run();
}

}  // namespace deep_moe::cpu
