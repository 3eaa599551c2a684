// What the hosts of a Buffer's ranks say to each other after construction, over the control channel: exchanges, the
// agreement of a reset, departure, and that a rank is gone. Ranks may be on several machines.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/control_channel.hpp"

namespace deep_moe {

// Calls of one rank come from one thread at a time, but for take_messages() and what only looks.
class RankTalk {
 public:
  enum Kind : std::uint32_t {
    kSaid = 1,      // id: round of exchange(); value, text: what I say in it
    kSaidInCall,    // id: of exchange_in_call(); value, text: what I say in it
    kResetTo,       // value: generation; id: round; text: epoch; none of my kernels runs
    kResetReached,  // value: generation
    kDeparted,      // value 1: none of my kernels runs; text: what has failed me
    kOther = 16,    // from here on: the owner's
  };
  struct Options {
    int rank = 0, num_ranks = 1;
    double timeout_seconds = 100.0;         // of every wait
    std::function<void()> interrupt_check;  // about every 50 ms of a wait; may throw
    std::vector<bool> same_process;         // by rank: no process whose end could be noticed
    // Under the lock: messages of the owner's kinds; a rank of which no word comes any more, and `dead` where it has
    // perhaps left calls undone (its process has ended, or its Buffer had failed).
    std::function<void(int peer, ControlChannel::SegmentMessage& message)> other;
    std::function<void(int peer, bool dead)> lost;
  };
  struct Said {
    std::uint64_t value = 0;
    std::string text;
  };

  // The channel is connected. `mutex` guards what messages change, here and at the owner.
  RankTalk(ControlChannel& channel, std::recursive_mutex& mutex, Options options);

  void send(int peer, std::uint32_t kind, int id, std::uint64_t value, const std::string& text);  // unless it is gone
  void send_all(std::uint32_t kind, int id, std::uint64_t value, const std::string& text);
  bool closed(int peer) const { return peers_[static_cast<std::size_t>(peer)].closed; }
  // Takes what has come, without a wait.
  void take_messages();

  // Collective: what every rank says, by rank.
  std::vector<Said> exchange(const char* phase, std::uint64_t value, const std::string& text);
  // The same inside a call that perhaps not all ranks make: what belongs together has the same `id`, which grows from
  // one exchange to the next, until a reset (behind the largest int comes the smallest). `look(peer)` is called about
  // every 20 ms for a peer that is missing, and may throw. Ranks of `*masked` take no part; with `mask_silent` those
  // that do not come are added to it.
  std::vector<Said> exchange_in_call(const char* phase, int id, std::uint64_t value, const std::string& text,
                                     const std::function<void(int peer)>& look, std::uint64_t* masked,
                                     bool mask_silent);

  // A reset: every rank says where it wants to go, all go to the largest, and say that they are there. A rank that has
  // given up in between may begin again: what it has said stands.
  struct Reset {
    std::uint64_t generation = 0, epoch = 0;
    int round = 0;
  };
  std::uint64_t generation() const { return generation_; }  // resets done
  bool wants_reset() const { return reset_to_.generation > generation_; }
  void want_reset(std::uint64_t epoch);
  Reset agree_on_reset();
  void reset_reached(std::uint64_t generation);

  // poll_until with these rules; also throws PeerLostError when the blamed peer has left.
  void wait(const char* phase, const std::function<int()>& first_missing,
            const std::function<std::string(int peer)>& describe);
  // True once the peer has left or its process has ended.
  bool peer_gone(int peer, std::string* how);
  // Local: tells the peers, and closes the channel. `idle`: nothing of this rank's runs any more.
  void depart(bool idle, const std::string& failure) noexcept;

 private:
  struct Peer {
    bool departed = false, closed = false;
    std::string failure;                            // of one that has departed
    std::deque<std::pair<int, Said>> said;          // rounds of exchange() and what it says in them
    std::deque<std::pair<int, Said>> said_in_call;  // the same by id
    Reset reset_to;                                 // where it wants to go
    std::uint64_t reset_reached = 0;                // the generation that it is in
  };

  void take_message(int peer, ControlChannel::SegmentMessage& message);
  // A peer that is not here yet, -1 where all are; one that has left before others, for then no wait helps. Under the
  // lock.
  int missing(const std::function<bool(Peer& peer)>& is_here);

  ControlChannel& channel_;
  std::recursive_mutex& mutex_;
  const Options options_;
  const int rank_, num_ranks_;
  std::vector<Peer> peers_;
  int round_ = 0;                 // of exchange()
  std::uint64_t generation_ = 0;  // resets done
  Reset reset_to_;                // where this rank wants to go
};

}  // namespace deep_moe
