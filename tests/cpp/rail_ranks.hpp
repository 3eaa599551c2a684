// Ranks as threads, grouped into nodes, that dispatch and combine on the rings of cpu/rail as docs/internode.md has it.
// Steps (X2, D5, ...) are that page's. What they share inside a node stands for NVLink.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/rail.hpp"
#include "random_network.hpp"

namespace deep_moe::test {

using layout::RailRegion;

enum class Fault { kNone, kSignalsOvertakeData, kForgedCredits, kLostCredits };

struct World {
  int num_nodes, num_local_ranks;
  int num_slots, chunk_rows;
  int row_words;  // of one row, u32
  std::uint64_t seed;
  std::vector<int> tokens;  // of each call; a rank has up to as many more as its number
  bool slow_rank = false;
  Fault fault = Fault::kNone;

  int num_ranks() const { return num_nodes * num_local_ranks; }
};

inline std::uint32_t hash(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(value >> 32);
}

// What is in one row, and where it goes: known to all, so that every result can be computed alone.
struct Routing {
  const World& world;
  std::uint64_t epoch;

  std::uint64_t key(int src, int token) const {
    return ((world.seed * 64 + epoch) * 1024 + static_cast<std::uint64_t>(src)) * 65536 +
           static_cast<std::uint64_t>(token);
  }
  int num_tokens(int src) const {
    const int tokens = world.tokens[epoch - 1];
    return tokens == 0 ? 0 : tokens + src;
  }
  bool goes_to(int src, int token, int dst) const {
    return hash(key(src, token) * 64 + static_cast<std::uint64_t>(dst)) % 3 == 0;
  }
  std::uint32_t word(int src, int token, int i) const {
    return hash(key(src, token) + static_cast<std::uint64_t>(i) * 7919);
  }
};

// What the ranks of one node share: NVLink, in the test's terms. One call's worth; words hold the epoch.
struct Mate {
  std::atomic<std::uint64_t> counts_word{0}, done_word{0}, input_word{0}, pulled_word{0};
  std::vector<int> relayed;             // [R][L] rows of each source for each rank of the node, from this mate's rail
  std::vector<std::uint32_t> received;  // [N_q][row]
  std::vector<std::uint32_t> input;     // of its combine
};

struct Shared {
  Shared(const World& world_)
      : world(world_), layout(layout_of(world_)), mates(static_cast<std::size_t>(world_.num_ranks())) {
    network.emplace(world.num_ranks(), layout.bytes(), world.seed, world.fault != Fault::kSignalsOvertakeData);
  }
  static layout::RailLayout layout_of(const World& world) {
    const auto row_bytes = static_cast<std::size_t>(world.row_words) * 4;
    // Exact room for chunk_rows rows, so that as many make a chunk.
    return layout::RailLayout(
        {world.num_nodes, world.num_slots,
         static_cast<std::size_t>(world.chunk_rows) * layout::RailRow(row_bytes, 0, 0, 0, world.num_local_ranks).stride,
         static_cast<std::size_t>(world.num_local_ranks + 1) * 4});
  }

  const World& world;
  layout::RailLayout layout;
  std::vector<Mate> mates;  // by rank
  std::optional<RandomNetwork> network;
  std::atomic<bool> failed{false};
};

class Rank {
 public:
  Rank(Shared& shared, int rank)
      : shared_(shared),
        world_(shared.world),
        rank_(rank),
        node_(rank / world_.num_local_ranks),
        local_(rank % world_.num_local_ranks),
        row_(static_cast<std::size_t>(world_.row_words) * 4, 0, 0, 0, world_.num_local_ranks),
        random_(world_.seed + static_cast<std::uint64_t>(rank)) {
    cpu::OneSided& port = shared.network->port(rank);
    if (world_.fault == Fault::kForgedCredits)
      faulty_ = std::make_unique<ForgedCredits>(port, shared.layout, node_, world_.num_local_ranks);
    if (world_.fault == Fault::kLostCredits) faulty_ = std::make_unique<LostCredits>(port);
    network_ = faulty_ ? faulty_.get() : &port;
    for (int node = 0; node < world_.num_nodes; ++node) {
      const cpu::RailPeer peer{node * world_.num_local_ranks + local_, node};
      out_.emplace_back(*network_, shared.layout, node_, peer);
      in_.emplace_back(*network_, shared.layout, node_, peer);
    }
  }

  void run() {
    for (epoch_ = 1; epoch_ <= world_.tokens.size(); ++epoch_) {
      const Routing routing{world_, epoch_};
      notify(routing);
      dispatch(routing);
      combine(routing);
    }
  }

 private:
  Mate& mate(int local) { return shared_.mates[static_cast<std::size_t>(node_ * world_.num_local_ranks + local)]; }
  Mate& mine() { return mate(local_); }
  int num_rows(int src, int local) const {
    return counts_[static_cast<std::size_t>(src * world_.num_local_ranks + local)];
  }

  // Until `condition`, or the deadline, or another rank has failed.
  template <typename F>
  void wait(const char* what, const F& condition) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(world_.fault == Fault::kNone ? 30 : 3);
    while (!condition()) {
      if (shared_.failed) throw std::runtime_error("another rank failed");
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error(std::string("waits for ") + what + " in call " + std::to_string(epoch_));
      if (world_.slow_rank && rank_ == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      std::this_thread::yield();
    }
  }
  void wait_for_mates(const char* what, std::atomic<std::uint64_t> Mate::* word) {
    for (int local = 0; local < world_.num_local_ranks; ++local)
      wait(what, [&] { return (mate(local).*word).load(std::memory_order_acquire) == epoch_; });
  }

  // X2 to X5: counts over the rails, relayed inside the node. Then every rank knows the rows of every source for each
  // rank of its node, and with them the final index of every row there.
  void notify(const Routing& routing) {
    const int L = world_.num_local_ranks;
    rows_out_.assign(static_cast<std::size_t>(world_.num_nodes), 0);
    rows_in_ = rows_out_;
    mine().relayed.assign(static_cast<std::size_t>(world_.num_ranks() * L), -1);
    const auto relay = [&](int src, const std::int32_t* counts) {
      std::copy(counts, counts + L, mine().relayed.begin() + static_cast<std::ptrdiff_t>(src) * L);
    };
    for (int node = 0; node < world_.num_nodes; ++node) {
      // Rows for each rank of the node; then rows for the node, each of which may go to several of its ranks.
      std::vector<std::int32_t> counts(static_cast<std::size_t>(L + 1), 0);
      for (int token = 0; token < routing.num_tokens(rank_); ++token) {
        bool goes = false;
        for (int local = 0; local < L; ++local) {
          if (!routing.goes_to(rank_, token, node * L + local)) continue;
          ++counts[static_cast<std::size_t>(local)];
          goes = true;
        }
        counts.back() += goes;
      }
      rows_out_[static_cast<std::size_t>(node)] = counts.back();
      if (node == node_) {
        relay(rank_, counts.data());
        continue;
      }
      const std::size_t out = shared_.layout.record(RailRegion::kNotifyOut, epoch_, node_, node);
      std::memcpy(network_->memory() + out, counts.data(), counts.size() * 4);
      network_->put_signal(node * L + local_, shared_.layout.record(RailRegion::kNotifyIn, epoch_, node, node_), out,
                           counts.size() * 4, shared_.layout.notify_word(epoch_, node, node_), epoch_);
    }
    for (int node = 0; node < world_.num_nodes; ++node) {
      if (node == node_) continue;
      wait("a peer's counts",
           [&] { return network_->test(shared_.layout.notify_word(epoch_, node_, node)) == epoch_; });
      std::vector<std::int32_t> counts(static_cast<std::size_t>(L + 1));
      std::memcpy(counts.data(), network_->memory() + shared_.layout.record(RailRegion::kNotifyIn, epoch_, node_, node),
                  counts.size() * 4);
      relay(node * L + local_, counts.data());
      rows_in_[static_cast<std::size_t>(node)] = counts.back();
    }
    // The place for the rows is known from the counts only; so the counts first, then the place.
    mine().counts_word.store(epoch_ * 2 - 1, std::memory_order_release);
    counts_.assign(mine().relayed.size(), 0);
    for (int local = 0; local < L; ++local) {
      wait("a mate's counts",
           [&] { return mate(local).counts_word.load(std::memory_order_acquire) >= epoch_ * 2 - 1; });
      for (int node = 0; node < world_.num_nodes; ++node) {
        const auto first = static_cast<std::ptrdiff_t>((node * L + local) * L);
        std::copy_n(mate(local).relayed.begin() + first, L, counts_.begin() + first);
      }
    }
    int total = 0;
    for (int src = 0; src < world_.num_ranks(); ++src) total += num_rows(src, local_);
    mine().received.assign(static_cast<std::size_t>(total * world_.row_words), 0);
    mine().counts_word.store(epoch_ * 2, std::memory_order_release);
    for (int local = 0; local < L; ++local)
      wait("a mate's place", [&] { return mate(local).counts_word.load(std::memory_order_acquire) >= epoch_ * 2; });
  }

  int base(int src, int local) const {
    int rows = 0;
    for (int lower = 0; lower < src; ++lower) rows += num_rows(lower, local);
    return rows;
  }
  void store(int local, int index, const std::uint32_t* row) {
    std::copy_n(row, world_.row_words,
                mate(local).received.begin() + static_cast<std::ptrdiff_t>(index) * world_.row_words);
  }
  void dispatch(const Routing& routing) {
    const int L = world_.num_local_ranks, N = world_.num_nodes, T = routing.num_tokens(rank_);
    const auto nodes = static_cast<std::size_t>(N);
    position_.assign(static_cast<std::size_t>(T) * nodes, -1);
    std::vector<int> next_position(nodes, 0), taken(nodes, 0), expected = rows_in_;
    std::vector<std::vector<int>> bases(nodes);
    std::vector<int> sent(static_cast<std::size_t>(world_.num_ranks()), 0);  // rows so far, by destination
    forward_map_.assign(nodes, {});
    for (int node = 0; node < N; ++node) {
      if (node == node_) continue;
      const auto n = static_cast<std::size_t>(node);
      const int peer = node * L + local_;
      out_[n].begin(rows_out_[n], row_.stride);
      in_[n].begin(rows_in_[n], row_.stride);
      for (int local = 0; local < L; ++local) bases[n].push_back(base(peer, local));
    }
    int token = 0, node_of_token = 0;
    // D2 to D4 for the next (token, node); false while its slot is not free.
    const auto send_next = [&] {
      if (token == T) return false;
      const auto n = static_cast<std::size_t>(node_of_token);
      std::vector<std::uint32_t> x(static_cast<std::size_t>(world_.row_words));
      for (int i = 0; i < world_.row_words; ++i) x[static_cast<std::size_t>(i)] = routing.word(rank_, token, i);
      std::vector<std::int32_t> positions(static_cast<std::size_t>(L), -1);
      bool goes = false;
      for (int local = 0; local < L; ++local) {
        if (!routing.goes_to(rank_, token, node_of_token * L + local)) continue;
        goes = true;
        positions[static_cast<std::size_t>(local)] = sent[static_cast<std::size_t>(node_of_token * L + local)];
      }
      if (goes && node_of_token != node_) {
        char* slot = out_[n].row(next_position[n]);
        if (slot == nullptr) return false;
        std::memcpy(slot, x.data(), x.size() * 4);
        std::memcpy(slot + row_.positions, positions.data(), positions.size() * 4);
        position_[static_cast<std::size_t>(token) * nodes + n] = next_position[n];
        out_[n].filled(next_position[n]++);
      }
      for (int local = 0; goes && local < L; ++local) {
        if (positions[static_cast<std::size_t>(local)] < 0) continue;
        if (node_of_token == node_)
          store(local, base(rank_, local) + positions[static_cast<std::size_t>(local)], x.data());
        ++sent[static_cast<std::size_t>(node_of_token * L + local)];
      }
      node_of_token = (node_of_token + 1) % N;
      token += node_of_token == 0;
      return true;
    };
    // D5 to D7 for the next row of a ring, if it is there.
    const auto forward_next = [&](int node) {
      const auto n = static_cast<std::size_t>(node);
      if (taken[n] == expected[n]) return;
      const char* row = in_[n].row(taken[n]);
      if (row == nullptr) return;
      std::vector<std::uint32_t> x(static_cast<std::size_t>(world_.row_words));
      std::vector<std::int32_t> positions(static_cast<std::size_t>(L));
      std::memcpy(x.data(), row, x.size() * 4);
      std::memcpy(positions.data(), row + row_.positions, positions.size() * 4);
      in_[n].taken(taken[n]++);
      for (int local = 0; local < L; ++local) {
        const int position = positions[static_cast<std::size_t>(local)];
        const int index = position < 0 ? -1 : bases[n][static_cast<std::size_t>(local)] + position;
        if (position >= num_rows(node * L + local_, local)) throw std::runtime_error("a row with a wrong position");
        if (position >= 0) store(local, index, x.data());
        forward_map_[n].push_back(index);
      }
    };
    wait("chunks or credits of dispatch", [&] {
      for (int burst = 0; burst < 4; ++burst)
        if (!send_next()) break;
      for (int node = 0; node < N; ++node)
        if (node != node_) forward_next(node);
      return token == T && taken == expected;
    });
    mine().done_word.store(epoch_, std::memory_order_release);  // D8
    wait_for_mates("rows done", &Mate::done_word);
    check_received(routing);
  }

  void check_received(const Routing& routing) {
    std::size_t at = 0;
    for (int src = 0; src < world_.num_ranks(); ++src) {
      for (int token = 0; token < routing.num_tokens(src); ++token) {
        if (!routing.goes_to(src, token, rank_)) continue;
        for (int i = 0; i < world_.row_words; ++i, ++at)
          if (at >= mine().received.size() || mine().received[at] != routing.word(src, token, i))
            throw std::runtime_error("wrong row: source " + std::to_string(src) + ", token " + std::to_string(token));
      }
    }
    if (at != mine().received.size()) throw std::runtime_error("rows that nobody sent");
  }

  // Each rank returns what it received, each word times its rank + 1; sums are sums of u32.
  void combine(const Routing& routing) {
    const int L = world_.num_local_ranks, N = world_.num_nodes, T = routing.num_tokens(rank_);
    const auto nodes = static_cast<std::size_t>(N);
    const auto words = static_cast<std::size_t>(world_.row_words);
    mine().input = mine().received;
    for (std::uint32_t& word : mine().input) word *= static_cast<std::uint32_t>(rank_ + 1);
    mine().input_word.store(epoch_, std::memory_order_release);
    wait_for_mates("inputs", &Mate::input_word);
    const auto pull = [&](int local, int index, std::vector<std::uint32_t>& sum) {
      const std::uint32_t* row = mate(local).input.data() + static_cast<std::size_t>(index) * words;
      for (std::size_t i = 0; i < words; ++i) sum[i] += row[i];
    };
    std::vector<int> collected(nodes, 0), to_collect(nodes, 0), to_own(nodes, 0);
    for (std::size_t n = 0; n < nodes; ++n) {
      if (static_cast<int>(n) == node_) continue;
      to_collect[n] = static_cast<int>(forward_map_[n].size()) / L;
      for (int token = 0; token < T; ++token) to_own[n] += position_[static_cast<std::size_t>(token) * nodes + n] >= 0;
      out_[n].begin(to_collect[n], row_.stride);
      in_[n].begin(to_own[n], row_.stride);
    }
    // C2 and C3 for the next row of a ring that has a free slot.
    const auto collect_next = [&](std::size_t n) {
      if (collected[n] == to_collect[n]) return;
      char* slot = out_[n].row(collected[n]);
      if (slot == nullptr) return;
      std::vector<std::uint32_t> sum(words, 0);
      for (int local = 0; local < L; ++local)
        if (const int index = forward_map_[n][static_cast<std::size_t>(collected[n] * L + local)]; index >= 0)
          pull(local, index, sum);
      std::memcpy(slot, sum.data(), words * 4);
      out_[n].filled(collected[n]++);
    };
    int token = 0;
    std::vector<int> own_index(static_cast<std::size_t>(L));
    for (int local = 0; local < L; ++local) own_index[static_cast<std::size_t>(local)] = base(rank_, local);
    // C4 to C6 for the next token, if all of its rows are there.
    const auto own_next = [&] {
      if (token == T) return false;
      std::vector<std::uint32_t> total(words, 0);
      const int* position = position_.data() + static_cast<std::size_t>(token) * nodes;
      for (std::size_t n = 0; n < nodes; ++n)
        if (position[n] >= 0 && in_[n].row(position[n]) == nullptr) return false;
      for (std::size_t n = 0; n < nodes; ++n) {
        if (position[n] < 0) continue;
        std::vector<std::uint32_t> part(words);
        std::memcpy(part.data(), in_[n].row(position[n]), words * 4);
        in_[n].taken(position[n]);
        for (std::size_t i = 0; i < words; ++i) total[i] += part[i];
      }
      for (int local = 0; local < L; ++local)
        if (routing.goes_to(rank_, token, node_ * L + local))
          pull(local, own_index[static_cast<std::size_t>(local)]++, total);
      std::uint32_t factor = 0;
      for (int dst = 0; dst < world_.num_ranks(); ++dst)
        if (routing.goes_to(rank_, token, dst)) factor += static_cast<std::uint32_t>(dst + 1);
      for (int i = 0; i < world_.row_words; ++i)
        if (total[static_cast<std::size_t>(i)] != factor * routing.word(rank_, token, i))
          throw std::runtime_error("wrong sum: token " + std::to_string(token));
      ++token;
      return true;
    };
    wait("chunks or credits of combine", [&] {
      for (std::size_t n = 0; n < nodes; ++n) collect_next(n);
      for (int burst = 0; burst < 4; ++burst)
        if (!own_next()) break;
      return token == T && collected == to_collect;
    });
    mine().pulled_word.store(epoch_, std::memory_order_release);  // C7
    wait_for_mates("pull done", &Mate::pulled_word);
  }

  Shared& shared_;
  const World& world_;
  int rank_, node_, local_;
  layout::RailRow row_;
  std::mt19937_64 random_;
  std::unique_ptr<cpu::OneSided> faulty_;
  cpu::OneSided* network_ = nullptr;
  std::vector<cpu::RailSender> out_;   // by node
  std::vector<cpu::RailReceiver> in_;  // by node
  std::uint64_t epoch_ = 0;
  std::vector<int> counts_;                    // [R][L]
  std::vector<int> rows_out_, rows_in_;        // [N] of this dispatch, to and from this rank's peers
  std::vector<int> position_;                  // [T][N]
  std::vector<std::vector<int>> forward_map_;  // by node of the source: [rows][L]
};

}  // namespace deep_moe::test
