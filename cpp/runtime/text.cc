#include "runtime/text.hpp"

#include <algorithm>
#include <cstring>

#include <deep_moe/tensor.hpp>

namespace deep_moe {

const char* call_name(std::uint32_t kind) {
  switch (static_cast<layout::CallKind>(kind)) {
    case layout::CallKind::kDispatch: return "dispatch";
    case layout::CallKind::kCachedDispatch: return "dispatch with a handle";
    case layout::CallKind::kCombine: return "combine";
    case layout::CallKind::kLowLatencyDispatch: return "low_latency_dispatch";
    case layout::CallKind::kLowLatencyCombine: return "low_latency_combine";
    case layout::CallKind::kNone: break;
  }
  return "call";
}

std::string describe_signature(const layout::CallSignature& signature) {
  std::string text = call_name(signature.kind);
  const auto add = [&](const char* name, std::int64_t value) {
    if (value != 0) text += std::string(text.back() == '(' ? "" : ", ") + name + "=" + std::to_string(value);
  };
  text += "(";
  if (signature.x_dtype != 0) text += std::string("dtype=") + dtype_name(static_cast<DType>(signature.x_dtype));
  add("row_bytes", signature.row_bytes);
  add("scale_bytes", signature.scale_bytes);
  add("num_experts", signature.num_experts);
  add("topk", signature.topk);
  add("num_max_dispatch_tokens_per_rank", signature.max_tokens);
  add("flags", signature.flags);
  if (signature.handle_hash != 0) text += ", handle #" + std::to_string(signature.handle_hash % 1000000);
  return text + ")";
}

std::uint32_t copy_text(const std::string& text, char* out, std::size_t capacity) {
  const std::size_t bytes = std::min(text.size(), capacity);
  std::memcpy(out, text.data(), bytes);
  return static_cast<std::uint32_t>(bytes);
}

}  // namespace deep_moe
