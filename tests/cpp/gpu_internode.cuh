// Ranks on several nodes that are threads of this process and go round the GPUs: a World for ids and streams, with the
// words of a node for each node and network memory that all ranks map.
#pragma once

#include "gpu_sums.cuh"
#include "kernels/internode/api.hpp"

namespace deep_moe::test {

namespace internode = kernels::internode;

struct RailShape {
  int num_nodes, num_local_ranks;
  int num_slots = 2;
  std::size_t slot_bytes = 4096;
  bool interleaved = false;  // rank r is on node r % N

  int num_ranks() const { return num_nodes * num_local_ranks; }
  int node_of(int rank) const { return interleaved ? rank % num_nodes : rank / num_local_ranks; }
  int local_of(int rank) const { return interleaved ? rank / num_nodes : rank % num_local_ranks; }
  int rank_at(int node, int local) const {
    return interleaved ? local * num_nodes + node : node * num_local_ranks + local;
  }
};

class RailWorld {
 public:
  struct PerRank {
    internode::RailDomain domain;
    std::int32_t *position = nullptr, *prefix = nullptr, *rows_out = nullptr, *rows_in = nullptr, *recv = nullptr,
                 *map = nullptr;
    char** heaps = nullptr;   // segments of the node's ranks, with the heaps of Rows
    char** inputs = nullptr;  // the same with the inputs of Sums
  };

  RailWorld(World& world, Rows& rows, const RailShape& shape, std::int64_t max_tokens)
      : world_(world),
        rows_(rows),
        shape_(shape),
        map_rows_(max_tokens * shape.num_nodes),
        ranks_(static_cast<std::size_t>(shape.num_ranks())) {
    const int N = shape.num_nodes, L = shape.num_local_ranks, R = shape.num_ranks();
    const layout::RailLayout rail(
        {N, shape.num_slots, layout::align_up(shape.slot_bytes, layout::kAlign), layout::rail_record_bytes(N, L)});
    const layout::RailWords words(N, L);
    std::vector<char*> workspaces, rail_words;
    for (int r = 0; r < R; ++r) {
      const OnGpuOf on(r);
      if (r < num_gpus()) internode::prepare();
      network_.blocks[r] = zeroed(r, rail.bytes());
      workspaces.push_back(zeroed(r, layout::device_workspace_bytes(L)));
      rail_words.push_back(zeroed(r, words.bytes()));
    }
    for (int r = 0; r < R; ++r) {
      PerRank& rank = ranks_[r];
      internode::RailDomain& domain = rank.domain;
      domain.node = world.rank(r).domain;  // mapped words of the host, which are laid out for more ranks
      domain.node.rank = shape.local_of(r);
      domain.node.num_ranks = L;
      domain.node.words = layout::DeviceLayout(L);
      domain.num_nodes = N;
      domain.own_node = shape.node_of(r);
      domain.rail = rail;
      domain.words = words;
      for (int local = 0; local < L; ++local) {
        const int mate = shape.rank_at(domain.own_node, local);
        domain.node.workspaces[local] = workspaces[mate];
        domain.workspaces[local] = rail_words[mate];
        for (int node = 0; node < N; ++node)
          domain.rank_table[node * L + local] = static_cast<std::uint8_t>(shape.rank_at(node, local));
      }
      const auto words_of = [&](std::int64_t count) {
        return reinterpret_cast<std::int32_t*>(rows.allocate(r, 4 * count + 4));
      };
      rank.position = words_of(max_tokens * (R + N));
      rank.prefix = words_of(R * R);
      rank.rows_out = words_of(N);
      rank.rows_in = words_of(N);
      rank.recv = words_of(world.num_experts());
      rank.map = words_of(map_rows_ * L);
      rank.heaps = table(r, domain.own_node, [&](int mate, std::vector<char*>& bases, int at) {
        bases[at + kHeapSegment] = rows.rank(mate).heap;
      });
    }
    sync_gpus();
  }
  void use_inputs(Sums& sums) {
    for (int r = 0; r < shape_.num_ranks(); ++r)
      ranks_[r].inputs = table(r, shape_.node_of(r), [&](int mate, std::vector<char*>& bases, int at) {
        bases[at + kInputSegment] = sums.rank(mate).x;
        bases[at + kInputSegment + 1] = reinterpret_cast<char*>(sums.rank(mate).weights);
      });
  }

  PerRank& rank(int r) { return ranks_[r]; }
  const internode::MappedBlocks& network() const { return network_; }
  const RailShape& shape() const { return shape_; }

  internode::NotifyArgs notify_args(int r, std::uint32_t sequence) {
    PerRank& rank = ranks_[r];
    internode::NotifyArgs args;
    args.signature.kind = static_cast<std::uint32_t>(layout::CallKind::kDispatch);
    args.signature.num_experts = world_.num_experts();
    args.signature.topk = world_.topk();
    args.place = rows_.place(r, rows_.hard_capacity(r));
    args.sequence = sequence;
    args.ids = world_.args(r, 0).ids;
    args.num_experts = world_.num_experts();
    args.position = rank.position;
    args.rank_prefix_matrix = rank.prefix;
    args.rows_out = rank.rows_out;
    args.rows_in_prefix = rank.rows_in;
    args.recv_per_expert = rank.recv;
    return args;
  }
  // The same before a call whose routes are known.
  internode::NotifyArgs start_args(int r, layout::CallKind kind, std::uint32_t sequence) {
    internode::NotifyArgs args;
    args.signature.kind = static_cast<std::uint32_t>(kind);
    args.place = rows_.place(r, rows_.hard_capacity(r));
    args.sequence = sequence;
    if (kind != layout::CallKind::kCombine) return args;
    args.place = {kInputSegment, 0, 256, 0};
    args.weight_place = {kInputSegment + 1, 0, 12, 0};
    return args;
  }
  internode::Routes routes(int r, char** segments) {
    const PerRank& rank = ranks_[r];
    const int R = shape_.num_ranks(), columns = R + shape_.num_nodes;
    return {rank.position, rank.position + R,    columns, columns, rank.prefix, rank.rows_out, rank.rows_in,
            segments,      rows_.shape().num_sms};
  }
  internode::DispatchArgs dispatch_args(int r, bool cached = false) {
    const kernels::DispatchArgs same = rows_.dispatch_args(r);
    internode::DispatchArgs args;
    args.routes = routes(r, ranks_[r].heaps);
    args.x = same.x;
    args.num_tokens = same.num_tokens;
    args.row_bytes = same.row_bytes;
    args.row_stride = same.row_stride;
    args.scales = same.scales;
    if (cached) return args;
    args.ids = same.ids;
    args.num_experts = same.num_experts;
    args.topk_weights = same.topk_weights;
    args.has_weights = rows_.shape().weights;
    args.weight_stride = same.weight_stride;
    args.send_nvl_index = ranks_[r].map;
    args.map_rows = map_rows_;
    return args;
  }
  internode::CombineArgs combine_args(int r, Sums& sums) {
    const kernels::CombineArgs same = sums.args(r, 0);
    internode::CombineArgs args;
    args.routes = routes(r, ranks_[r].inputs);
    args.type = same.type;
    args.num_tokens = same.num_tokens;
    args.hidden = same.hidden;
    args.send_nvl_index = ranks_[r].map;
    for (int b = 0; b < 2; ++b) args.bias[b] = same.bias[b], args.bias_stride[b] = same.bias_stride[b];
    args.out = same.out;
    args.out_stride = same.out_stride;
    args.topk = same.topk;
    args.combined_topk_weights = same.combined_topk_weights;
    return args;
  }

  virtual ~RailWorld() = default;

  // Launches; over another network where these are overridden.
  virtual void notify(int r, const internode::NotifyArgs& args) {
    internode::notify(ranks_[r].domain, network_, args, world_.rank(r).stream);
  }
  virtual void dispatch(int r, const internode::DispatchArgs& args) {
    internode::dispatch(ranks_[r].domain, network_, args, world_.rank(r).stream);
  }
  virtual void combine(int r, const internode::CombineArgs& args) {
    internode::combine(ranks_[r].domain, network_, args, world_.rank(r).stream);
  }
  virtual void quiet(int) {}

  // What a reset does to the rings.
  void restart(std::uint64_t generation) {
    for (int r = 0; r < shape_.num_ranks(); ++r) quiet(r);
    for (int r = 0; r < shape_.num_ranks(); ++r) {
      const OnGpuOf on(r);
      internode::restart_rings(ranks_[r].domain, generation, world_.rank(r).stream);
      cuda(cudaStreamSynchronize(world_.rank(r).stream));
    }
  }

  // On every rank, none waiting for its host in between.
  void dispatch_all() {
    run(shape_.num_ranks(), [&](int r) {
      const auto stream = world_.rank(r).stream;
      notify(r, notify_args(r, 0));
      dispatch(r, dispatch_args(r));
      cuda(cudaStreamSynchronize(stream));
    });
  }
  void cached_all() {
    run(shape_.num_ranks(), [&](int r) {
      const auto stream = world_.rank(r).stream;
      notify(r, start_args(r, layout::CallKind::kCachedDispatch, 0));
      dispatch(r, dispatch_args(r, true));
      cuda(cudaStreamSynchronize(stream));
    });
  }
  void combine_all(Sums& sums) {
    run(shape_.num_ranks(), [&](int r) {
      const auto stream = world_.rank(r).stream;
      notify(r, start_args(r, layout::CallKind::kCombine, 0));
      combine(r, combine_args(r, sums));
      cuda(cudaStreamSynchronize(stream));
    });
  }

  // Empty where no rank has reported an error.
  std::string errors() {
    std::string text;
    for (int r = 0; r < shape_.num_ranks(); ++r) {
      const layout::ErrorRecord& error = world_.error(r);
      if (error.kind != 0)
        text += "rank " + std::to_string(r) + ": kind " + std::to_string(error.kind) + ", phase " +
                layout::wait_phase_name(static_cast<layout::WaitPhase>(error.phase)) + ", peer " +
                std::to_string(error.peer) + ", expected " + std::to_string(error.expected) + "; ";
    }
    return text;
  }
  // What notify has found out, against the host.
  std::string check_routes() {
    const int R = shape_.num_ranks(), N = shape_.num_nodes, L = shape_.num_local_ranks;
    const Counts& counts = rows_.counts();
    std::vector<std::vector<std::int32_t>> out(R, std::vector<std::int32_t>(N, 0));
    for (int r = 0; r < R; ++r) {
      const std::int64_t T = world_.rank(r).num_tokens;
      std::vector<std::int32_t> expected;
      for (std::int64_t t = 0; t < T; ++t) {
        for (int q = 0; q < R; ++q) expected.push_back(counts.layout[r].position[t * R + q]);
        for (int node = 0; node < N; ++node) {
          bool goes = false;
          for (int local = 0; local < L; ++local)
            goes = goes || counts.layout[r].position[t * R + shape_.rank_at(node, local)] >= 0;
          expected.push_back(goes && node != shape_.node_of(r) ? out[r][node]++ : -1);
        }
      }
      if (world_.read(r, ranks_[r].position, T * (R + N)) != expected) return "positions of rank " + std::to_string(r);
      if (world_.read(r, ranks_[r].rows_out, N) != out[r]) return "rows out of rank " + std::to_string(r);
    }
    for (int r = 0; r < R; ++r) {
      std::vector<std::int32_t> rows_in;
      for (int node = 0; node < N; ++node) {
        const int peer = shape_.rank_at(node, shape_.local_of(r));
        rows_in.push_back((node > 0 ? rows_in.back() : 0) + (peer == r ? 0 : out[peer][shape_.node_of(r)]));
      }
      if (world_.read(r, ranks_[r].prefix, R * R) != counts.prefix) return "prefix sums of rank " + std::to_string(r);
      if (world_.read(r, ranks_[r].rows_in, N) != rows_in) return "rows to rank " + std::to_string(r);
    }
    return {};
  }

 private:
  template <typename Fill>
  char** table(int r, int node, Fill fill) {
    std::vector<char*> bases(static_cast<std::size_t>(shape_.num_ranks()) * layout::kMaxSegments, nullptr);
    for (int local = 0; local < shape_.num_local_ranks; ++local) {
      const int mate = shape_.rank_at(node, local);
      fill(mate, bases, mate * layout::kMaxSegments);
    }
    char** at = reinterpret_cast<char**>(rows_.allocate(r, static_cast<std::int64_t>(bases.size() * sizeof(char*))));
    cuda(cudaMemcpy(at, bases.data(), bases.size() * sizeof(char*), cudaMemcpyDefault));
    return at;
  }
  char* zeroed(int r, std::size_t bytes) {
    const OnGpuOf on(r);
    char* memory = rows_.allocate(r, static_cast<std::int64_t>(bytes));
    cuda(cudaMemset(memory, 0, bytes));
    return memory;
  }

  World& world_;
  Rows& rows_;
  const RailShape shape_;
  const std::int64_t map_rows_;
  internode::MappedBlocks network_;
  std::vector<PerRank> ranks_;
};

}  // namespace deep_moe::test
