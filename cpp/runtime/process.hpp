// What a fork does to us.
#pragma once

#include <cstdint>

namespace deep_moe {

// Counts the forks between the first process that loaded the library and this one; objects made at another count
// belong to a parent process.
std::uint64_t fork_count();

// Names that no two of their kind share.
std::uint64_t random_uid();
std::uint64_t process_uid();  // equal for threads of one process
std::uint64_t machine_uid();  // equal for processes of one boot of one machine that share its name and its network
// The same, or DEEP_MOE_HOST_ID in its place: processes with other names share nothing but TCP.
std::uint64_t host_uid();

// A descriptor that a forked child must not keep open: a parent's end of it has to close when the parent ends.
void close_in_child(int fd);
void forget_close_in_child(int fd);

}  // namespace deep_moe
