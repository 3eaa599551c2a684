// What hosts of several machines say to each other. Ranks are processes, or threads, of this machine, which speak TCP
// where the test says that they are on different ones.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <random>

#include <deep_moe/error.hpp>

#include "runtime/control_channel.hpp"
#include "runtime/poll.hpp"
#include "runtime/process.hpp"
#include "runtime/rank_talk.hpp"
#include "runtime/topology.hpp"
#include "support.hpp"

using namespace deep_moe;
using namespace deep_moe::test;

namespace {

struct Setting {
  const char* name;
  explicit Setting(const char* name_, const char* value) : name(name_) { ::setenv(name, value, 1); }
  ~Setting() { ::unsetenv(name); }
};

// One rank, connected to all others.
struct Rank {
  using Change = std::function<void(std::vector<ControlChannel::Route>*)>;

  Rank(const Bootstrap& bootstrap, const std::string& hosts, double timeout = 10.0, const Change& change = {})
      : rank(bootstrap.rank), channel(bootstrap.rank, bootstrap.size) {
    struct Hello {
      char name[96];
      Endpoint endpoint;
      std::uint64_t uid, process;
    } mine{};
    std::memcpy(mine.name, channel.name().c_str(), channel.name().size() + 1);
    mine.endpoint = channel.listen_to_machines();
    mine.uid = random_uid();
    mine.process = process_uid();
    std::vector<Hello> all(static_cast<std::size_t>(bootstrap.size));
    bootstrap.all_gather(&mine, all.data(), sizeof(Hello));
    std::uint64_t group_uid = 0;
    std::vector<ControlChannel::Route> routes;
    RankTalk::Options options;
    for (int peer = 0; peer < bootstrap.size; ++peer) {
      const Hello& theirs = all[static_cast<std::size_t>(peer)];
      group_uid = group_uid * 31 + theirs.uid;
      const bool remote = hosts[static_cast<std::size_t>(peer)] != hosts[static_cast<std::size_t>(rank)];
      // What is of no use on the way is not said.
      routes.push_back({true, remote, remote ? "" : theirs.name, remote ? theirs.endpoint : Endpoint{}});
      options.same_process.push_back(theirs.process == mine.process);
    }
    if (change) change(&routes);
    channel.connect(routes, group_uid, timeout);
    options.rank = rank;
    options.num_ranks = bootstrap.size;
    options.timeout_seconds = timeout;
    options.other = [this](int peer, ControlChannel::SegmentMessage& message) {
      other.emplace_back(peer, message);
      if (on_other) on_other();
    };
    options.lost = [this](int peer, bool dead) { lost.emplace_back(peer, dead); };
    talk = std::make_unique<RankTalk>(channel, mutex, std::move(options));
  }

  const int rank;
  std::recursive_mutex mutex;
  ControlChannel channel;
  std::unique_ptr<RankTalk> talk;
  std::vector<std::pair<int, ControlChannel::SegmentMessage>> other;
  std::vector<std::pair<int, bool>> lost;
  std::function<void()> on_other;
};

std::string text_of(int rank, int round) {
  std::mt19937 random(static_cast<unsigned>(1000 * rank + round));
  std::string text(random() % (ControlChannel::kMaxText + 1), ' ');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

void exchange_rounds(Rank& me, int num_ranks, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t value = std::uint64_t{1} << 40 | static_cast<std::uint64_t>(100 * me.rank + round);
    const auto all = me.talk->exchange("rounds", value, text_of(me.rank, round));
    for (int peer = 0; peer < num_ranks; ++peer) {
      const RankTalk::Said& said = all[static_cast<std::size_t>(peer)];
      expect(said.value == (std::uint64_t{1} << 40 | static_cast<std::uint64_t>(100 * peer + round)) &&
                 said.text == text_of(peer, round),
             "what rank " + std::to_string(peer) + " says in round " + std::to_string(round));
    }
  }
}

// A wait for rank 1 that only its departure, or its end, ends.
void wait_for_rank_1_to_leave(Rank& me) {
  me.talk->wait("the end", [] { return 1; }, [](int) { return std::string(); });
}

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

int bound_to(const char* address, std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  ::inet_pton(AF_INET, address, &to.sin_addr);
  expect(::bind(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 && ::listen(fd, 16) == 0, "a listener");
  return fd;
}

// Between a rank and the one that connects to it: passes on bytes in small pieces, at odd times, and all that it has
// taken before it ends.
class Dribble {
 public:
  explicit Dribble(Endpoint* endpoint) : to_(*endpoint), listen_fd_(listen_tcp({"127.0.0.1"}, 16, endpoint)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Dribble() {
    stop_ = true;
    thread_.join();
    ::close(listen_fd_);
  }

 private:
  void run() {
    std::mt19937 random(7);
    while (!stop_) {
      pollfd entry{listen_fd_, POLLIN, 0};
      if (::poll(&entry, 1, 20) <= 0) continue;
      const int ends[2] = {::accept(listen_fd_, nullptr, nullptr), connect_tcp("127.0.0.1", to_.port, 1000)};
      for (bool open = true; open;) {
        pollfd both[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
        if (::poll(both, 2, 20) <= 0) continue;
        for (int from = 0; from < 2 && open; ++from) {
          if (both[from].revents == 0) continue;
          char bytes[700];
          const ssize_t got = ::recv(ends[from], bytes, 1 + random() % sizeof(bytes), 0);
          open = got > 0 && send_whole(ends[1 - from], bytes, static_cast<std::size_t>(got));
          if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
        }
      }
      for (const int fd : ends) ::close(fd);
    }
  }

  const Endpoint to_;
  const int listen_fd_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

TEST_CASE("ranks of several machines exchange what they say, whichever is where") {
  for (const std::string hosts : {"ab", "aabb", "abab", "abcd", "abca", "aabbccdd"}) {
    for (const Form form : {Form::kProcesses, Form::kThreads}) {
      CAPTURE(hosts);
      const int ranks = static_cast<int>(hosts.size());
      check_all(run_ranks(form, ranks, [&](const Bootstrap& bootstrap) {
        Rank me(bootstrap, hosts);
        for (int peer = 0; peer < ranks; ++peer)
          expect(me.channel.is_remote(peer) ==
                     (hosts[static_cast<std::size_t>(peer)] != hosts[static_cast<std::size_t>(me.rank)]),
                 "TCP leads to other machines alone");
        expect(!me.channel.interface_name().empty(), "an interface leads there");
        exchange_rounds(me, ranks, 60);
        me.talk->depart(true, {});
      }));
    }
  }
}

TEST_CASE("messages come whole and in order, however the network cuts them") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    std::unique_ptr<Dribble> dribble;
    Rank me(bootstrap, "ab", 20.0, [&](std::vector<ControlChannel::Route>* routes) {
      if (bootstrap.rank == 1) dribble = std::make_unique<Dribble>(&(*routes)[0].endpoint);
    });
    constexpr int kMessages = 200;
    for (int i = 0; i < kMessages; ++i)
      me.talk->send(1 - me.rank, RankTalk::kOther + static_cast<unsigned>(i), i, std::uint64_t{1} << i % 64,
                    text_of(me.rank, i));
    exchange_rounds(me, 2, 20);
    expect(me.other.size() == kMessages, "all messages have come");
    for (int i = 0; i < kMessages; ++i) {
      const auto& [peer, message] = me.other[static_cast<std::size_t>(i)];
      expect(peer == 1 - me.rank && message.id == i && message.bytes == std::uint64_t{1} << i % 64 &&
                 message.kind == RankTalk::kOther + static_cast<unsigned>(i) && message.text == text_of(peer, i),
             "message " + std::to_string(i));
    }
    me.talk->depart(true, {});
  }));
}

TEST_CASE("another thread may take the messages meanwhile") {
  for (const Form form : {Form::kProcesses, Form::kThreads}) {
    check_all(run_ranks(form, 4, [](const Bootstrap& bootstrap) {
      Rank me(bootstrap, "aabb");
      std::atomic<bool> stop{false};
      std::thread attendant([&] {
        while (!stop) {
          if (me.channel.readable()) me.talk->take_messages();
          std::this_thread::yield();
        }
      });
      for (int i = 0; i < 40; ++i) me.talk->send_all(RankTalk::kOther, i, 1, "for the owner");
      exchange_rounds(me, 4, 60);
      stop = true;
      attendant.join();
      expect(me.other.size() == 3 * 40, "each message once");
      std::vector<int> next(4, 0);
      for (const auto& [peer, message] : me.other)
        expect(message.id == next[static_cast<std::size_t>(peer)]++, "in the order in which it was sent");
      me.talk->depart(true, {});
    }));
  }
}

TEST_CASE("no descriptor travels between machines") {
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "ab");
    expect_throw<Error>([&] { me.channel.send_segment(1 - me.rank, {.id = 1, .bytes = 1, .fd = 0, .kind = 99}); },
                        "between machines");
    exchange_rounds(me, 2, 2);
  }));
}

TEST_CASE("addresses that lead nowhere, or to somebody else, are passed over") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    int stranger = -1;
    Rank me(bootstrap, "ab", 20.0, [&](std::vector<ControlChannel::Route>* routes) {
      if (bootstrap.rank != 1) return;
      Endpoint& endpoint = (*routes)[0].endpoint;
      stranger = bound_to("127.0.0.2", endpoint.port);  // takes the connection, and says nothing
      std::strcpy(endpoint.addresses, "127.0.0.3 127.0.0.2 127.0.0.1");
    });
    exchange_rounds(me, 2, 3);
    if (stranger >= 0) ::close(stranger);
  }));
}

TEST_CASE("strangers are not let in") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    std::vector<int> strangers;
    Rank me(bootstrap, "ab", 20.0, [&](std::vector<ControlChannel::Route>* routes) {
      if (bootstrap.rank != 1) return;
      const auto make_noise = [&](std::size_t bytes) {
        strangers.push_back(connect_tcp("127.0.0.1", (*routes)[0].endpoint.port, 1000));
        expect(strangers.back() >= 0, "it listens");
        const std::string noise(bytes, 'x');
        send_whole(strangers.back(), noise.data(), noise.size());
      };
      for (const std::size_t bytes : {24, 4000}) make_noise(bytes);
      ControlChannel of_another_group(1, 2);
      expect_throw<Error>([&] { of_another_group.connect(*routes, 42, 0.5); }, "cannot reach rank 0");
      // They hold rank 0 up for so long that rank 1 gives up its first connection, which is then taken in vain.
      for (const std::size_t bytes : {0, 5, 0}) make_noise(bytes);
    });
    exchange_rounds(me, 2, 3);
    for (const int fd : strangers) {
      char byte;
      expect(::recv(fd, &byte, 1, 0) <= 0, "a stranger hears nothing");
      ::close(fd);
    }
  }));
}

TEST_CASE("a machine that cannot be reached is named, with what to set") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    const auto wrong = [](std::vector<ControlChannel::Route>* routes) {
      std::strcpy((*routes)[0].endpoint.addresses, "127.0.0.9");  // nobody listens there
    };
    if (bootstrap.rank == 1) {
      expect_throw<Error>([&] { Rank(bootstrap, "ab", 0.5, wrong); },
                          "rank 1 cannot reach rank 0, which is on another machine, over TCP at 127.0.0.9");
    } else {
      expect_throw<TimeoutError>([&] { Rank(bootstrap, "ab", 0.8); }, "waited for rank 1 to connect");
    }
  }));
}

TEST_CASE("who takes the connection and says nothing is told from a stranger that answers") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    for (const bool answers : {false, true}) {
      int stranger = -1;
      const auto wrong = [&](std::vector<ControlChannel::Route>* routes) {
        stranger = bound_to("127.0.0.2", (*routes)[0].endpoint.port);
        std::strcpy((*routes)[0].endpoint.addresses, "127.0.0.2");
      };
      if (bootstrap.rank == 0) {
        expect_throw<TimeoutError>([&] { Rank(bootstrap, "ab", 1.0); }, "waited for rank 1 to connect");
        continue;
      }
      std::thread other;
      expect_throw<Error>(
          [&] {
            Rank(bootstrap, "ab", 1.0, [&](std::vector<ControlChannel::Route>* routes) {
              wrong(routes);
              if (!answers) return;
              other = std::thread([stranger] {
                for (int fd; (fd = ::accept(stranger, nullptr, nullptr)) >= 0; ::close(fd))
                  send_whole(fd, std::string(64, 'x').data(), 64);
              });
            });
          },
          answers ? "somebody else answers" : "no answer came");
      ::shutdown(stranger, SHUT_RDWR);  // ends the accept
      if (other.joinable()) other.join();
      ::close(stranger);
    }
  }));
}

TEST_CASE("a rank that has given up is not knocked at for ever") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  check_all(run_processes(2, [](const Bootstrap& bootstrap) {
    std::vector<ControlChannel::Route> routes(2);
    ControlChannel channel(bootstrap.rank, 2);
    Endpoint mine = channel.listen_to_machines(), all[2];
    bootstrap.all_gather(&mine, all, sizeof(mine));
    if (bootstrap.rank == 0) {
      pause_ms(500);  // rank 1 is connected, and waits for an answer
      return channel.close();
    }
    routes[0] = {true, true, "", all[0]};
    const double seconds = seconds_of(
        [&] { expect_throw<Error>([&] { channel.connect(routes, 1, 60.0); }, "cannot reach rank 0, which is on"); });
    expect(seconds < 30.0, "long before the deadline, after " + std::to_string(seconds) + " s");
  }));
}

TEST_CASE("a rank that cannot take connections says why") {
  const Setting loopback("DEEP_MOE_SOCKET_IFNAME", "lo");
  for (const std::string hosts : {"aa", "ab"}) {
    check_all(run_processes(2, [&](const Bootstrap& bootstrap) {
      const auto no_more_files = [](std::vector<ControlChannel::Route>*) {
        const int next = ::dup(0);
        ::close(next);
        rlimit limit;
        expect(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit of descriptors");
        limit.rlim_cur = static_cast<rlim_t>(next);
        expect(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "a limit of descriptors");
      };
      if (bootstrap.rank == 0) {
        expect_throw<Error>([&] { Rank(bootstrap, hosts, 20.0, no_more_files); },
                            "rank 0 cannot take the connection of another rank: Too many open files");
      } else if (hosts == "ab") {
        expect_throw<Error>([&] { Rank(bootstrap, hosts, 1.0); }, "cannot reach rank 0");
      } else {
        try {
          Rank(bootstrap, hosts, 20.0);
        } catch (const Error& error) {  // rank 0 has left before the first word to it
          const std::string text = error.what();
          expect(text.find("cannot reach rank 0 over a local socket") != std::string::npos, text);
        }
      }
    }));
  }
}

TEST_CASE("interfaces that are not there are named") {
  const Setting wrong("DEEP_MOE_SOCKET_IFNAME", "lo,no-such-interface");
  ControlChannel channel(0, 2);
  const std::string text =
      expect_throw<ArgumentError>([&] { channel.listen_to_machines(); }, "DEEP_MOE_SOCKET_IFNAME: got 'no-such-");
  CHECK(text.find(" lo") != std::string::npos);
}

TEST_CASE("the end of a process on another machine is noticed") {
  check_all(run_processes(4, [](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "aabb", 20.0);
    exchange_rounds(me, 4, 3);
    if (me.rank == 2) ::_exit(0);
    const double seconds = seconds_of([&] {
      const std::string text =
          expect_throw<PeerLostError>([&] { me.talk->exchange("after", 0, ""); }, "rank 2 has ended");
      expect((text.find("its machine cannot be reached") != std::string::npos) == (me.rank < 2), text);
    });
    expect(seconds < 5.0, "at once");
    expect(std::count(me.lost.begin(), me.lost.end(), std::pair(2, true)) == 1, "the owner is told, once");
  }));
}

TEST_CASE("who has destroyed its Buffer says why, also to other machines") {
  check_all(run_processes(3, [](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "abb", 20.0);
    exchange_rounds(me, 3, 2);
    if (me.rank == 0) return me.talk->depart(true, "it had enough");
    expect_throw<PeerLostError>([&] { me.talk->exchange("after", 0, ""); },
                                "rank 0 has destroyed its Buffer, which had failed (it had enough), while");
    expect(std::count(me.lost.begin(), me.lost.end(), std::pair(0, true)) == 1, "idle: kernels are told");
    if (me.rank == 1) return me.talk->depart(true, {});
    expect_throw<PeerLostError>([&] { wait_for_rank_1_to_leave(me); }, "rank 1 has destroyed its Buffer while");
    expect(std::count(me.lost.begin(), me.lost.end(), std::pair(1, false)) == 1, "it has left nothing undone");
  }));
}

TEST_CASE("who destroys its Buffer between two looks has not ended") {
  struct Shared {
    std::atomic<int> ready, leave, left;
  };
  auto* const shared =
      new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
  const auto wait_for = [](const std::atomic<int>& word) {
    for (int ms = 0; word == 0 && ms < 10000; ++ms) pause_ms(1);
    expect(word != 0, "the others come");
  };
  check_all(run_processes(3, [&](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "abc", 20.0);
    exchange_rounds(me, 3, 1);
    if (me.rank == 1) {
      wait_for(shared->leave);
      me.talk->depart(true, "it had enough");
      shared->left = 1;
      return;
    }
    if (me.rank == 2) {
      wait_for(shared->ready);
      me.talk->send(0, RankTalk::kOther, 0, 0, "a message behind which rank 1 leaves");
      return wait_for(shared->left);
    }
    // Rank 1 has been looked at, and has said nothing, when rank 2's message is taken.
    me.on_other = [&] {
      shared->leave = 1;
      wait_for(shared->left);
    };
    shared->ready = 1;
    expect_throw<PeerLostError>([&] { wait_for_rank_1_to_leave(me); },
                                "rank 1 has destroyed its Buffer, which had failed (it had enough), while");
  }));
  ::munmap(shared, sizeof(Shared));
}

TEST_CASE("who leaves without having read all has still said why") {
  for (const std::string hosts : {"aa", "ab"}) {
    for (const std::string failure : {"", "it had enough"}) {
      check_all(run_processes(2, [&](const Bootstrap& bootstrap) {
        Rank me(bootstrap, hosts, 20.0);
        exchange_rounds(me, 2, 1);
        if (me.rank == 0) me.talk->send(1, RankTalk::kOther, 0, 0, "a message that rank 1 leaves unread");
        meet(bootstrap);
        if (me.rank == 1) me.talk->depart(true, failure);
        meet(bootstrap);
        if (me.rank == 1) return;
        const std::string why = failure.empty() ? "" : ", which had failed (it had enough),";
        // Nothing is sent first: who sends is told of the end in place of who receives.
        expect_throw<PeerLostError>([&] { wait_for_rank_1_to_leave(me); },
                                    "rank 1 has destroyed its Buffer" + why + " while");
        expect(me.lost == std::vector{std::pair(1, !failure.empty())}, "it has left, and is dead where it had failed");
      }));
    }
  }
}

TEST_CASE("one that has left ends an exchange for which another does not come") {
  check_all(run_processes(3, [&](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "aab", 20.0);
    exchange_rounds(me, 3, 1);
    if (me.rank == 2) me.talk->depart(true, "");
    meet(bootstrap);
    if (me.rank == 0) {
      const auto gone = [](const std::function<void()>& body) {
        const double seconds =
            seconds_of([&] { expect_throw<PeerLostError>(body, "rank 2 has destroyed its Buffer while"); });
        expect(seconds < 10.0, "long before the deadline, after " + std::to_string(seconds) + " s");
      };
      gone([&] { me.talk->exchange("the end", 0, ""); });
      me.talk->want_reset(0);
      gone([&] { me.talk->agree_on_reset(); });
    }
    std::string how;  // rank 1 is here all the time
    while (me.rank == 1 && !me.talk->peer_gone(0, &how)) pause_ms(5);
  }));
}

TEST_CASE("numbers of exchanges in calls come round") {
  check_all(run_processes(2, [&](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "ab", 5.0);
    constexpr int kLast = std::numeric_limits<int>::max(), kFirst = std::numeric_limits<int>::min();
    for (const int id : {6, 7, kLast - 1, kLast, kFirst, kFirst + 1, 2, 3}) {
      std::uint64_t masked = 0;
      const std::string text = std::to_string(me.rank) + " in " + std::to_string(id);
      const auto all = me.talk->exchange_in_call("growth", id, 0, text, [](int) {}, &masked, false);
      expect(all[0].text == "0 in " + std::to_string(id) && all[1].text == "1 in " + std::to_string(id),
             "what is said");
    }
  }));
}

TEST_CASE("a rank that does not come is waited for as long as said, and all agree on a reset") {
  for (const Form form : {Form::kProcesses, Form::kThreads}) {
    check_all(run_ranks(form, 4, [](const Bootstrap& bootstrap) {
      Rank me(bootstrap, "abab", 0.4);
      exchange_rounds(me, 4, 2);
      // Rank r comes to r more rounds, and only rank 3 to the third of them.
      for (int round = 0; round < me.rank; ++round)
        expect_throw<TimeoutError>([&] { me.talk->exchange("not all", 1, "left behind"); }, "in not all");
      std::uint64_t masked = 0;
      int looked = 0;
      if (me.rank == 1)
        expect_throw<TimeoutError>(
            [&] { me.talk->exchange_in_call("in a call", 8, 2, "", [&](int) { ++looked; }, &masked, false); },
            "in in a call");
      expect(me.rank != 1 || looked > 2, "looks at who is missing");
      meet(bootstrap);

      me.talk->want_reset(static_cast<std::uint64_t>(10 + me.rank));
      const RankTalk::Reset target = me.talk->agree_on_reset();
      expect(target.generation == 1 && target.epoch == 13 && target.round == 5, "where all go");
      me.talk->reset_reached(target.generation);
      exchange_rounds(me, 4, 5);
      const auto said = me.talk->exchange_in_call(
          "in a call", 8, static_cast<std::uint64_t>(me.rank), "now", [](int) {}, &masked, false);
      for (int peer = 0; peer < 4; ++peer)
        expect(said[static_cast<std::size_t>(peer)].value == static_cast<std::uint64_t>(peer) &&
                   said[static_cast<std::size_t>(peer)].text == "now",
               "nothing from before the reset");
      me.talk->depart(true, {});
    }));
  }
}

TEST_CASE("silent ranks of other machines are masked in a call that allows it") {
  check_all(run_processes(3, [](const Bootstrap& bootstrap) {
    Rank me(bootstrap, "abc", 0.4);
    exchange_rounds(me, 3, 1);
    std::uint64_t masked = 0;
    if (me.rank != 1) {
      const auto said = me.talk->exchange_in_call("in a call", 2, 5, "", [](int) {}, &masked, true);
      expect(masked == 2 && said[static_cast<std::size_t>(2 - me.rank)].value == 5, "the others are heard");
    }
    meet(bootstrap);
  }));
}

TEST_CASE("a host is what DEEP_MOE_HOST_ID says, and its node unless DEEP_MOE_NODE says more") {
  const std::uint64_t here = host_uid();
  CHECK(here == machine_uid());
  CHECK(placement_here().host == here);
  const Setting host("DEEP_MOE_HOST_ID", "one");
  const std::uint64_t one = host_uid();
  CHECK(one != here);
  CHECK(machine_uid() == here);
  CHECK(placement_here().host == one);
  ::setenv("DEEP_MOE_HOST_ID", "two", 1);
  CHECK(host_uid() != one);
  const Setting node("DEEP_MOE_NODE", "rack");
  CHECK(placement_here().host != host_uid());
}
