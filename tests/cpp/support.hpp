// Runs a function as R ranks: threads of this process, or forked processes.
#pragma once

#include <deep_moe/buffer.hpp>

#include <doctest/doctest.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace deep_moe::test {

enum class Form { kThreads, kProcesses };
using RankFunction = std::function<void(const Bootstrap&)>;

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expectation failed: " + what);
}

template <typename ErrorType, typename F>
std::string expect_throw(const F& body, const std::string& part) {
  try {
    body();
  } catch (const ErrorType& error) {
    expect(std::string(error.what()).find(part) != std::string::npos,
           "error text has '" + part + "', got: " + error.what());
    return error.what();
  } catch (const std::exception& error) {
    throw std::runtime_error("expected another type of error with '" + part + "', got: " + error.what());
  }
  throw std::runtime_error("expected an error with '" + part + "', got none");
}

// Returns when all ranks are here.
inline void meet(const Bootstrap& bootstrap) {
  const char here = 0;
  std::vector<char> all(static_cast<std::size_t>(bootstrap.size));
  bootstrap.all_gather(&here, all.data(), sizeof(here));
}

// Returns one line for each rank that failed.
inline std::vector<std::string> run_threads(int num_ranks, const RankFunction& function) {
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  const std::vector<Bootstrap> bootstraps = make_thread_bootstraps(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        function(bootstraps[rank]);
      } catch (const std::exception& error) {
        errors[rank] = "rank " + std::to_string(rank) + ": " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> lines;
  for (const std::string& error : errors)
    if (!error.empty()) lines.push_back(error);
  return lines;
}

// All-gather over shared memory for processes forked from this one.
class SharedExchange {
 public:
  explicit SharedExchange(int num_ranks) : num_ranks_(num_ranks) {
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    words_ = new (memory) Words{};
  }
  ~SharedExchange() { ::munmap(words_, kBytes); }

  void all_gather(int rank, const void* send, void* recv, std::size_t bytes) {
    char* data = reinterpret_cast<char*>(words_ + 1);
    expect(sizeof(Words) + bytes * static_cast<std::size_t>(num_ranks_) <= kBytes, "the exchange is large enough");
    std::memcpy(data + bytes * static_cast<std::size_t>(rank), send, bytes);
    barrier();
    std::memcpy(recv, data, bytes * static_cast<std::size_t>(num_ranks_));
    barrier();
  }
  void barrier() {
    const int round = words_->round.load();
    if (words_->arrived.fetch_add(1) + 1 == num_ranks_) {
      words_->arrived = 0;
      words_->round.fetch_add(1);
    } else {
      while (words_->round.load() == round) ::usleep(100);
    }
  }

 private:
  struct alignas(64) Words {
    std::atomic<int> arrived, round;
  };
  static constexpr std::size_t kBytes = std::size_t{4} << 20;
  const int num_ranks_;
  Words* words_;
};

inline std::vector<std::string> run_processes(int num_ranks, const RankFunction& function) {
  SharedExchange exchange(num_ranks);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends[2];
    expect(::pipe(ends) == 0, "pipe");
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(ends[0]);
      std::string text;
      try {
        function({rank, num_ranks, [&](const void* send, void* recv, std::size_t bytes) {
                    exchange.all_gather(rank, send, recv, bytes);
                  }});
      } catch (const std::exception& error) {
        text = "rank " + std::to_string(rank) + ": " + error.what();
      }
      if (::write(ends[1], text.data(), text.size()) < 0) ::_exit(2);
      ::_exit(text.empty() ? 0 : 1);
    }
    ::close(ends[1]);
    children.push_back(child);
    pipes.push_back(ends[0]);
  }
  std::vector<std::string> lines;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::string text;
    char part[512];
    for (ssize_t got; (got = ::read(pipes[rank], part, sizeof(part))) > 0;)
      text.append(part, static_cast<std::size_t>(got));
    ::close(pipes[rank]);
    int status = 0;
    ::waitpid(children[rank], &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
      text += "rank " + std::to_string(rank) + " ended by signal " + std::to_string(WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0 && text.empty())
      text = "rank " + std::to_string(rank) + " exited with " + std::to_string(WEXITSTATUS(status));
    if (!text.empty()) lines.push_back(text);
  }
  return lines;
}

inline std::vector<std::string> run_ranks(Form form, int num_ranks, const RankFunction& function) {
  return form == Form::kThreads ? run_threads(num_ranks, function) : run_processes(num_ranks, function);
}

// One assertion for all ranks of a run, and one for each that failed.
inline void check_all(const std::vector<std::string>& errors) {
  CHECK(errors.size() == 0);
  for (const std::string& error : errors) FAIL_CHECK(error);
}

// Deterministic numbers that every rank can make for every other rank.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(next() >> 33) % bound; }
  float uniform() { return static_cast<float>(static_cast<std::int64_t>(next() >> 40)) / 8388608.0f - 1.0f; }

 private:
  std::uint64_t state_;
};

inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

}  // namespace deep_moe::test
