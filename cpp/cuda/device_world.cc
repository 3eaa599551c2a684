#include "cuda/device_world.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/retire.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

enum MessageKind : std::uint32_t {
  kSegment = 1,  // id, bytes; text: a Ticket; with an fd where the kind has one
  kMapped,       // id: I have mapped your segment; text: why not
  kRetired,      // id: my segment will not be used
  kOffered,      // value: round; text: why I could not append what I need
  kSettled,      // value: round; text: whose segment I could not map
  kDeparted,
};

std::string pack(const Ticket& ticket) { return std::string(reinterpret_cast<const char*>(&ticket), sizeof(ticket)); }

Ticket unpack(const std::string& text) {
  Ticket ticket;
  if (text.size() != sizeof(ticket)) throw Error("a broken control message");
  std::memcpy(&ticket, text.data(), sizeof(ticket));
  return ticket;
}

}  // namespace

Stream DeviceWorld::comm_stream() const { return comm_stream_->get(); }

char* const* DeviceWorld::segment_table() const { return table_; }

std::string DeviceWorld::name_of(int peer) const {
  const int device = peer == rank_ ? device_ : peers_[static_cast<std::size_t>(peer)].device;
  return "rank " + std::to_string(peer) + " (" + (device < 0 ? "a GPU that is not visible here" : device_name(device)) +
         ")";
}

void DeviceWorld::send_all(std::uint32_t kind, int id, std::uint64_t value, const std::string& text) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || peers_[peer].closed) continue;
    channel_->send_segment(peer, {.id = id, .bytes = value, .fd = -1, .kind = kind, .text = text});
  }
}

void DeviceWorld::announce_segment(int id, const std::shared_ptr<Segment>& segment) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  register_local_segment(uid_, id, segment);
  round_segments_.push_back(id);
  num_segments_ = id + 1;
  set_table(rank_, id, segment->base());
  const auto& memory = static_cast<const DeviceSegment&>(*segment);
  struct Descriptor {
    int fd = -1;
    ~Descriptor() {
      if (fd >= 0) ::close(fd);
    }
  } descriptor;
  std::string ticket;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || peers_[peer].closed) continue;
    if (!peers_[peer].local && ticket.empty()) {
      ticket = pack(memory.ticket());
      descriptor.fd = memory.export_fd();
    }
    const bool local = peers_[peer].local;
    channel_->send_segment(peer, {.id = id,
                                  .bytes = segment->bytes(),
                                  .fd = local ? -1 : descriptor.fd,
                                  .kind = kSegment,
                                  .text = local ? std::string() : ticket});
  }
}

std::shared_ptr<Segment> DeviceWorld::import_segment(int peer, const ControlChannel::SegmentMessage& message) {
  if (!peers_[peer].local) return DeviceSegment::map(device_, unpack(message.text), message.fd);
  auto segment = find_local_segment(peers_[peer].uid, message.id);
  if (!segment) throw Error("it has been freed");
  static_cast<DeviceSegment&>(*segment).grant(device_);
  return segment;
}

void DeviceWorld::take_message(int peer, ControlChannel::SegmentMessage& message) {
  Peer& entry = peers_[peer];
  const auto at = static_cast<std::size_t>(message.id);
  switch (message.kind) {
    case kSegment: {
      std::string failure;
      try {
        if (message.id < 0 || message.id >= layout::kMaxSegments) throw Error("its number is out of range");
        auto segment = import_segment(peer, message);
        if (entry.segments.size() <= at) entry.segments.resize(at + 1);
        entry.segments[at] = std::move(segment);
        set_table(peer, message.id, entry.segments[at]->base());
      } catch (const Error& error) {
        failure = name_of(rank_) + " cannot map segment " + std::to_string(message.id) + " of " + name_of(peer) + ": " +
                  error.what();
        if (import_failure_.empty()) import_failure_ = failure;
      }
      channel_->send_segment(peer, {.id = message.id, .bytes = 0, .fd = -1, .kind = kMapped, .text = failure});
      break;
    }
    case kMapped:
      if (entry.has_mapped.size() <= at) entry.has_mapped.resize(at + 1);
      entry.has_mapped[at] = message.text.empty();
      break;
    case kRetired:
      if (at >= entry.segments.size()) break;
      set_table(peer, message.id, nullptr);
      entry.segments[at].reset();
      break;
    case kOffered:
      entry.offered = message.bytes;
      entry.offer_failure = message.text;
      break;
    case kSettled:
      entry.settled = message.bytes;
      entry.settle_failure = message.text;
      break;
    case kDeparted: entry.departed = true; break;
    default: throw Error("rank " + std::to_string(peer) + " sent an unknown control message");
  }
}

void DeviceWorld::take_messages() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || peers_[peer].closed) continue;
    ControlChannel::SegmentMessage message;
    bool closed = false;
    while (channel_->receive_segment(peer, &message, &closed)) take_message(peer, message);
    peers_[peer].closed = closed;
  }
}

void DeviceWorld::set_table(int peer, int segment, char* base) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const std::size_t at = static_cast<std::size_t>(peer * layout::kMaxSegments + segment);
  table_mirror_[at] = base;
  const OnDevice on_device(device_);
  const OutsideCapture outside_capture;
  const auto stream = static_cast<CUstream>(copy_stream_->get());
  check(driver().cuMemcpyHtoDAsync(to_device(&table_[at]), &table_mirror_[at], sizeof(char*), stream),
        "cuMemcpyHtoDAsync");
  // Done before anybody is told: a kernel of a call that names the segment finds it, whenever it was launched.
  CUresult status = CUDA_ERROR_NOT_READY;
  const WaitRules rules{rank_, options_.timeout_seconds, options_.interrupt_check, {}};
  poll_until(
      rules, "copying the address of a segment",
      [&] { return (status = driver().cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY ? rank_ : -1; },
      [](int) { return std::string("a copy of 8 bytes does not end"); });
  check(status, "copy of a segment's address");
}

char* DeviceWorld::address(int peer, int segment, std::size_t offset) {
  if (peer == rank_) return heap_->segment(segment)->base() + offset;
  const auto at = static_cast<std::size_t>(segment);
  const auto known = [&] {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto& segments = peers_[peer].segments;
    return at < segments.size() && segments[at] ? segments[at]->base() : nullptr;
  };
  if (char* base = known()) return base + offset;
  wait(
      "mapping a segment", [&] { return take_messages(), known() == nullptr ? peer : -1; },
      [&](int) { return "expected its segment " + std::to_string(segment); });
  return known() + offset;
}

DeviceWorld::Growth DeviceWorld::run_round(const std::string& offer_failure) {
  ++round_;
  const auto join = [&](const char* phase, std::uint64_t Peer::* round) {
    wait(
        phase,
        [&] {
          take_messages();
          for (int peer = 0; peer < num_ranks_; ++peer) {
            if (peer != rank_ && peers_[peer].*round < round_) return peer;
          }
          return -1;
        },
        [&](int peer) {
          return "expected round " + std::to_string(round_) + ", saw " + std::to_string(peers_[peer].*round);
        });
  };
  Growth growth;
  send_all(kOffered, -1, round_, offer_failure);
  join("appending segments", &Peer::offered);
  for (int peer = 0; peer < num_ranks_; ++peer)
    growth.reasons.push_back(peer == rank_ ? offer_failure : peers_[peer].offer_failure);
  // Whoever has offered has sent its segments before: they are mapped here, or it is known why not.
  const std::string own_failure = std::exchange(import_failure_, {});
  send_all(kSettled, -1, round_, own_failure);
  join("mapping segments", &Peer::settled);
  bool mapped = true;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const std::string& failure = peer == rank_ ? own_failure : peers_[peer].settle_failure;
    if (failure.empty()) continue;
    mapped = false;
    if (growth.reasons[peer].empty()) growth.reasons[peer] = failure;
  }
  if (!mapped) retire_round_segments();
  round_segments_.clear();
  growth.everywhere = std::all_of(growth.reasons.begin(), growth.reasons.end(),
                                  [](const std::string& reason) { return reason.empty(); });
  return growth;
}

void DeviceWorld::retire_round_segments() {
  for (const int id : round_segments_) {
    if (!heap_->retire(id)) continue;  // blocks of it are in use here, or it is the workspace
    set_table(rank_, id, nullptr);
    send_all(kRetired, id, 0, {});
  }
}

DeviceWorld::Growth DeviceWorld::grow(std::size_t bytes) {
  drop_retired();
  std::string reason;
  try {
    if (bytes > 0) heap_->grow(bytes, &reason);
  } catch (const Error& error) {
    reason = error.what();
  }
  return run_round(reason);
}

Block DeviceWorld::allocate_or_grow(std::size_t bytes, Stream first_user, std::string* reason) {
  for (;;) {
    if (Block block = device_heap_->allocate(bytes, first_user)) return block;
    if (!heap_->grow(bytes, reason)) return {};
  }
}

bool DeviceWorld::shared(int segment) {
  poll();
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto at = static_cast<std::size_t>(segment);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_) continue;
    if (at >= peers_[peer].has_mapped.size() || !peers_[peer].has_mapped[at]) return false;
  }
  return true;
}

void DeviceWorld::poll() {
  if (num_ranks_ > 1 && channel_->readable()) take_messages();
}

void DeviceWorld::wait(const char* phase, const std::function<int()>& first_missing,
                       const std::function<std::string(int)>& describe) {
  const WaitRules rules{rank_, options_.timeout_seconds, options_.interrupt_check,
                        [this](int peer, std::string* how) { return peer_gone(peer, how); }};
  poll_until(rules, phase, first_missing, describe);
}

bool DeviceWorld::peer_gone(int peer, std::string* how) {
  if (peer == rank_) return false;
  take_messages();
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (peers_[peer].departed) {
    *how = "has destroyed its Buffer";
    return true;
  }
  if (peers_[peer].closed || (!peers_[peer].local && channel_->peer_closed(peer))) {
    *how = "has ended (its process is gone)";
    return true;
  }
  return false;
}

void DeviceWorld::depart() noexcept {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (device_heap_) device_heap_->close();
  if (channel_) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_ || peers_[peer].closed) continue;
      peers_[peer].closed = true;
      try {
        channel_->send_segment(peer, {.id = -1, .bytes = 0, .fd = -1, .kind = kDeparted, .text = {}});
      } catch (const Error&) {  // it is gone too, or was never connected
      }
    }
    channel_->close();
  }
  forget_local_segments(uid_);
}

DeviceWorld::~DeviceWorld() { release(); }

void DeviceWorld::release() noexcept {
  if (forks_ != fork_count()) {
    (void)channel_.release();  // its descriptors are closed in a child already
    return;
  }
  depart();
  if (!comm_stream_) return;
  const OnDevice on_device = OnDevice::quiet(device_);
  if (!on_device) return;
  // Kernels of this rank may still read and write all of it.
  std::vector<std::shared_ptr<void>> things{workspace_, words_, comm_stream_, copy_stream_};
  for (Peer& peer : peers_) things.insert(things.end(), peer.segments.begin(), peer.segments.end());
  const auto pool = std::make_shared<EventPool>(device_);
  std::vector<CUevent> events;
  const OutsideCapture outside_capture;
  for (const auto& stream : {comm_stream_, copy_stream_}) {
    if (!stream) continue;
    bool recorded = false;
    try {
      events.push_back(pool->take());
      recorded = driver().cuEventRecord(events.back(), static_cast<CUstream>(stream->get())) == CUDA_SUCCESS;
    } catch (const Error&) {  // told by `recorded`
    }
    if (!recorded) new std::vector<std::shared_ptr<void>>(things);  // nothing tells when they are done: kept for good
  }
  drop_behind(std::move(things), pool, std::move(events));
}

}  // namespace deep_moe::cuda
