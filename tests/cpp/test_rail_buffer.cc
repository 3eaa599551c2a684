// Buffers of several nodes over a network that delays, tears and reorders what passes it: results are those of the
// scalar model. And over networks that keep less than they promise, which has to be noticed, and mended by a reset.
#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <mutex>

#include "cpu/rails.hpp"
#include "high_throughput_model.hpp"
#include "random_network.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

enum class Fault { kNone, kSignalsOvertakeData, kLostCredits };

// One network for all Buffers that are made while it is there. Ranks are threads of this process.
class Networks {
 public:
  Networks(int num_local_ranks, std::uint64_t seed, Fault fault = Fault::kNone) : seed_(seed), fault_(fault) {
    here_ = this;
    before_ = cpu::Rails::make_network;
    cpu::Rails::make_network = [](Domain& domain) { return here_->make(domain); };
    ::setenv("DEEP_MOE_LOCAL_RANKS", std::to_string(num_local_ranks).c_str(), 1);
  }
  ~Networks() {
    ::unsetenv("DEEP_MOE_LOCAL_RANKS");
    cpu::Rails::make_network = before_;
    here_ = nullptr;
  }
  void mend() { broken_ = false; }
  void pause(std::chrono::milliseconds pause) { network_->pause(pause); }
  std::int64_t num_overtakings() { return network_->num_overtakings(); }

 private:
  // A rank's end of the network, which wakes it when something has arrived.
  class End final : public cpu::OneSided {
   public:
    End(Networks& networks, Domain& domain)
        : networks_(networks), rank_(domain.rank()), port_(networks.network_->port(rank_)), lossy_(port_) {
      const std::lock_guard lock(networks_.mutex_);
      networks_.domains_[rank_] = &domain;
    }
    ~End() override {
      const std::lock_guard lock(networks_.mutex_);
      networks_.domains_.erase(rank_);
    }
    char* memory() override { return port_.memory(); }
    void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal,
                    std::uint64_t value) override {
      port_.put_signal(rank, to, from, bytes, signal, value);
    }
    void signal(int rank, std::size_t signal, std::uint64_t value) override {
      const bool loses = networks_.fault_ == Fault::kLostCredits && networks_.broken_;
      (loses ? lossy_ : port_).signal(rank, signal, value);
    }
    std::uint64_t test(std::size_t signal) override { return port_.test(signal); }
    void quiet() override { port_.quiet(); }

   private:
    Networks& networks_;
    const int rank_;
    cpu::OneSided& port_;
    LostCredits lossy_;
  };

  cpu::Rails::Network make(Domain& domain) {
    {
      const std::lock_guard lock(mutex_);
      if (!network_)
        network_ =
            std::make_unique<RandomNetwork>(domain.num_ranks(), domain.rail_layout().bytes(), seed_,
                                            fault_ != Fault::kSignalsOvertakeData, [this](int rank) {
                                              const std::lock_guard wake(mutex_);
                                              if (const auto found = domains_.find(rank); found != domains_.end())
                                                found->second->ring(rank);
                                            });
    }
    return std::make_shared<End>(*this, domain);
  }

  static inline Networks* here_ = nullptr;
  cpu::Rails::MakeNetwork before_;
  const std::uint64_t seed_;
  const Fault fault_;
  std::atomic<bool> broken_{true};
  std::mutex mutex_;
  std::map<int, Domain*> domains_;
  std::unique_ptr<RandomNetwork> network_;
};

// Slots of `rows` rows with what travels with them, so that few tokens go round the rings many times.
BufferOptions narrow(const Shape& shape, int rows) {
  BufferOptions options;
  const layout::RailRow row(static_cast<std::size_t>(shape.hidden * 2), 0, static_cast<std::size_t>(shape.topk * 8),
                            static_cast<std::size_t>(shape.topk * 4), shape.num_local_ranks);
  options.num_rdma_bytes =
      static_cast<std::int64_t>(layout::rail_layout(shape.num_ranks / shape.num_local_ranks, shape.num_local_ranks,
                                                    row.stride * static_cast<std::size_t>(rows))
                                    .bytes());
  return options;
}

}  // namespace

TEST_CASE("Buffers of several nodes equal the scalar model, whatever the network does") {
  const Shape shapes[] = {
      {2, {90, 70}, 120, 8, 3, 1},
      {4, {40, 0, 33, 50}, 128, 16, 6, 2},
      {4, {25, 31, 4, 18}, 64, 9, 4, 1},
      {6, {9, 20, 3, 30, 14, 7}, 8, 12, 5, 2},
      {8, {}, 128, 16, 8, 4},
      {8, {}, 136, 24, 6, 2},
  };
  for (const Shape& shape : shapes) {
    for (const int rows : {1, 3}) {
      CAPTURE(shape.num_ranks);
      CAPTURE(shape.num_local_ranks);
      Networks networks(shape.num_local_ranks, static_cast<std::uint64_t>(shape.num_ranks * 10 + rows));
      check_all(run_threads(shape.num_ranks, [&](const Bootstrap& bootstrap) {
        round_trips(bootstrap, shape, 3, shape.num_tokens.empty() ? 40 : -1, narrow(shape, rows));
      }));
      CHECK(networks.num_overtakings() > 0);
    }
  }
}

TEST_CASE("rows come in waves over such a network") {
  ::setenv("DEEP_MOE_MAX_HEAP_BYTES", "60000", 1);
  const Shape shape{4, {60, 80, 50, 70}, 256, 16, 4, 2};
  Networks networks(shape.num_local_ranks, 77);
  check_all(run_threads(4, [&](const Bootstrap& bootstrap) {
    BufferOptions options = narrow(shape, 2);
    options.timeout_seconds = 30;
    Buffer buffer(bootstrap, options);
    std::vector<Input> inputs;
    for (int rank = 0; rank < 4; ++rank) inputs.push_back(make_input(shape, rank, 5));
    Input& mine = inputs[static_cast<std::size_t>(buffer.rank())];
    for (int step = 0; step < 3; ++step) {
      const Uploaded uploaded = upload(buffer, {}, mine, shape);
      const DispatchResult result = buffer.dispatch(dispatch_args(uploaded, shape));
      const std::int64_t rows = check_received(shape, inputs, buffer.rank(), result);
      expect(rows == result.recv_x.data.view.shape[0], "rows");
      expect(rows * shape.hidden * 2 > 60000, "more rows than the heap holds");
      check_combine(buffer, shape, mine, uploaded, result, {}, false, step != 1);
    }
  }));
  ::unsetenv("DEEP_MOE_MAX_HEAP_BYTES");
}

TEST_CASE("word of a rank that goes does not overtake what it has put") {
  const Shape shape{2, {9, 12}, 64, 4, 2, 1};
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Networks networks(shape.num_local_ranks, seed);
    check_all(run_threads(2, [&](const Bootstrap& bootstrap) {
      Buffer buffer(bootstrap, narrow(shape, 2));
      round_trip(buffer, shape, seed, -1, {});
      networks.pause(std::chrono::milliseconds(25));  // more than a rank waits until it looks who is gone
      round_trip(buffer, shape, seed + 1, -1, {});
      buffer.destroy();
    }));
  }
}

TEST_CASE("a lost credit ends in an error everywhere, and a reset mends it") {
  const Shape shape{4, {300, 300, 300, 300}, 64, 16, 6, 2};
  Networks networks(shape.num_local_ranks, 5, Fault::kLostCredits);
  check_all(run_threads(4, [&](const Bootstrap& bootstrap) {
    BufferOptions options = narrow(shape, 1);
    options.timeout_seconds = 2;
    Buffer buffer(bootstrap, options);
    std::string said;
    try {
      for (int step = 0; step < 4; ++step) round_trip(buffer, shape, static_cast<std::uint64_t>(step), -1, {});
    } catch (const TimeoutError& error) {
      said = error.what();
    }
    expect(said.find("waited") != std::string::npos, "a time-out, got '" + said + "'");
    networks.mend();
    buffer.reset();
    for (int step = 0; step < 2; ++step) round_trip(buffer, shape, static_cast<std::uint64_t>(step), -1, {});
  }));
}

// What the network breaks here is a data race as well, so not under a sanitizer that ends the program for that.
#if !defined(__SANITIZE_THREAD__)
TEST_CASE("signals that overtake their data are noticed") {
  const Shape shape{4, {200, 200, 200, 200}, 512, 16, 6, 2};
  Networks networks(shape.num_local_ranks, 9, Fault::kSignalsOvertakeData);
  const std::vector<std::string> errors = run_threads(4, [&](const Bootstrap& bootstrap) {
    BufferOptions options = narrow(shape, 4);
    options.timeout_seconds = 5;
    Buffer buffer(bootstrap, options);
    for (int step = 0; step < 3; ++step) round_trip(buffer, shape, static_cast<std::uint64_t>(step), -1, {});
  });
  CHECK_FALSE(errors.empty());
}
#endif
