// What a fork does to us.
#pragma once

#include <cstdint>

namespace deep_moe {

// Counts the forks between the first process that loaded the library and this one; objects made at another count
// belong to a parent process.
std::uint64_t fork_count();

// A descriptor that a forked child must not keep open: a parent's end of it has to close when the parent ends.
void close_in_child(int fd);
void forget_close_in_child(int fd);

}  // namespace deep_moe
