// Inputs of the stress of random calls, and what must come of them.
#include "gpu_stress.hpp"

namespace deep_moe::test {

TensorView StressRank::upload(const Arena::Piece& piece, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = TensorView::contiguous(piece.device, dtype, shape);
  view.device = gpu_of(me());
  if (piece.bytes == 0) {
    view.data = nullptr;  // as torch has it
    return view;
  }
  cuda(cudaMemcpyAsync(piece.device, piece.host, piece.bytes, cudaMemcpyHostToDevice, stream_));
  return view;
}

// What the tensor holds when the stream comes here; valid until settle(). Pinned memory: no copy waits for a kernel.
const char* StressRank::download(const TensorView& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return nullptr;
  const Arena::Piece piece = down_->take(tensor.num_bytes());
  cuda(cudaMemcpyAsync(piece.host, tensor.data, piece.bytes, cudaMemcpyDeviceToHost, stream_));
  return piece.host;
}

StressRank::Inputs StressRank::make_inputs(const Plan& plan) {
  const std::int64_t tokens = plan.tokens[me()];
  const auto take = [&](std::int64_t bytes) { return up_->take(static_cast<std::size_t>(bytes)); };
  Inputs inputs;
  const Arena::Piece x = take(tokens * plan.row_bytes()), scales = take(tokens * plan.num_scales * 4);
  const Arena::Piece ids = take(tokens * plan.topk * (plan.narrow_ids ? 4 : 8)), weights = take(tokens * plan.topk * 4);
  for (std::int64_t token = 0; token < tokens; ++token) {
    fill_row(x.host + token * plan.row_bytes(), plan.row_bytes(), plan.seed, me(), token);
    fill_row(scales.host + token * plan.num_scales * 4, plan.num_scales * 4, plan.seed + 1, me(), token);
    for (std::int64_t k = 0; k < plan.topk; ++k) {
      const std::int64_t at = token * plan.topk + k, id = plan.id(me(), token, k);
      if (plan.narrow_ids) {
        reinterpret_cast<std::int32_t*>(ids.host)[at] = static_cast<std::int32_t>(id);
      } else {
        reinterpret_cast<std::int64_t*>(ids.host)[at] = id;
      }
      reinterpret_cast<float*>(weights.host)[at] = plan.weight(me(), token, k);
    }
  }
  inputs.x = upload(x, plan.dtype, {tokens, plan.hidden});
  if (plan.num_scales > 0) inputs.scales = upload(scales, DType::kFloat32, {tokens, plan.num_scales});
  inputs.ids = upload(ids, plan.narrow_ids ? DType::kInt32 : DType::kInt64, {tokens, plan.topk});
  if (plan.weights) inputs.weights = upload(weights, DType::kFloat32, {tokens, plan.topk});
  return inputs;
}

// This rank's rows for a combine; past those that arrived, NaN.
TensorView StressRank::make_y(const Live& live, std::uint64_t seed, DType dtype) {
  const std::int64_t rows = live.result.recv_x.data.view.shape[0], hidden = live.plan.hidden;
  const std::int64_t arrived = static_cast<std::int64_t>(live.routes->rows[me()].size());
  const std::int64_t bytes = hidden * static_cast<std::int64_t>(dtype_bytes(dtype));
  const Arena::Piece y = up_->take(static_cast<std::size_t>(rows * bytes));
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row >= arrived) {
      std::memset(y.host + row * bytes, 0xff, static_cast<std::size_t>(bytes));
      continue;
    }
    const std::uint64_t row_seed = mix(seed, 10, me(), row);
    for (std::int64_t h = 0; h < hidden; ++h) store_number(y.host + row * bytes, dtype, h, small_number(row_seed, h));
  }
  return upload(y, dtype, {rows, hidden});
}

TensorView StressRank::make_bias(const Plan& plan, std::uint64_t seed, int which, DType dtype) {
  const std::int64_t tokens = plan.tokens[me()];
  const std::int64_t bytes = plan.hidden * static_cast<std::int64_t>(dtype_bytes(dtype));
  const Arena::Piece bias = up_->take(static_cast<std::size_t>(tokens * bytes));
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::uint64_t row_seed = mix(seed, 11 + which, me(), token);
    for (std::int64_t h = 0; h < plan.hidden; ++h)
      store_number(bias.host + token * bytes, dtype, h, small_number(row_seed, h));
  }
  return upload(bias, dtype, {tokens, plan.hidden});
}

LayoutResult StressRank::layout(const Plan& plan, const std::shared_ptr<const Routes>& routes, const TensorView& ids) {
  StreamOptions streams;
  LayoutResult result =
      on_streams(&streams, [&] { return buffer_->get_dispatch_layout(ids, plan.num_experts, streams); });
  const char* per_rank = download(result.num_tokens_per_rank.view);
  const char* per_expert = download(result.num_tokens_per_expert.view);
  const char* in_rank = download(result.is_token_in_rank.view);
  later([=, this] {
    const int num_ranks = plan.num_ranks();
    std::vector<std::int32_t> ranks(static_cast<std::size_t>(num_ranks)), experts(plan.num_experts);
    const std::int64_t tokens = plan.tokens[me()];
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (std::int64_t k = 0; k < plan.topk; ++k)
        if (const std::int64_t id = plan.id(me(), token, k); id >= 0) ++experts[static_cast<std::size_t>(id)];
      for (int rank = 0; rank < num_ranks; ++rank) {
        const bool goes = routes->index[me()][static_cast<std::size_t>(token * num_ranks + rank)] >= 0;
        ranks[static_cast<std::size_t>(rank)] += goes ? 1 : 0;
        expect(in_rank[token * num_ranks + rank] == (goes ? 1 : 0), "layout: is_token_in_rank");
      }
    }
    expect(std::memcmp(per_rank, ranks.data(), 4 * ranks.size()) == 0, "layout: num_tokens_per_rank");
    expect(std::memcmp(per_expert, experts.data(), 4 * experts.size()) == 0, "layout: num_tokens_per_expert");
  });
  return result;
}

void StressRank::check_rows(const Plan& plan, std::shared_ptr<const Routes> routes, std::uint64_t row_seed,
                            const OwnedPayload& rows) {
  const std::int64_t arrived = static_cast<std::int64_t>(routes->rows[me()].size());
  expect(rows.data.view.shape[0] == (plan.worst > 0 ? plan.worst : arrived), "number of rows");
  const char *data = download(rows.data.view), *scales = download(rows.scales.view);
  const std::string what = "call " + std::to_string(calls_) + ", rank " + std::to_string(me()) + ": ";
  later([=, this] {
    std::vector<char> expected(static_cast<std::size_t>(std::max(plan.row_bytes(), 4 * plan.num_scales)));
    const auto check = [&](const char* got, std::int64_t bytes, std::uint64_t seed, const char* name) {
      for (std::int64_t row = 0; bytes > 0 && row < arrived; ++row) {
        const auto [src, token] = routes->rows[me()][static_cast<std::size_t>(row)];
        fill_row(expected.data(), bytes, seed, src, token);
        expect(std::memcmp(got + row * bytes, expected.data(), static_cast<std::size_t>(bytes)) == 0,
               what + name + " of row " + std::to_string(row));
      }
    };
    check(data, plan.row_bytes(), row_seed, "x");
    check(scales, 4 * plan.num_scales, row_seed + 1, "scales");
  });
}

void StressRank::check_ids(const Plan& plan, std::shared_ptr<const Routes> routes, const DispatchResult& result) {
  const char *ids = download(result.recv_topk_idx.view), *weights = download(result.recv_topk_weights.view);
  const char* sources = download(result.handle.recv_src_idx.view);
  const std::string what = "call " + std::to_string(calls_) + ", rank " + std::to_string(me()) + ": ";
  const layout::ExpertBlocks blocks(static_cast<int>(plan.num_experts), plan.num_ranks());
  const int first = blocks.first_expert(me()), num_local = blocks.num_local_experts(me());
  if (plan.worst == 0) {
    expect(static_cast<int>(result.num_recv_tokens_per_expert.size()) == num_local, what + "length of the counts");
    for (int local = 0; local < num_local; ++local)
      expect(result.num_recv_tokens_per_expert[static_cast<std::size_t>(local)] ==
                 routes->entries[static_cast<std::size_t>(first + local)],
             what + "count of an expert");
  }
  const std::int64_t total = result.recv_x.data.view.shape[0];
  expect((ids != nullptr) == (total > 0 && !plan.by_mask), what + "ids are there if they were sent");
  later([=, this] {
    const auto& rows = routes->rows[me()];
    for (std::int64_t row = 0; row < total; ++row) {
      const bool real = row < static_cast<std::int64_t>(rows.size());
      const auto [src, token] = real ? rows[static_cast<std::size_t>(row)] : std::pair(0, std::int64_t{-1});
      expect(reinterpret_cast<const std::int32_t*>(sources)[row] == token, what + "source of a row");
      for (std::int64_t k = 0; k < plan.topk && !plan.by_mask; ++k) {
        std::int64_t local = real ? plan.id(src, token, k) - first : -1;
        if (local < 0 || local >= num_local) local = -1;
        const std::int64_t at = row * plan.topk + k;
        const std::int64_t got = plan.narrow_ids ? reinterpret_cast<const std::int32_t*>(ids)[at]
                                                 : reinterpret_cast<const std::int64_t*>(ids)[at];
        expect(got == local, what + "id in row " + std::to_string(row));
        if (plan.weights)
          expect(reinterpret_cast<const float*>(weights)[at] == (local >= 0 ? plan.weight(src, token, k) : 0.0f),
                 what + "weight in row " + std::to_string(row));
      }
    }
  });
}

void StressRank::check_sums(const Plan& plan, std::shared_ptr<const Routes> routes, std::uint64_t seed, DType dtype,
                            int num_biases, const TensorView& sums, const TensorView& weights) {
  const char *got = download(sums), *got_weights = download(weights);
  const std::string what = "call " + std::to_string(calls_) + ", rank " + std::to_string(me()) + ": ";
  const bool with_weights = weights.defined();
  later([=, this] {
    const int num_ranks = plan.num_ranks();
    const std::size_t bytes = static_cast<std::size_t>(plan.hidden) * dtype_bytes(dtype);
    std::vector<char> expected(bytes);
    for (std::int64_t token = 0; token < plan.tokens[me()]; ++token) {
      std::vector<std::uint64_t> parts;
      for (int which = 0; which < num_biases; ++which) parts.push_back(mix(seed, 11 + which, me(), token));
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::int64_t row = routes->index[me()][static_cast<std::size_t>(token * num_ranks + rank)];
        if (row >= 0) parts.push_back(mix(seed, 10, rank, row));
      }
      for (std::int64_t h = 0; h < plan.hidden; ++h) {
        int sum = 0;
        for (const std::uint64_t part : parts) sum += small_number(part, h);
        store_number(expected.data(), dtype, h, sum);
      }
      expect(std::memcmp(got + static_cast<std::size_t>(token) * bytes, expected.data(), bytes) == 0,
             what + "sum of token " + std::to_string(token));
      for (std::int64_t k = 0; with_weights && k < plan.topk; ++k)
        expect(reinterpret_cast<const float*>(got_weights)[token * plan.topk + k] ==
                   (plan.id(me(), token, k) >= 0 ? plan.weight(me(), token, k) : 0.0f),
               what + "weight of token " + std::to_string(token));
    }
  });
}

}  // namespace deep_moe::test
