#include <deep_moe/config.hpp>

#include <algorithm>
#include <iterator>
#include <string>

#include <deep_moe/error.hpp>

#include "layout/direct_words.hpp"
#include "layout/low_latency_words.hpp"
#include "layout/rail.hpp"
#include "layout/rows.hpp"
#include "runtime/topology.hpp"

namespace deep_moe {
namespace {

constexpr int kDefaultNumSms = 20;
constexpr int kRanksPerNode = 8;
constexpr std::int64_t kHintTokens = 4096;
constexpr std::int64_t kHintTopk = 8;
constexpr std::size_t kHintRailTopk = 16;
constexpr std::int64_t kHintLowLatencyTopk = 16;
constexpr std::int64_t kUsualTopk = 8;

struct Tuned {
  int num_ranks, nvl_send, nvl_recv, rdma_send, rdma_recv;
};

constexpr Tuned kDispatchTable[] = {
    {2, 24, 256, 6, 128},   {4, 6, 256, 6, 128},     {8, 6, 256, 6, 128},     {16, 36, 288, 20, 128},
    {24, 32, 288, 8, 128},  {32, 32, 288, 8, 128},   {48, 32, 288, 8, 128},   {64, 32, 288, 8, 128},
    {96, 20, 480, 12, 128}, {128, 20, 560, 12, 128}, {144, 32, 720, 12, 128}, {160, 28, 720, 12, 128},
};
constexpr Tuned kCombineTable[] = {
    {2, 10, 256, 6, 128}, {4, 9, 256, 6, 128},   {8, 4, 256, 6, 128},   {16, 4, 288, 12, 128},
    {24, 1, 288, 8, 128}, {32, 1, 288, 8, 128},  {48, 1, 288, 8, 128},  {64, 1, 288, 8, 128},
    {96, 1, 480, 8, 128}, {128, 1, 560, 8, 128}, {144, 2, 720, 8, 128}, {160, 2, 720, 8, 128},
};

template <std::size_t kSize>
Config tuned(const Tuned (&table)[kSize], int num_ranks) {
  if (num_ranks < 1) throw ArgumentError("num_ranks: got " + std::to_string(num_ranks) + ", expected >= 1");
  const Tuned* entry = std::find_if(std::begin(table), std::end(table),
                                    [&](const Tuned& candidate) { return candidate.num_ranks >= num_ranks; });
  if (entry == std::end(table)) entry = std::end(table) - 1;
  return Config(kDefaultNumSms, entry->nvl_send, entry->nvl_recv, entry->rdma_send, entry->rdma_recv);
}

void check_hint_arguments(std::size_t hidden_bytes, int num_ranks) {
  if (num_ranks < 1) throw ArgumentError("num_ranks: got " + std::to_string(num_ranks) + ", expected >= 1");
  if (hidden_bytes == 0) throw ArgumentError("hidden_bytes: got 0, expected the bytes of one row");
}

// Ranks of a node, as far as this process can tell.
int node_size_here(int num_ranks) {
  const std::int64_t cut = placement_here().local_ranks;
  return cut > 0 ? static_cast<int>(std::min<std::int64_t>(cut, num_ranks)) : kRanksPerNode;
}

}  // namespace

Config::Config(int num_sms_, int nvl_send, int nvl_recv, int rdma_send, int rdma_recv)
    : num_sms(num_sms_),
      num_max_nvl_chunked_send_tokens(nvl_send),
      num_max_nvl_chunked_recv_tokens(nvl_recv),
      num_max_rdma_chunked_send_tokens(rdma_send),
      num_max_rdma_chunked_recv_tokens(rdma_recv) {
  const auto check_positive = [](const char* name, int value) {
    if (value < 1) throw ArgumentError(std::string(name) + ": got " + std::to_string(value) + ", expected >= 1");
  };
  check_positive("num_sms", num_sms);
  check_positive("num_max_nvl_chunked_send_tokens", nvl_send);
  check_positive("num_max_nvl_chunked_recv_tokens", nvl_recv);
  check_positive("num_max_rdma_chunked_send_tokens", rdma_send);
  check_positive("num_max_rdma_chunked_recv_tokens", rdma_recv);
  if (nvl_send >= nvl_recv)
    throw ArgumentError("num_max_nvl_chunked_send_tokens: got " + std::to_string(nvl_send) +
                        ", expected less than num_max_nvl_chunked_recv_tokens=" + std::to_string(nvl_recv));
  if (rdma_send >= rdma_recv)
    throw ArgumentError("num_max_rdma_chunked_send_tokens: got " + std::to_string(rdma_send) +
                        ", expected less than num_max_rdma_chunked_recv_tokens=" + std::to_string(rdma_recv));
  num_max_rdma_chunked_recv_tokens = (rdma_recv + rdma_send - 1) / rdma_send * rdma_send;
  if (rdma_send > num_max_rdma_chunked_recv_tokens / 2)
    throw ArgumentError("num_max_rdma_chunked_send_tokens: got " + std::to_string(rdma_send) +
                        ", expected at most half of num_max_rdma_chunked_recv_tokens=" +
                        std::to_string(num_max_rdma_chunked_recv_tokens));
}

std::size_t Config::get_nvl_buffer_size_hint(std::size_t hidden_bytes, int num_ranks) const {
  check_hint_arguments(hidden_bytes, num_ranks);
  // Uniform routing: a token's rows go to at most min(R, K) ranks, and as many arrive as are sent.
  const std::int64_t rows = kHintTokens * std::min<std::int64_t>(num_ranks, kHintTopk);
  const layout::RowFormat format{static_cast<std::int64_t>(hidden_bytes), 0, kHintTopk, 8, 4};
  const std::size_t received = layout::RecvBlock(format, rows).total;
  const std::size_t staged = layout::align_up(static_cast<std::size_t>(rows) * hidden_bytes, layout::kAlign);
  return received + staged;
}

std::size_t Config::get_rdma_buffer_size_hint(std::size_t hidden_bytes, int num_ranks) const {
  check_hint_arguments(hidden_bytes, num_ranks);
  const int local_ranks = node_size_here(num_ranks);
  if (num_ranks <= local_ranks) return 0;
  // Rows with a 32-bit scale for every 32 values of a byte, as no usual format needs more.
  const layout::RailRow row(hidden_bytes, hidden_bytes / 8, kHintRailTopk * 8, kHintRailTopk * 4, local_ranks);
  return layout::rail_layout((num_ranks + local_ranks - 1) / local_ranks, local_ranks, layout::kChunkRows * row.stride)
      .bytes();
}

Config dispatch_config(int num_ranks) { return tuned(kDispatchTable, num_ranks); }
Config combine_config(int num_ranks) { return tuned(kCombineTable, num_ranks); }

std::size_t low_latency_size_hint(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden, int num_ranks,
                                  std::int64_t num_experts) {
  const auto check_positive = [](const char* name, std::int64_t value) {
    if (value < 1) throw ArgumentError(std::string(name) + ": got " + std::to_string(value) + ", expected >= 1");
  };
  constexpr std::int64_t kMax = std::int64_t{1} << 24;  // of each, so that no product overflows
  const auto check_size = [&](const char* name, std::int64_t value) {
    check_positive(name, value);
    if (value > kMax)
      throw ArgumentError(std::string(name) + ": got " + std::to_string(value) + ", expected at most " +
                          std::to_string(kMax));
  };
  check_size("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank);
  check_size("hidden", hidden);
  check_size("num_ranks", num_ranks);
  check_size("num_experts", num_experts);
  const std::int64_t topk = std::min(kHintLowLatencyTopk, num_experts);
  const layout::LowLatencySlot slot(num_ranks, num_max_dispatch_tokens_per_rank, topk, 2 * hidden, 0, 2 * hidden);
  // On GPUs rows travel as units; rows by expert have room for the usual top-k.
  const int back_topk = static_cast<int>(std::min(kUsualTopk, num_experts));
  const int num_local = static_cast<int>((num_experts + num_ranks - 1) / num_ranks);
  const layout::LowLatencyDispatchSlot there(num_ranks, num_max_dispatch_tokens_per_rank, num_local,
                                             static_cast<int>(topk), 2 * hidden, 0, true);
  const layout::LowLatencyCombineSlot back(num_ranks, num_max_dispatch_tokens_per_rank, back_topk, 2 * hidden,
                                           back_topk > num_ranks);
  const std::size_t one_node = layout::align_up(std::max({slot.total, there.total, back.total}), layout::kAlign);
  if (num_ranks <= node_size_here(num_ranks)) return layout::kLowLatencySlots * one_node;
  // Between nodes each pair of ranks has a part; rows back go by expert where the dispatch had no weights.
  const std::size_t row = static_cast<std::size_t>(2 * hidden);
  const std::size_t part = std::max(
      layout::DirectMessage(num_max_dispatch_tokens_per_rank, num_local, static_cast<int>(topk), 2 * hidden, 0, true)
          .bytes(num_max_dispatch_tokens_per_rank),
      layout::DirectMessage(num_max_dispatch_tokens_per_rank, static_cast<std::int64_t>(row))
          .bytes(num_max_dispatch_tokens_per_rank * std::min(back_topk, num_local)));
  return layout::kLowLatencySlots *
         std::max(one_node, static_cast<std::size_t>(num_ranks) * layout::align_up(part, layout::kAlign));
}

}  // namespace deep_moe
