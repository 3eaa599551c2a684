#include "cuda/device_world.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <deep_moe/error.hpp>

#include "cuda/device_world_messages.hpp"
#include "cuda/retire.hpp"
#include "runtime/poll.hpp"
#include "runtime/process.hpp"

namespace deep_moe::cuda {
namespace {

constexpr auto kQuietTime = std::chrono::seconds(1);

std::string pack(const Ticket& ticket) { return std::string(reinterpret_cast<const char*>(&ticket), sizeof(ticket)); }

Ticket unpack(const std::string& text) {
  Ticket ticket;
  if (text.size() != sizeof(ticket)) throw Error("a broken control message");
  std::memcpy(&ticket, text.data(), sizeof(ticket));
  return ticket;
}

CUresult query(Stream stream) {
  const OutsideCapture outside_capture;
  return driver().cuStreamQuery(static_cast<CUstream>(stream));
}

}  // namespace

Stream DeviceWorld::comm_stream() const { return comm_stream_->get(); }

int DeviceWorld::num_ranks_on_device() const {
  int count = 1;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const Peer& theirs = peers_[static_cast<std::size_t>(peer)];
    if (peer != rank_ && theirs.local && theirs.device == device_) ++count;
  }
  return count;
}

int DeviceWorld::most_blocks() const {
  return std::max(1, attribute(device_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) / num_ranks_on_device() - 2);
}

char* const* DeviceWorld::segment_table() const { return table_; }

std::string DeviceWorld::name_of(int peer) const {
  const int device = peer == rank_ ? device_ : peers_[static_cast<std::size_t>(peer)].device;
  return "rank " + std::to_string(peer) + " (" + (device < 0 ? "a GPU that is not visible here" : device_name(device)) +
         ")";
}

bool DeviceWorld::all_near() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.near; });
}

void DeviceWorld::start_talk() {
  RankTalk::Options options;
  options.rank = rank_;
  options.num_ranks = num_ranks_;
  options.timeout_seconds = options_.timeout_seconds;
  options.interrupt_check = options_.interrupt_check;
  for (const Peer& peer : peers_) options.same_process.push_back(peer.local);
  options.other = [this](int peer, ControlChannel::SegmentMessage& message) { take_message(peer, message); };
  options.lost = [this](int peer, bool dead) { tell_kernels_of_loss(peer, dead); };
  talk_ = std::make_unique<RankTalk>(*channel_, mutex_, std::move(options));
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
    if (peer == rank_ || !near(peer) || talk_->closed(peer)) continue;
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
      talk_->send(peer, kMapped, message.id, 0, failure);
      break;
    }
    case kMapped: entry.mapped[message.id] = message.text; break;
    case kRetired:
      if (at >= entry.segments.size()) break;
      set_table(peer, message.id, nullptr);
      entry.segments[at].reset();
      break;
    default: throw Error("rank " + std::to_string(peer) + " sent an unknown control message");
  }
}

void DeviceWorld::attend() noexcept {
  try {
    talk_->take_messages();
  } catch (...) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!attendant_failure_) attendant_failure_ = std::current_exception();
  }
}

void DeviceWorld::check_attendant() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (attendant_failure_) std::rethrow_exception(attendant_failure_);
}

// Kernels that wait for it leave, once they have looked again at what it wrote last.
void DeviceWorld::tell_kernels_of_loss(int peer, bool dead) {
  const std::uint64_t bit = std::uint64_t{1} << peer;
  if (dead) dead_peers_ |= bit;
  if ((lost_peers_ & bit) != 0) return;
  lost_peers_ |= bit;
  send_lost_peers();
}

void DeviceWorld::send_lost_peers() {
  word_mirror_[kMirrorLost] = lost_peers_;
  copy_to_device(&domain_.words.state(workspace_->base()).lost_peers, &word_mirror_[kMirrorLost], sizeof(lost_peers_));
  if (!nodes_ || nodes_->host_words() == nullptr) return;
  word_mirror_[kMirrorNodesLost] = nodes_->lost_bits(lost_peers_, dead_peers_);
  copy_to_device(&nodes_->state().lost_peers, &word_mirror_[kMirrorNodesLost], sizeof(lost_peers_));
}

void DeviceWorld::copy_to_device(void* device, const void* mirror, std::size_t bytes) {
  const OnDevice on_device(device_);
  const OutsideCapture outside_capture;
  check(driver().cuMemcpyHtoDAsync(to_device(device), mirror, bytes, static_cast<CUstream>(copy_stream_->get())),
        "cuMemcpyHtoDAsync");
}

void DeviceWorld::copy_from_device(void* mirror, const void* device, std::size_t bytes) {
  const OnDevice on_device(device_);
  const OutsideCapture outside_capture;
  check(driver().cuMemcpyDtoHAsync(mirror, to_device(device), bytes, static_cast<CUstream>(copy_stream_->get())),
        "cuMemcpyDtoHAsync");
}

// No interrupts: the thread that waits may be the attendant.
void DeviceWorld::wait_copied() {
  const OnDevice on_device(device_);
  const OutsideCapture outside_capture;
  CUresult status = CUDA_ERROR_NOT_READY;
  poll_until(
      {rank_, options_.timeout_seconds, {}, {}}, "a copy of a few bytes",
      [&] {
        status = driver().cuStreamQuery(static_cast<CUstream>(copy_stream_->get()));
        return status == CUDA_ERROR_NOT_READY ? rank_ : -1;
      },
      [](int) { return std::string("it does not end"); });
  check(status, "a copy of a few bytes");
}

void DeviceWorld::set_table(int peer, int segment, char* base) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const std::size_t at = static_cast<std::size_t>(peer * layout::kMaxSegments + segment);
  table_mirror_[at] = base;
  copy_to_device(&table_[at], &table_mirror_[at], sizeof(char*));
  wait_copied();  // before anybody is told: a kernel of a call that names the segment finds it
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
      "mapping a segment", [&] { return talk_->take_messages(), known() == nullptr ? peer : -1; },
      [&](int) { return "expected its segment " + std::to_string(segment); });
  return known() + offset;
}

Block DeviceWorld::allocate_or_grow(std::size_t bytes, Stream first_user, std::string* reason) {
  for (;;) {
    if (Block block = device_heap_->allocate(bytes, first_user)) return block;
    if (!heap_->grow(bytes, reason)) return {};
  }
}

bool DeviceWorld::shared(int segment) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || !near(peer)) continue;
    const auto known = peers_[peer].mapped.find(segment);
    if (known == peers_[peer].mapped.end() || !known->second.empty()) return false;
  }
  return true;
}

void DeviceWorld::wait_until_shared(int segment, const char* phase, std::uint64_t without) {
  if (shared(segment)) return;
  const auto matters = [&](int peer) { return peer != rank_ && near(peer) && (without >> peer & 1) == 0; };
  const auto first_missing = [&] {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (matters(peer) && peers_[peer].mapped.count(segment) == 0) return peer;
    }
    return -1;
  };
  wait(phase, first_missing, [&](int) { return "expected that it maps segment " + std::to_string(segment); });
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (!matters(peer)) continue;
    if (const std::string& failure = peers_[peer].mapped[segment]; !failure.empty()) throw BufferTooSmallError(failure);
  }
}

void DeviceWorld::wait_for_kernel(const char* phase, Stream stream, const std::function<bool()>& started,
                                  const std::function<bool()>& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLook = std::chrono::milliseconds(1);
  constexpr double kForever = 1e9;  // seconds
  if (ready()) return;
  const double limit = 2 * options_.timeout_seconds + 2;
  auto last_look = Clock::now();
  Clock::time_point running_since{};
  const WaitRules rules{rank_, kForever, options_.interrupt_check, {}, true};
  const auto look = [&] {
    const auto now = Clock::now();
    if (now - last_look < kLook) return;
    last_look = now;
    const CUresult status = query(stream);
    if (status != CUDA_SUCCESS && status != CUDA_ERROR_NOT_READY) check(status, "a kernel of a call");
    if (ready()) return;
    if (status == CUDA_SUCCESS) throw Error(std::string(phase) + ": the kernel has ended without a word to its host");
    if (running_since == Clock::time_point{}) {
      if (started()) running_since = now;
    } else if (std::chrono::duration<double>(now - running_since).count() > limit) {
      throw TimeoutError("rank " + std::to_string(rank_) + " waited " + std::to_string(limit) +
                         " s for its own kernel in " + phase);
    }
  };
  poll_until(
      rules, phase,
      [&] {
        if (ready()) return -1;
        look();
        return ready() ? -1 : rank_;
      },
      [](int) { return std::string("its own kernel has not ended"); });
}

void DeviceWorld::wait_idle(const char* phase) {
  CUresult status = CUDA_ERROR_NOT_READY;
  wait(
      phase, [&] { return (status = query(comm_stream())) == CUDA_ERROR_NOT_READY ? rank_ : -1; },
      [](int) { return std::string("the comm stream is busy"); });
  check(status, "the comm stream");
}

bool DeviceWorld::has_delivered() const noexcept {
  if (!nodes_) return true;
  const OutsideCapture outside_capture;
  try {
    nodes_->quiet(comm_stream());
  } catch (const Error&) {
    return false;
  }
  const auto end = std::chrono::steady_clock::now() + kQuietTime;
  CUresult status = query(comm_stream());
  while (status == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    status = query(comm_stream());
  }
  return status == CUDA_SUCCESS;
}

void DeviceWorld::depart(bool all_on_comm_stream, const std::string& failure) noexcept {
  attendant_.reset();
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (device_heap_) device_heap_->close();
  if (talk_) {
    bool idle = all_on_comm_stream && comm_stream_ && query(comm_stream()) == CUDA_SUCCESS;
    if (idle && failure.empty()) idle = has_delivered();
    talk_->depart(idle, failure);
  }
  if (channel_) channel_->close();
  forget_local_segments(uid_);
}

DeviceWorld::~DeviceWorld() { release(); }

void DeviceWorld::release() noexcept {
  if (forks_ != fork_count()) {
    (void)talk_.release();
    (void)channel_.release();    // its descriptors are closed in a child already
    (void)attendant_.release();  // whose thread is the parent's
    return;
  }
  depart(false, {});
  if (!comm_stream_) return;
  const OnDevice on_device = OnDevice::quiet(device_);
  if (!on_device) return;
  // Kernels of this rank may still read and write all of it.
  std::vector<std::shared_ptr<void>> things{workspace_, nodes_memory_, network_lease_,
                                            words_,     comm_stream_,  copy_stream_};
  for (Peer& peer : peers_) things.insert(things.end(), peer.segments.begin(), peer.segments.end());
  if (device_heap_) device_heap_->keep_for_graphs(things);
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
