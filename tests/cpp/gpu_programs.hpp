// Ranks as processes that use a GPU: this program run again, once for each rank (a fork of a process that has used CUDA
// cannot use it). A file of tests has one skipped test case that its children run; it calls run_as_child.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

namespace deep_moe::test {

using ChildFunctions = std::vector<std::pair<std::string, RankFunction>>;

// An all-gather between processes that are not forks of each other, in memory passed as a descriptor.
struct FileExchange {
  struct alignas(64) Words {
    std::atomic<int> arrived, round;
    char data[8192];
  };
  int fd, num_ranks;
  Words* words;
  FileExchange(int fd_, int num_ranks_) : fd(fd_), num_ranks(num_ranks_) {
    if (fd < 0) {
      fd = ::memfd_create("gpu_programs", 0);  // inherited by exec
      expect(fd >= 0 && ::ftruncate(fd, sizeof(Words)) == 0, "memory for the exchange");
    }
    void* memory = ::mmap(nullptr, sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    expect(memory != MAP_FAILED, "mapping the exchange");
    words = static_cast<Words*>(memory);
  }
  ~FileExchange() {
    ::munmap(words, sizeof(Words));
    ::close(fd);
  }
  void meet() {
    const int round = words->round.load();
    if (words->arrived.fetch_add(1) + 1 == num_ranks) {
      words->arrived = 0;
      words->round.fetch_add(1);
    } else {
      for (int i = 0; words->round.load() == round; ++i) {
        expect(i < 600000, "all ranks come to the exchange within a minute");
        ::usleep(100);
      }
    }
  }
  void all_gather(int rank, const void* send, void* recv, std::size_t bytes) {
    expect(bytes * num_ranks <= sizeof(words->data), "the exchange is large enough");
    std::memcpy(words->data + bytes * rank, send, bytes);
    meet();
    std::memcpy(recv, words->data, bytes * num_ranks);
    meet();
  }
};

struct ProgramOptions {
  std::string test_case;          // that the children run
  std::vector<bool> killed = {};  // killed[r]: rank r kills itself
  std::vector<std::pair<std::string, std::string>> environment = {};
};

// Runs this program once for each rank, which calls the named function.
inline void run_programs(const ProgramOptions& options, const std::string& function, int num_ranks) {
  FileExchange exchange(-1, num_ranks);
  const std::string test_case = "--test-case=" + options.test_case;
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::string what =
        function + ":" + std::to_string(rank) + ":" + std::to_string(num_ranks) + ":" + std::to_string(exchange.fd);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("DEEP_MOE_TEST_CHILD", what.c_str(), 1);
      for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::execl("/proc/self/exe", "gpu_tests", test_case.c_str(), "--no-skip", "--minimal", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    int status = 0;
    REQUIRE(::waitpid(children[rank], &status, 0) == children[rank]);
    INFO(function << ", rank " << rank << ", status " << status);
    if (!options.killed.empty() && options.killed[rank]) {
      CHECK(WIFSIGNALED(status));
    } else {
      CHECK(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) == 0);
    }
  }
}

// In a child: the function that DEEP_MOE_TEST_CHILD names.
inline void run_as_child(const ChildFunctions& functions) {
  const char* what = std::getenv("DEEP_MOE_TEST_CHILD");
  REQUIRE(what != nullptr);
  char name[64];
  int rank, num_ranks, fd;
  REQUIRE(std::sscanf(what, "%63[^:]:%d:%d:%d", name, &rank, &num_ranks, &fd) == 4);
  FileExchange exchange(fd, num_ranks);
  const Bootstrap bootstrap{rank, num_ranks, [&](const void* send, void* recv, std::size_t bytes) {
                              exchange.all_gather(rank, send, recv, bytes);
                            }};
  bool found = false;
  for (const auto& [known, function] : functions) {
    if (known != name) continue;
    found = true;
    function(bootstrap);
  }
  CHECK(found);
}

}  // namespace deep_moe::test
