// What happens when ranks disagree, are late, are killed or are gone.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/time.h>

#include <chrono>
#include <memory>

#include "runtime/heap.hpp"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

constexpr std::int64_t kHidden = 64, kExperts = 12, kTopk = 2;

struct Call {
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> ids;
  std::int64_t hidden;
  DispatchArgs args;

  explicit Call(std::int64_t num_tokens, std::int64_t hidden_ = kHidden, std::int64_t bad_id = -2)
      : x(static_cast<std::size_t>(num_tokens * hidden_)),
        ids(static_cast<std::size_t>(num_tokens * kTopk)),
        hidden(hidden_) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i * 7);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 5) % kExperts;
    if (bad_id != -2) ids.back() = bad_id;
    args.x.data = TensorView::contiguous(x.data(), DType::kBFloat16, {num_tokens, hidden});
    args.topk_idx = TensorView::contiguous(ids.data(), DType::kInt64, {num_tokens, kTopk});
    args.num_experts = kExperts;
  }
};

BufferOptions with_timeout(double seconds) {
  BufferOptions options;
  options.timeout_seconds = seconds;
  return options;
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

const Form kForms[] = {Form::kThreads, Form::kProcesses};

}  // namespace

TEST_CASE("a refused call raises everywhere and the next one works") {
  for (const Form form : kForms) {
    check_all(run_ranks(form, 3, [](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, with_timeout(20));
      for (int round = 0; round < 20; ++round) {
        Call bad(8, kHidden, round % 3 == bootstrap.rank ? kExperts + 7 : -2);
        if (round % 3 == bootstrap.rank) {
          expect_throw<ArgumentError>([&] { buffer.dispatch(bad.args); }, "expert id 19 in row 7, column 1");
        } else {
          expect_throw<PeerRefusedError>([&] { buffer.dispatch(bad.args); }, "expert id 19 in row 7");
        }
        Call good(8);
        buffer.dispatch(good.args);
      }
    }));
  }
}

TEST_CASE("a rank that refuses many calls in a row does not run away from its peers") {
  check_all(run_ranks(Form::kThreads, 2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(20));
    for (int i = 0; i < 40; ++i) {
      Call bad(4, kHidden, bootstrap.rank == 0 ? 99 : -2);
      if (bootstrap.rank == 0) {
        expect_throw<ArgumentError>([&] { buffer.dispatch(bad.args); }, "99");
      } else {
        if (i % 10 == 5) pause_ms(20);
        expect_throw<PeerRefusedError>([&] { buffer.dispatch(bad.args); }, "99");
      }
    }
    Call good(4);
    buffer.dispatch(good.args);
  }));
}

TEST_CASE("a wait of a refused call may be interrupted by any exception") {
  check_all(run_threads(2, [](const Bootstrap& bootstrap) {
    BufferOptions options = with_timeout(20);
    if (bootstrap.rank == 0) options.interrupt_check = [] { throw std::logic_error("interrupted"); };
    Buffer buffer(bootstrap, options);
    if (bootstrap.rank == 0) {
      Call bad(4, kHidden, 99);
      // Its peer comes to none of them, so one of them waits; the next finds what has failed the Buffer.
      const auto refuse_until_failed = [&] {
        for (;;) {
          try {
            buffer.dispatch(bad.args);
          } catch (const ArgumentError&) {
          }
        }
      };
      expect_throw<std::logic_error>(refuse_until_failed, "interrupted");
    }
    meet(bootstrap);
  }));
}

TEST_CASE("memory of which the peers cannot be told is not used") {
  std::weak_ptr<Segment> made;
  bool told = false;
  const auto heap = std::make_shared<Heap>(std::size_t{64} << 20, [&](int, const std::shared_ptr<Segment>& segment) {
    made = segment;
    if (!told) throw Error("nobody hears it");
  });
  std::string reason;
  CHECK(!heap->allocate_or_grow(100, &reason));
  CHECK(reason == "nobody hears it");
  CHECK(made.expired());
  CHECK(heap->stats().heap_bytes == 0);
  told = true;
  const Block block = heap->allocate_or_grow(100, &reason);
  CHECK(block.segment == 1);
  CHECK(heap->segment(1)->base() == block.ptr);
}

TEST_CASE("different calls raise on every rank and name both") {
  for (const Form form : kForms) {
    check_all(run_ranks(form, 3, [](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, with_timeout(20));
      Call call(8, bootstrap.rank == 1 ? 2 * kHidden : kHidden);
      const std::string text = expect_throw<CallMismatchError>([&] { buffer.dispatch(call.args); }, "row_bytes=256");
      expect(text.find("row_bytes=128") != std::string::npos, "both calls are named: " + text);
      Call good(8);
      const DispatchResult result = buffer.dispatch(good.args);
      CombineArgs combine;
      combine.x = result.recv_x.data.view;
      combine.handle = result.handle.view();
      if (bootstrap.rank == 2) {
        expect_throw<CallMismatchError>([&] { buffer.dispatch(good.args); }, "combine");
      } else {
        expect_throw<CallMismatchError>([&] { buffer.combine(combine); }, "dispatch(");
      }
      buffer.combine(combine);
    }));
  }
}

TEST_CASE("a number of rows that is too small raises everywhere before rows move") {
  check_all(run_ranks(Form::kThreads, 2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(20));
    Call call(16);
    call.args.num_worst_tokens = bootstrap.rank == 0 ? 64 : 5;
    expect_throw<ArgumentError>([&] { buffer.dispatch(call.args); }, "num_worst_tokens: rank 1 allows 5 rows");
    call.args.num_worst_tokens = 64;
    buffer.dispatch(call.args);
  }));
}

TEST_CASE("a sleeper is named, changes nothing when it wakes, and reset() heals") {
  for (const Form form : kForms) {
    check_all(run_ranks(form, 3, [](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, with_timeout(0.4));
      Call call(32);
      const DispatchResult kept = buffer.dispatch(call.args);
      const std::vector<char> before(kept.recv_x.data.as<char>(),
                                     kept.recv_x.data.as<char>() + kept.recv_x.data.view.num_bytes());
      std::vector<Tensor> later;
      if (bootstrap.rank == 1) {
        pause_ms(900);
        expect_throw<TimeoutError>([&] { buffer.dispatch(call.args); }, "gave up");
      } else {
        expect_throw<TimeoutError>([&] { buffer.dispatch(call.args); }, "for rank 1 in dispatch/notify");
        expect_throw<TimeoutError>([&] { buffer.dispatch(call.args); }, "for rank 1 in dispatch/notify");
        expect_throw<TimeoutError>([&] { buffer.check(); }, "for rank 1");
      }
      expect(std::memcmp(before.data(), kept.recv_x.data.view.data, before.size()) == 0, "the tensor is as it was");
      if (bootstrap.rank != 1) pause_ms(600);
      buffer.reset();
      buffer.check();
      for (int i = 0; i < 20; ++i) {
        const DispatchResult again = buffer.dispatch(call.args);
        expect(std::memcmp(before.data(), again.recv_x.data.view.data, before.size()) == 0, "rows after reset");
      }
    }));
  }
}

TEST_CASE("a destroyed or ended peer is named") {
  for (const Form form : kForms) {
    check_all(run_ranks(form, 3, [&](const Bootstrap& bootstrap) {
      auto buffer = std::make_unique<Buffer>(bootstrap, with_timeout(10));
      Call call(8);
      buffer->dispatch(call.args);
      if (bootstrap.rank == 2) {
        if (form == Form::kProcesses) ::kill(::getpid(), SIGKILL);
        buffer.reset();
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      expect_throw<PeerLostError>([&] { buffer->dispatch(call.args); }, "rank 2");
      expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "found long before the time-out");
    }));
  }
}

TEST_CASE("options that differ or are wrong raise on every rank") {
  check_all(run_ranks(Form::kThreads, 2, [](const Bootstrap& bootstrap) {
    BufferOptions options = with_timeout(5);
    options.num_nvl_bytes = bootstrap.rank == 0 ? -1 : 0;
    if (bootstrap.rank == 0) {
      expect_throw<ArgumentError>([&] { Buffer(bootstrap, options); }, "num_nvl_bytes: got -1");
    } else {
      expect_throw<Error>([&] { Buffer(bootstrap, options); }, "rank 0 could not make its Buffer: num_nvl_bytes");
    }
  }));
  check_all(run_ranks(Form::kThreads, 2, [](const Bootstrap& bootstrap) {
    BufferOptions options = with_timeout(5);
    options.enable_shrink = bootstrap.rank == 0;
    expect_throw<ArgumentError>([&] { Buffer(bootstrap, options); }, "enable_shrink");
  }));
}

TEST_CASE("a forked child cannot use the Buffer and does no harm to it") {
  check_all(run_ranks(Form::kProcesses, 2, [](const Bootstrap& bootstrap) {
    Buffer buffer(bootstrap, with_timeout(10));
    Call call(8);
    auto result = std::make_unique<DispatchResult>(buffer.dispatch(call.args));
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        buffer.dispatch(call.args);
      } catch (const ForkedProcessError&) {
        result.reset();
        buffer.destroy();
        ::_exit(7);
      } catch (...) {
      }
      ::_exit(1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child got ForkedProcessError");
    buffer.dispatch(call.args);
    result.reset();
    buffer.dispatch(call.args);
  }));
}

TEST_CASE("two Buffers called in opposite order from two threads are independent") {
  check_all(run_ranks(Form::kThreads, 2, [](const Bootstrap& bootstrap) {
    Buffer first(bootstrap, with_timeout(20)), second(bootstrap, with_timeout(20));
    const auto use = [&](Buffer& buffer) {
      Call call(16);
      for (int i = 0; i < 50; ++i) {
        const DispatchResult result = buffer.dispatch(call.args);
        CombineArgs combine;
        combine.x = result.recv_x.data.view;
        combine.handle = result.handle.view();
        buffer.combine(combine);
      }
    };
    std::exception_ptr error;
    std::thread other([&] {
      try {
        use(bootstrap.rank == 0 ? first : second);
      } catch (...) {
        error = std::current_exception();
      }
    });
    use(bootstrap.rank == 0 ? second : first);
    other.join();
    if (error) std::rethrow_exception(error);
  }));
}

// Signals with handlers end system calls early.
TEST_CASE("signals while a Buffer is made are no time-out") {
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    if (bootstrap.rank == 0) {
      struct sigaction action = {};
      action.sa_handler = [](int) {};
      ::sigaction(SIGALRM, &action, nullptr);
      const itimerval often{{0, 2000}, {0, 2000}};
      ::setitimer(ITIMER_REAL, &often, nullptr);
    }
    Bootstrap late = bootstrap;
    late.all_gather = [&](const void* send, void* recv, std::size_t bytes) {
      bootstrap.all_gather(send, recv, bytes);
      if (bootstrap.rank == 1) pause_ms(100);  // rank 0 waits for it to connect
    };
    Buffer buffer(late, with_timeout(20));
    Call call(8);
    buffer.dispatch(call.args);
  }));
}
