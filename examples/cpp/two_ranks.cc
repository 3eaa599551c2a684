// Two ranks as two processes, without Python: a token goes to the ranks that own its experts, the "experts" double it,
// and the owner of the token gets the sum back.
//
//   cmake --preset example && cmake --build --preset example && build/example/examples/two_ranks
//
// Flow of one layer: dispatch -> experts on recv_x -> combine. All ranks make the same calls in the same order.
#include <deep_moe/buffer.hpp>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <vector>

namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 6, kHidden = 64, kExperts = 8, kTopk = 2;

// The only thing an application has to bring: an all-gather, here over a socket pair. MPI_Allgather is as good.
void all_gather(int rank, int socket, const void* send, void* recv, std::size_t bytes) {
  char* out = static_cast<char*>(recv);
  std::memcpy(out + static_cast<std::size_t>(rank) * bytes, send, bytes);
  if (::send(socket, send, bytes, 0) != static_cast<ssize_t>(bytes)) throw std::runtime_error("send failed");
  char* other = out + static_cast<std::size_t>(1 - rank) * bytes;
  if (::recv(socket, other, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) throw std::runtime_error("recv failed");
}

int run_rank(int rank, int socket) {
  const deep_moe::Bootstrap bootstrap{rank, kRanks, [&](const void* send, void* recv, std::size_t bytes) {
                                        all_gather(rank, socket, send, recv, bytes);
                                      }};
  deep_moe::BufferOptions options;
  options.num_nvl_bytes = 1 << 20;
  options.timeout_seconds = 10;
  deep_moe::Buffer buffer(bootstrap, options);

  // Every element of token t on rank r is 10 r + t; its experts are spread over both ranks.
  std::vector<float> x(kTokens * kHidden);
  std::vector<std::int64_t> topk_idx(kTokens * kTopk);
  for (std::int64_t token = 0; token < kTokens; ++token) {
    for (std::int64_t h = 0; h < kHidden; ++h) x[token * kHidden + h] = static_cast<float>(10 * rank + token);
    topk_idx[token * kTopk] = (token + rank) % kExperts;
    topk_idx[token * kTopk + 1] = token % 3 == 0 ? -1 : (token * 3 + 4) % kExperts;
  }

  deep_moe::DispatchArgs dispatch;
  dispatch.x.data = deep_moe::TensorView::contiguous(x.data(), deep_moe::DType::kFloat32, {kTokens, kHidden});
  dispatch.topk_idx = deep_moe::TensorView::contiguous(topk_idx.data(), deep_moe::DType::kInt64, {kTokens, kTopk});
  dispatch.num_experts = kExperts;
  const deep_moe::DispatchResult received = buffer.dispatch(dispatch);

  const std::int64_t num_rows = received.recv_x.data.view.shape[0];
  float* rows = received.recv_x.data.as<float>();  // in the heap, and ours: changed in place, it is combined in place
  for (std::int64_t i = 0; i < num_rows * kHidden; ++i) rows[i] *= 2;

  deep_moe::CombineArgs combine;
  combine.x = received.recv_x.data.view;
  combine.handle = received.handle.view();
  const deep_moe::CombineResult combined = buffer.combine(combine);

  for (std::int64_t token = 0; token < kTokens; ++token) {
    const std::int64_t first = topk_idx[token * kTopk], second = topk_idx[token * kTopk + 1];
    const bool both = second >= 0 && first / (kExperts / kRanks) != second / (kExperts / kRanks);
    const float expected = x[token * kHidden] * 2 * (both ? 2 : 1);
    const float got = combined.combined_x.as<float>()[token * kHidden];
    if (got != expected) {
      std::fprintf(stderr, "rank %d, token %lld: got %g, expected %g\n", rank, static_cast<long long>(token), got,
                   expected);
      return 1;
    }
  }
  std::printf("rank %d: %lld tokens out, %lld rows in, %lld tokens back, all right\n", rank,
              static_cast<long long>(kTokens), static_cast<long long>(num_rows), static_cast<long long>(kTokens));
  return 0;
}

}  // namespace

int main() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 1;
  const pid_t child = ::fork();
  if (child < 0) return 1;
  const int rank = child == 0 ? 1 : 0;
  int status = 1;
  try {
    status = run_rank(rank, sockets[rank]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  }
  std::fflush(nullptr);
  if (rank == 1) ::_exit(status);
  int child_status = 0;
  ::waitpid(child, &child_status, 0);
  return status != 0 || !WIFEXITED(child_status) || WEXITSTATUS(child_status) != 0;
}
