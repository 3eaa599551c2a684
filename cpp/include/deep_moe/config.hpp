// Tuning numbers and size hints, as DeepEP's V1 users know them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_moe {

// On the CPU backend the numbers are checked and otherwise unused.
struct Config {
  int num_sms = 20;
  int num_max_nvl_chunked_send_tokens = 6;
  int num_max_nvl_chunked_recv_tokens = 256;
  int num_max_rdma_chunked_send_tokens = 6;
  int num_max_rdma_chunked_recv_tokens = 256;

  Config() = default;
  // Throws ArgumentError where send >= recv, or rdma send > rdma recv / 2; rdma recv is rounded up to a multiple of
  // rdma send.
  Config(int num_sms, int nvl_send, int nvl_recv, int rdma_send, int rdma_recv);

  // Bytes of heap with which no growth is needed for one dispatch of up to kHintTokens tokens a rank with rows of
  // `hidden_bytes` bytes, all of them coming to one rank's heap together with a staged combine.
  std::size_t get_nvl_buffer_size_hint(std::size_t hidden_bytes, int num_ranks) const;
  // Bytes of the rings between nodes with which a chunk takes as many rows of `hidden_bytes` bytes as it ever does, at
  // any number of tokens; 0 on one node. A node has 8 ranks, or DEEP_MOE_LOCAL_RANKS.
  std::size_t get_rdma_buffer_size_hint(std::size_t hidden_bytes, int num_ranks) const;
};

// The tuned defaults for a rank count; every rank count >= 1 is accepted (the next tabled count is taken).
Config dispatch_config(int num_ranks);
Config combine_config(int num_ranks);

// Bytes of low-latency staging for M tokens a rank, rows of `hidden` elements, R ranks and E experts.
std::size_t low_latency_size_hint(std::int64_t num_max_dispatch_tokens_per_rank, std::int64_t hidden, int num_ranks,
                                  std::int64_t num_experts);

}  // namespace deep_moe
