// The constructor of a Domain: the only place where the user's process group is used.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "runtime/domain.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"

namespace deep_moe {
namespace {

constexpr std::uint32_t kProtocolVersion = 2;

// What ranks tell each other first.
struct Hello {
  std::uint32_t protocol;
  std::uint32_t failed;
  std::uint32_t low_latency, shrink;
  std::uint64_t uid;      // of this rank's domain
  std::uint64_t process;  // equal for ranks that are threads of one process
  std::uint64_t machine;  // equal for ranks of one boot of one machine
  Placement placement;
  std::int64_t num_rdma_bytes;
  char socket_name[96];
  char reason[layout::kReasonBytes];
};

struct Status {
  std::uint32_t failed;
  char reason[layout::kReasonBytes];
};

// Clocks count nanoseconds in 64 bits: what is meant as "for ever" has to stay below that.
BufferOptions with_bounded_timeout(BufferOptions options) {
  constexpr double kForever = 1e9;  // seconds
  options.timeout_seconds = std::min(options.timeout_seconds, kForever);
  return options;
}

void check_options(const BufferOptions& options) {
  const auto check_bytes = [](const char* name, std::int64_t value) {
    if (value < 0) throw ArgumentError(std::string(name) + ": got " + std::to_string(value) + ", expected >= 0");
  };
  check_bytes("num_nvl_bytes", options.num_nvl_bytes);
  check_bytes("num_rdma_bytes", options.num_rdma_bytes);
  if (!(options.timeout_seconds > 0))
    throw ArgumentError("timeout: got " + std::to_string(options.timeout_seconds) + " s, expected > 0");
}

void set_reason(const std::exception& error, std::uint32_t* failed, char* reason) {
  *failed = 1;
  std::string text = error.what();
  text.resize(std::min(text.size(), static_cast<std::size_t>(layout::kReasonBytes - 1)));
  std::memcpy(reason, text.c_str(), text.size() + 1);
}

}  // namespace

Domain::Domain(const Bootstrap& bootstrap, const BufferOptions& options, const std::function<void()>& prepare)
    : rank_(bootstrap.rank),
      num_ranks_(bootstrap.size),
      options_(with_bounded_timeout(options)),
      uid_(random_uid()),
      peers_(static_cast<std::size_t>(bootstrap.size)),
      masked_(static_cast<std::size_t>(bootstrap.size), false),
      last_seen_(static_cast<std::size_t>(bootstrap.size), 0) {
  try {
    connect(bootstrap, prepare);
  } catch (...) {
    forget_local_segments(uid_);
    throw;
  }
}

void Domain::connect(const Bootstrap& bootstrap, const std::function<void()>& prepare) {
  const auto gather = [&](const auto& mine) {
    using Entry = std::decay_t<decltype(mine)>;
    std::vector<Entry> all(static_cast<std::size_t>(num_ranks_));
    bootstrap.all_gather(&mine, all.data(), sizeof(Entry));
    return all;
  };
  // A rank that cannot go on says so in the exchange instead of leaving the others in it.
  const auto agree = [&](const Status& mine) {
    const std::vector<Status> all = gather(mine);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (all[peer].failed)
        throw Error("rank " + std::to_string(peer) + " could not make its Buffer: " + all[peer].reason);
    }
  };

  Hello hello{};
  hello.protocol = kProtocolVersion;
  hello.uid = uid_;
  hello.process = process_uid();
  hello.machine = host_uid();
  hello.low_latency = options_.low_latency_mode;
  hello.shrink = options_.enable_shrink;
  std::size_t max_bytes = 0;
  std::exception_ptr own_error;
  try {
    check_options(options_);
    hello.placement = placement_here();
    hello.num_rdma_bytes = options_.num_rdma_bytes;
    max_bytes = max_heap_bytes();
    channel_ = std::make_unique<ControlChannel>(rank_, num_ranks_);
    std::memcpy(hello.socket_name, channel_->name().c_str(), channel_->name().size() + 1);
    workspace_segment_ = HostSegment::create(layout::workspace_bytes(num_ranks_));
    if (prepare) prepare();
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    set_reason(error, &hello.failed, hello.reason);
  }
  const std::vector<Hello> all = gather(hello);
  if (own_error) std::rethrow_exception(own_error);
  std::vector<ControlChannel::Route> routes;
  std::uint64_t group_uid = 0;
  int ranks_here = 0;
  std::vector<Placement> placements;
  std::int64_t most_rdma_bytes = 0;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const Hello& theirs = all[peer];
    const std::string who = "rank " + std::to_string(peer);
    if (theirs.protocol != kProtocolVersion)
      throw Error(who + " runs another version of deep_moe (protocol " + std::to_string(theirs.protocol) + ", here " +
                  std::to_string(kProtocolVersion) + ")");
    if (theirs.failed) throw Error(who + " could not make its Buffer: " + theirs.reason);
    if (theirs.machine != hello.machine)
      throw Error(who + " is on another machine than rank " + std::to_string(rank_) +
                  ": the CPU backend reaches the ranks of one machine only");
    if (theirs.low_latency != hello.low_latency || theirs.shrink != hello.shrink)
      throw ArgumentError("low_latency_mode and enable_shrink have to be the same on all ranks: they differ on rank " +
                          std::to_string(rank_) + " and " + who);
    peers_[peer].uid = theirs.uid;
    peers_[peer].local = theirs.process == hello.process;
    routes.push_back({.wanted = !peers_[peer].local, .remote = false, .name = theirs.socket_name, .endpoint = {}});
    group_uid = group_uid * 31 + theirs.uid;
    ++ranks_here;
    placements.push_back(theirs.placement);
    most_rdma_bytes = std::max(most_rdma_bytes, theirs.num_rdma_bytes);
  }
  topology_ = Topology(placements);
  const bool between_nodes = topology_.num_nodes() > 1;
  if (between_nodes)
    rail_layout_ = layout::rail_layout_within(topology_.num_nodes(), topology_.num_local_ranks(),
                                              static_cast<std::size_t>(most_rdma_bytes));
  // Spinning pays only where every rank has a core to itself.
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  spin_rounds_ = ranks_here <= cores ? 2000 : 20;

  Status status{};
  try {
    channel_->connect(routes, group_uid, options_.timeout_seconds);
    heap_ = std::make_shared<Heap>(
        max_bytes, [this](int id, const std::shared_ptr<Segment>& segment) { announce_segment(id, segment); });
    heap_->append_foreign(workspace_segment_);
    if (between_nodes) heap_->append_foreign(HostSegment::create(rail_layout_.bytes()));
    std::string reason;
    if (options_.num_nvl_bytes > 0 && !heap_->grow(static_cast<std::size_t>(options_.num_nvl_bytes), &reason))
      throw BufferTooSmallError("num_nvl_bytes=" + std::to_string(options_.num_nvl_bytes) + ": " + reason);
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    set_reason(error, &status.failed, status.reason);
  }
  const auto agree_or_throw = [&] {
    try {
      agree(status);
    } catch (...) {
      if (own_error) std::rethrow_exception(own_error);
      throw;
    }
  };
  agree_or_throw();
  try {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      workspaces_.emplace_back(fetch_segment(peer, kWorkspaceSegment)->base(), num_ranks_);
      if (between_nodes) network_memory(peer);
    }
    mine().control().magic = layout::kWorkspaceMagic;
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    set_reason(error, &status.failed, status.reason);
  }
  agree_or_throw();
}

}  // namespace deep_moe
