// A network between threads that delays what it is given, tears it into pieces and delivers in random order: the least
// that the protocol between nodes may count on. And ports that keep less than that, to see that it is noticed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/one_sided.hpp"
#include "layout/rail.hpp"

namespace deep_moe::test {

class RandomNetwork {
 public:
  // `delivered(rank)` is called for each signal that has arrived, and must not use the network.
  RandomNetwork(int num_ranks, std::size_t bytes, std::uint64_t seed, bool signals_behind_data = true,
                std::function<void(int rank)> delivered = {})
      : signals_behind_data_(signals_behind_data), delivered_(std::move(delivered)), random_(seed) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      memory_.emplace_back(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
      std::memset(memory_.back().get(), 0, bytes);
      ports_.push_back(std::make_unique<Port>(*this, rank));
    }
    carrier_ = std::thread([this] { carry(); });
  }
  ~RandomNetwork() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    carrier_.join();
  }
  RandomNetwork(const RandomNetwork&) = delete;
  RandomNetwork& operator=(const RandomNetwork&) = delete;

  cpu::OneSided& port(int rank) { return *ports_[static_cast<std::size_t>(rank)]; }
  // Nothing is delivered for so long after every few parts.
  void pause(std::chrono::milliseconds pause) { pause_ = pause; }
  // Operations that were complete before an older one of the same rank. Call it when all ranks have joined.
  std::int64_t num_overtakings() {
    const std::lock_guard lock(mutex_);
    return num_overtakings_;
  }

 private:
  using Piece = std::pair<std::size_t, std::size_t>;  // begin, end

  struct Operation {
    int issuer = 0;
    std::uint64_t number = 0;
    std::uint64_t due = 0;  // no part of it is delivered before this tick
    char* to = nullptr;
    const char* from = nullptr;
    std::vector<Piece> pieces;
    int receiver = 0;
    std::uint64_t* word = nullptr;  // null once it has been set
    std::uint64_t value = 0;
  };

  struct Port final : cpu::OneSided {
    Port(RandomNetwork& network_, int rank_) : network(network_), rank(rank_) {}
    char* memory() override { return network.at(rank, 0); }
    void put_signal(int peer, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal,
                    std::uint64_t value) override {
      network.issue(rank, peer, network.at(peer, to), memory() + from, bytes, network.at(peer, signal), value);
    }
    void signal(int peer, std::size_t signal, std::uint64_t value) override {
      network.issue(rank, peer, nullptr, nullptr, 0, network.at(peer, signal), value);
    }
    std::uint64_t test(std::size_t signal) override {
      return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(memory() + signal)).load(std::memory_order_acquire);
    }
    void quiet() override { network.quiet(rank); }
    RandomNetwork& network;
    int rank;
  };

  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };

  char* at(int rank, std::size_t offset) { return memory_[static_cast<std::size_t>(rank)].get() + offset; }

  void quiet(int issuer) {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] {
      return std::none_of(in_flight_.begin(), in_flight_.end(),
                          [&](const Operation& operation) { return operation.issuer == issuer; });
    });
  }

  void issue(int issuer, int receiver, char* to, const char* from, std::size_t bytes, char* word, std::uint64_t value) {
    {
      const std::lock_guard lock(mutex_);
      Operation operation{issuer, ++issued_, tick_ + random_() % 64, to, from, {}, receiver, nullptr, value};
      operation.word = reinterpret_cast<std::uint64_t*>(word);
      for (std::size_t begin = 0; begin < bytes;) {
        const std::size_t end = std::min(bytes, begin + 8 * (1 + random_() % 64));
        operation.pieces.emplace_back(begin, end);
        begin = end;
      }
      std::shuffle(operation.pieces.begin(), operation.pieces.end(), random_);
      in_flight_.push_back(std::move(operation));
    }
    changed_.notify_one();
  }

  void carry() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !in_flight_.empty(); });
      if (stop_) return;
      for (int steps = 0; steps < 16 && !in_flight_.empty(); ++steps) deliver_a_part();
      lock.unlock();
      std::this_thread::sleep_for(pause_.load());
      std::this_thread::yield();
      lock.lock();
    }
  }

  void deliver_a_part() {
    ++tick_;
    const std::size_t chosen = random_() % in_flight_.size();
    Operation& operation = in_flight_[chosen];
    if (operation.due > tick_) return;
    const bool may_signal = operation.word != nullptr && (operation.pieces.empty() || !signals_behind_data_);
    if (may_signal && (operation.pieces.empty() || random_() % 2 == 0)) {
      std::atomic_ref(*operation.word).store(operation.value, std::memory_order_release);
      operation.word = nullptr;
      if (delivered_) delivered_(operation.receiver);
    } else if (!operation.pieces.empty()) {
      const auto [begin, end] = operation.pieces.back();
      std::memcpy(operation.to + begin, operation.from + begin, end - begin);
      operation.pieces.pop_back();
    }
    if (operation.word != nullptr || !operation.pieces.empty()) return;
    for (const Operation& other : in_flight_)
      num_overtakings_ += other.issuer == operation.issuer && other.number < operation.number;
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(chosen));
    arrived_.notify_all();
  }

  const bool signals_behind_data_;
  const std::function<void(int)> delivered_;
  std::vector<std::unique_ptr<char, Free>> memory_;
  std::vector<std::unique_ptr<Port>> ports_;
  std::mutex mutex_;
  std::condition_variable changed_, arrived_;
  std::mt19937_64 random_;
  std::vector<Operation> in_flight_;
  std::uint64_t issued_ = 0;
  std::uint64_t tick_ = 0;
  std::int64_t num_overtakings_ = 0;
  bool stop_ = false;
  std::atomic<std::chrono::milliseconds> pause_{};
  std::thread carrier_;
};

// A port whose sender sees a credit for every chunk that it has sent.
class ForgedCredits : public cpu::OneSided {
 public:
  ForgedCredits(cpu::OneSided& port, const layout::RailLayout& layout, int my_node, int num_local_ranks)
      : port_(port), layout_(layout), my_node_(my_node), num_local_ranks_(num_local_ranks) {}
  char* memory() override { return port_.memory(); }
  void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal,
                  std::uint64_t value) override {
    const int node = rank / num_local_ranks_;
    for (int slot = 0; slot < layout_.shape().num_slots; ++slot) {
      if (signal == layout_.word(layout::RailRegion::kChunkArrived, node, my_node_, slot))
        credits_[layout_.word(layout::RailRegion::kChunkCredit, my_node_, node, slot)] = value;
    }
    port_.put_signal(rank, to, from, bytes, signal, value);
  }
  void signal(int rank, std::size_t signal, std::uint64_t value) override { port_.signal(rank, signal, value); }
  void quiet() override { port_.quiet(); }
  std::uint64_t test(std::size_t signal) override {
    const auto forged = credits_.find(signal);
    return forged != credits_.end() ? forged->second : port_.test(signal);
  }

 private:
  cpu::OneSided& port_;
  layout::RailLayout layout_;
  int my_node_;
  int num_local_ranks_;
  std::map<std::size_t, std::uint64_t> credits_;
};

// A port that loses one signal in twenty: of a rail, credits are the only signals without data.
class LostCredits : public cpu::OneSided {
 public:
  explicit LostCredits(cpu::OneSided& port) : port_(port) {}
  char* memory() override { return port_.memory(); }
  void put_signal(int rank, std::size_t to, std::size_t from, std::size_t bytes, std::size_t signal,
                  std::uint64_t value) override {
    port_.put_signal(rank, to, from, bytes, signal, value);
  }
  void signal(int rank, std::size_t signal, std::uint64_t value) override {
    if (++count_ % 20 != 0) port_.signal(rank, signal, value);
  }
  std::uint64_t test(std::size_t signal) override { return port_.test(signal); }
  void quiet() override { port_.quiet(); }

 private:
  cpu::OneSided& port_;
  std::atomic<int> count_{0};
};

}  // namespace deep_moe::test
