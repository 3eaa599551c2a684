// Words of errors and announcements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "layout/words.hpp"

namespace deep_moe {

const char* call_name(std::uint32_t kind);
std::string describe_signature(const layout::CallSignature& signature);
// Copies as much as fits; returns the bytes taken.
std::uint32_t copy_text(const std::string& text, char* out, std::size_t capacity);

}  // namespace deep_moe
