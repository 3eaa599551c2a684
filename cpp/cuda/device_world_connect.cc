// The constructor of a DeviceWorld: the only place where the user's process group is used.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include <deep_moe/error.hpp>

#include "cuda/device_world.hpp"
#include "cuda/device_world_messages.hpp"
#include "cuda/driver.hpp"
#include "cuda/retire.hpp"
#include "runtime/process.hpp"
#include "runtime/text.hpp"
#include "runtime/topology.hpp"

namespace deep_moe::cuda {
namespace {

constexpr std::uint32_t kProtocolVersion = 4;
constexpr double kForever = 1e9;  // seconds; clocks count nanoseconds in 64 bits

// What ranks tell each other first.
struct Hello {
  std::uint32_t protocol;
  std::uint32_t failed;
  std::uint64_t uid;
  std::uint64_t process;  // equal for ranks that are threads of one process
  std::uint64_t machine;  // equal for ranks of one machine
  std::uint64_t host;     // the same, or what DEEP_MOE_HOST_ID says: other hosts share nothing with this one
  Placement placement;
  std::uint64_t network_bytes, low_latency_bytes;
  NetworkKind network;  // what DEEP_MOE_NETWORK asks for
  std::array<char, 16> device;
  char socket_name[96];
  std::uint32_t num_reason_bytes;
  char reason[layout::kReasonBytes];
};

struct Status {
  std::uint32_t failed;  // a Failure
  std::uint32_t num_reason_bytes;
  char reason[layout::kReasonBytes];
};

// What the other ranks throw.
enum Failure : std::uint32_t { kNoFailure = 0, kError, kUnavailableError };

template <typename Record>
void set_reason(const std::exception& error, Record* record) {
  record->failed = dynamic_cast<const UnavailableError*>(&error) != nullptr ? kUnavailableError : kError;
  record->num_reason_bytes = copy_text(error.what(), record->reason, sizeof(record->reason));
}

template <typename Record>
void throw_failure(int rank, const Record& record) {
  if (record.failed == kNoFailure) return;
  const std::string text = "rank " + std::to_string(rank) +
                           " could not make its Buffer: " + std::string(record.reason, record.num_reason_bytes);
  if (record.failed == kUnavailableError) throw UnavailableError(text);
  throw Error(text);
}

std::string name_of_rank(int rank) { return "rank " + std::to_string(rank); }

bool on_several_hosts(const std::vector<Hello>& all) {
  return std::any_of(all.begin(), all.end(), [&](const Hello& one) { return one.host != all[0].host; });
}

// Over which network nodes exchange. Throws on all ranks alike.
NetworkKind choose_network(const std::vector<Hello>& all, const Topology& topology) {
  const int num_ranks = static_cast<int>(all.size());
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int first = topology.rank_at(topology.node_of(rank), 0);
    if (all[rank].host != all[first].host)
      throw UnavailableError(name_of_rank(first) + " and " + name_of_rank(rank) +
                             " are on one node, but on two machines, and GPUs of two machines share no memory here: "
                             "DEEP_MOE_NODE has to differ between machines");
    if (all[rank].network != all[0].network)
      throw ArgumentError("DEEP_MOE_NETWORK has to be the same on all ranks: rank 0 and " + std::to_string(rank) +
                          " differ");
  }
  const bool several = on_several_hosts(all);
  if (several && all[0].network == NetworkKind::kMapped)
    throw ArgumentError(
        "DEEP_MOE_NETWORK=mapped is for nodes of one machine, and these ranks are on several: leave it unset");
  if (all[0].network != NetworkKind::kAuto) return all[0].network;
  return several ? NetworkKind::kNvshmem : NetworkKind::kMapped;
}

// Loading a kernel while another one waits may have to wait for that one: all are loaded before the first can wait.
void prepare_kernels(int device) {
  static std::mutex mutex;
  static auto* prepared = new std::set<int>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (prepared->count(device) != 0) return;
  const OnDevice on_device(device);
  kernels::prepare();
  prepared->insert(device);
}

int choose_device(int asked) {
  std::string reason;
  if (!available(&reason)) throw UnavailableError("no CUDA device can be used: " + reason);
  driver();
  if (asked < 0) return current_device();
  if (asked >= num_devices())
    throw ArgumentError("device: got " + std::to_string(asked) + ", expected one of the " +
                        std::to_string(num_devices()) + " GPUs that are visible, counted from 0");
  return asked;
}

void check_options(const Bootstrap& bootstrap, const DeviceWorldOptions& options) {
  if (bootstrap.size > layout::kMaxKernelRanks)
    throw ArgumentError("ranks: got " + std::to_string(bootstrap.size) + ", expected at most " +
                        std::to_string(layout::kMaxKernelRanks));
  if (!(options.timeout_seconds > 0))
    throw ArgumentError("timeout: got " + std::to_string(options.timeout_seconds) + " s, expected > 0");
}

}  // namespace

std::shared_ptr<DeviceWorld> make_device_world(const Bootstrap& bootstrap, const DeviceWorldOptions& options) {
  return std::make_shared<DeviceWorld>(bootstrap, options);
}

DeviceWorld::DeviceWorld(const Bootstrap& bootstrap, const DeviceWorldOptions& options)
    : rank_(bootstrap.rank),
      num_ranks_(bootstrap.size),
      options_(options),
      uid_(random_uid()),
      forks_(fork_count()),
      peers_(static_cast<std::size_t>(bootstrap.size)) {
  options_.timeout_seconds = std::min(options_.timeout_seconds, kForever);
  try {
    connect(bootstrap);
  } catch (...) {
    release();
    throw;
  }
}

void DeviceWorld::connect(const Bootstrap& bootstrap) {
  const auto gather = [&](const auto& mine) {
    using Entry = std::decay_t<decltype(mine)>;
    std::vector<Entry> all(static_cast<std::size_t>(num_ranks_));
    bootstrap.all_gather(&mine, all.data(), sizeof(Entry));
    return all;
  };

  Hello hello{};
  hello.protocol = kProtocolVersion;
  hello.uid = uid_;
  hello.process = process_uid();
  hello.machine = machine_uid();
  hello.host = host_uid();
  const std::size_t table_at = layout::align_up(layout::device_workspace_bytes(num_ranks_), layout::kAlign);
  const std::size_t mirror_at = layout::align_up(layout::host_words_bytes(num_ranks_), layout::kAlign);
  const std::size_t table_bytes = sizeof(char*) * static_cast<std::size_t>(num_ranks_ * layout::kMaxSegments);
  std::exception_ptr own_error;
  try {
    check_options(bootstrap, options_);
    hello.placement = placement_here();
    hello.network_bytes = options_.network_bytes;
    hello.low_latency_bytes = options_.low_latency_bytes;
    hello.network = network_kind_here();
    options_.max_heap_bytes = std::min(options_.max_heap_bytes, max_heap_bytes());
    if (const char* kind = std::getenv("DEEP_MOE_DEVICE_MEMORY");
        kind != nullptr && *kind != '\0' && options_.memory == MemoryKind::kAuto)
      options_.memory = deep_moe::cuda::memory_kind(kind);
    device_ = choose_device(options_.device);
    hello.device = device_uuid(device_);
    channel_ = std::make_unique<ControlChannel>(rank_, num_ranks_);
    std::memcpy(hello.socket_name, channel_->name().c_str(), channel_->name().size() + 1);
    drop_retired();
    prepare_kernels(device_);
    comm_stream_ = std::make_shared<OwnStream>(device_, true);
    copy_stream_ = std::make_shared<OwnStream>(device_, true);
    const std::size_t announce_at =
        layout::align_up(mirror_at + table_bytes + sizeof(std::uint64_t) * kNumMirrorWords, layout::kAlign);
    nodes_words_at_ = layout::align_up(announce_at + sizeof(layout::Announce), layout::kAlign);
    words_ = std::make_shared<MappedWords>(device_, nodes_words_at_ + layout::host_words_bytes(num_ranks_));
    workspace_ = DeviceSegment::create(device_, table_at + table_bytes, options_.memory);
    table_ = reinterpret_cast<char**>(workspace_->base() + table_at);
    table_mirror_ = reinterpret_cast<char**>(words_->host() + mirror_at);
    word_mirror_ = reinterpret_cast<std::uint64_t*>(words_->host() + mirror_at + table_bytes);
    announce_mirror_ = reinterpret_cast<layout::Announce*>(words_->host() + announce_at);
    domain_.words = layout::DeviceLayout(num_ranks_);
    const OnDevice on_device(device_);
    check(driver().cuMemsetD8Async(to_device(workspace_->base()), 0, workspace_->bytes(),
                                   static_cast<CUstream>(copy_stream_->get())),
          "cuMemsetD8Async");  // the first entry of the table is copied behind it, and waited for
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    set_reason(error, &hello);
  }
  const std::vector<Hello> all = gather(hello);
  if (own_error) std::rethrow_exception(own_error);
  std::uint64_t group_uid = 0;
  std::vector<Placement> placements;
  NetworkPlace place;
  std::size_t network_bytes = 0, low_latency_bytes = 0;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const Hello& theirs = all[peer];
    if (theirs.protocol != kProtocolVersion)
      throw Error(name_of_rank(peer) + " runs another version of deep_moe (protocol " +
                  std::to_string(theirs.protocol) + ", here " + std::to_string(kProtocolVersion) + ")");
    throw_failure(peer, theirs);
    peers_[peer].uid = theirs.uid;
    peers_[peer].local = theirs.process == hello.process;
    placements.push_back(theirs.placement);
    place.processes.push_back(theirs.process);
    place.one_machine = place.one_machine && theirs.machine == hello.machine;
    network_bytes = std::max<std::size_t>(network_bytes, theirs.network_bytes);
    low_latency_bytes = std::max<std::size_t>(low_latency_bytes, theirs.low_latency_bytes);
    group_uid = group_uid * 31 + theirs.uid;
  }
  const Topology topology(placements);
  const NetworkKind network = choose_network(all, topology);
  for (int peer = 0; peer < num_ranks_; ++peer)
    peers_[peer].near = network == NetworkKind::kMapped || topology.node_of(peer) == topology.node_of(rank_);

  // Of what only one rank may lack, all hear before anybody waits for it.
  struct Part {
    Status status{};
    Endpoint endpoint;
  };
  const auto agree = [&](const Part& mine) {
    std::vector<Part> parts = gather(mine);
    if (own_error) std::rethrow_exception(own_error);
    for (int peer = 0; peer < num_ranks_; ++peer) throw_failure(peer, parts[peer].status);
    return parts;
  };
  std::vector<ControlChannel::Route> routes(static_cast<std::size_t>(num_ranks_));
  if (topology.num_nodes() > 1) {
    Part mine;
    try {
      const OnDevice on_device(device_);
      nodes_ = std::make_unique<Nodes>(topology, rank_, network_bytes, network,
                                       hello.network != NetworkKind::kAuto || network == NetworkKind::kNvshmem,
                                       low_latency_bytes);
      if (on_several_hosts(all)) mine.endpoint = channel_->listen_to_machines();
    } catch (const std::exception& error) {
      own_error = std::current_exception();
      set_reason(error, &mine.status);
    }
    const std::vector<Part> parts = agree(mine);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      routes[peer].remote = all[peer].host != hello.host;
      routes[peer].endpoint = parts[peer].endpoint;
    }
  }
  for (int peer = 0; peer < num_ranks_; ++peer) routes[peer].name = all[peer].socket_name;

  Part mine;
  try {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (!near(peer)) continue;
      peers_[peer].device = find_device(all[peer].device);
      try {
        if (peers_[peer].device >= 0) check_peer_access(device_, peers_[peer].device);
      } catch (const Error& error) {
        throw Error(name_of(rank_) + " cannot reach " + name_of(peer) + ": " + error.what());
      }
    }
    channel_->connect(routes, group_uid, options_.timeout_seconds);
    start_talk();
    heap_ = std::make_shared<Heap>(
        options_.max_heap_bytes,
        [this](int id, const std::shared_ptr<Segment>& segment) { announce_segment(id, segment); },
        [this](std::size_t bytes) -> std::shared_ptr<Segment> {
          if (num_segments_ >= layout::kMaxSegments)
            throw Error("there are " + std::to_string(layout::kMaxSegments) + " segments already");
          return DeviceSegment::create(device_, bytes, options_.memory);
        });
    const auto has_failed = [words = words_, at = layout::HostLayout(num_ranks_)] {
      layout::ErrorRecord& record = at.error(words->host(), true);
      return std::atomic_ref<std::uint32_t>(record.kind).load(std::memory_order_acquire) != 0;
    };
    device_heap_ = std::make_shared<DeviceHeap>(heap_, comm_stream_, options_.current_stream, has_failed);
    heap_->append_foreign(workspace_);
    if (nodes_) share_nodes_memory();
    std::string reason;
    if (options_.heap_bytes > 0 && !heap_->grow(options_.heap_bytes, &reason))
      throw BufferTooSmallError("num_nvl_bytes=" + std::to_string(options_.heap_bytes) + ": " + reason);
  } catch (const std::exception& error) {
    own_error = std::current_exception();
    set_reason(error, &mine.status);
  }
  agree(mine);

  const Growth growth = run_round({});
  for (const std::string& reason : growth.reasons) {
    if (!reason.empty()) throw Error(reason);
  }
  domain_.rank = rank_;
  domain_.num_ranks = num_ranks_;
  domain_.host_words = layout::HostLayout(num_ranks_);
  for (int peer = 0; peer < num_ranks_; ++peer)
    if (near(peer)) domain_.workspaces[peer] = peer == rank_ ? workspace_->base() : peers_[peer].segments.at(0)->base();
  domain_.host = words_->device();
  domain_.timeout_ns = static_cast<std::uint64_t>(options_.timeout_seconds * 1e9);
  place.interface_name = channel_->interface_name();
  if (nodes_) connect_nodes(bootstrap, place);
  if (const char* log = std::getenv("DEEP_MOE_LOG"); log != nullptr && *log != '\0' && *log != '0') log_places();
  if (num_ranks_ > 1) attendant_ = std::make_unique<Attendant>(*channel_, [this] { attend(); });
}

// Segment 1.
void DeviceWorld::share_nodes_memory() {
  nodes_memory_ = DeviceSegment::create(device_, nodes_->shared_bytes(), options_.memory);
  const OnDevice on_device(device_);
  check(driver().cuMemsetD8Async(to_device(nodes_memory_->base()), 0, nodes_memory_->bytes(),
                                 static_cast<CUstream>(copy_stream_->get())),
        "cuMemsetD8Async");  // waited for with the entry of the table
  heap_->append_foreign(nodes_memory_);
}

void DeviceWorld::connect_nodes(const Bootstrap& bootstrap, const NetworkPlace& place) {
  const OnDevice on_device(device_);
  SymmetricBlock block;
  if (nodes_->kind() == NetworkKind::kNvshmem)
    block = take_symmetric_block(bootstrap, place, nodes_->network_bytes(), copy_stream_->get());
  network_lease_ = block.lease;
  std::vector<char*> shared;  // null where there is none
  for (int peer = 0; peer < num_ranks_; ++peer)
    shared.push_back(!near(peer)     ? nullptr
                     : peer == rank_ ? nodes_memory_->base()
                                     : peers_[peer].segments.at(1)->base());
  nodes_->connect(shared, {words_->host() + nodes_words_at_, words_->device() + nodes_words_at_}, domain_.timeout_ns,
                  block.memory);
}

// One line a rank, with DEEP_MOE_LOG=1.
void DeviceWorld::log_places() const {
  std::string text = "deep_moe: " + name_of(rank_) + " of " + std::to_string(num_ranks_) + ": memory " +
                     memory_kind_name(memory_kind());
  if (!nodes_) {
    text += ", one node";
  } else {
    const Topology& topology = nodes_->topology();
    const int node = topology.node_of(rank_);
    text += ", node " + std::to_string(node) + " of " + std::to_string(topology.num_nodes()) + " with ranks";
    for (int local = 0; local < topology.num_local_ranks(); ++local)
      text += " " + std::to_string(topology.rank_at(node, local));
    const std::string interface_name = channel_->interface_name();
    text += nodes_->kind() == NetworkKind::kMapped ? "; network: mapped memory" : "; network: " + describe_network();
    text += interface_name.empty() ? "; hosts speak over local sockets"
                                   : "; hosts speak over TCP by " + interface_name + " with other machines";
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace deep_moe::cuda
