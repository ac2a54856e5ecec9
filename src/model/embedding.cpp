#include "model/embedding.h"

#include <span>

#include "base/error.h"

namespace lm {

void embedding_forward(const Context& context, const View& table, const DeviceBatch& batch, const View& x) {
  context.kernels.gather_rows({.table = table.data,
                               .index = batch.token,
                               .out = x.data,
                               .rows = batch.tokens,
                               .width = x.columns,
                               .dtype = context.dtype},
                              context.stream);
  zero_surplus(context, x, batch.tokens);
}

EmbeddingGradient::EmbeddingGradient(const ModelSpec& spec, int64_t max_rows, int64_t max_tokens,
                                     DeviceType device)
    : spec_(spec),
      max_rows_(max_rows),
      slot_of_token_(static_cast<size_t>(spec.vocab), -1),
      sums_(device, max_rows * spec.hidden * static_cast<int64_t>(sizeof(float))),
      index_(device, device == DeviceType::kCpu ? 0 : (max_tokens + 2 * max_rows + 3) * 4) {}

void EmbeddingGradient::begin(const Context& context, const std::vector<Batch>& micro_batches) {
  for (const int32_t token : rows_) slot_of_token_[static_cast<size_t>(token)] = -1;
  rows_.clear();
  for (const Batch& batch : micro_batches) {
    for (const int32_t token : batch.token) {
      int32_t& slot = slot_of_token_[static_cast<size_t>(token)];
      if (slot >= 0 || token == spec_.pad_token) continue;
      slot = static_cast<int32_t>(rows_.size());
      rows_.push_back(token);
    }
  }
  const auto slots = static_cast<int64_t>(rows_.size());
  LM_CHECK(slots <= max_rows_, "distinct tokens of a step");
  micro_.resize(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const std::vector<int32_t>& token = micro_batches[m].token;
    micro_[m].tokens = std::ssize(token);
    std::vector<int32_t>& index = micro_[m].order_and_start;
    index.assign(token.size() + static_cast<size_t>(slots) + 1, 0);
    const std::span<int32_t> order(index.data(), token.size()),
        start(index.begin() + std::ssize(token), index.end());
    for (const int32_t id : token) {
      if (id != spec_.pad_token) ++start[static_cast<size_t>(slot_of_token_[static_cast<size_t>(id)]) + 1];
    }
    for (size_t s = 0; s + 1 < start.size(); ++s) start[s + 1] += start[s];
    std::vector<int32_t> next(start.begin(), start.end() - 1);
    for (size_t t = 0; t < token.size(); ++t) {
      if (token[t] == spec_.pad_token) continue;
      const auto slot = static_cast<size_t>(slot_of_token_[static_cast<size_t>(token[t])]);
      order[static_cast<size_t>(next[slot]++)] = static_cast<int32_t>(t);
    }
  }
  zero_bytes(sums_.data(), slots * spec_.hidden * static_cast<int64_t>(sizeof(float)), context.stream);
}

void EmbeddingGradient::add(const Context& context, size_t micro, const View& dx) {
  const Slots& slots = micro_[micro];
  const int32_t* order = slots.order_and_start.data();
  if (context.device == DeviceType::kCuda) {
    context.uploads.send(index_.data(), order, std::ssize(slots.order_and_start) * 4, context.stream);
    order = reinterpret_cast<const int32_t*>(index_.data());
  }
  context.kernels.sum_rows({.source = dx.data,
                            .order = order,
                            .start = order + slots.tokens,
                            .sums = reinterpret_cast<float*>(sums_.data()),
                            .slots = static_cast<int64_t>(rows_.size()),
                            .width = spec_.hidden,
                            .dtype = context.dtype},
                           context.stream);
}

void EmbeddingGradient::finish(const Context& context, const View& gradient) {
  const int32_t* rows = rows_.data();
  if (context.device == DeviceType::kCuda) {
    context.uploads.send(index_.data(), rows, std::ssize(rows_) * 4, context.stream);
    rows = reinterpret_cast<const int32_t*>(index_.data());
  }
  context.kernels.add_rows({.sums = reinterpret_cast<const float*>(sums_.data()),
                            .row = rows,
                            .gradient = gradient.data,
                            .slots = static_cast<int64_t>(rows_.size()),
                            .width = spec_.hidden,
                            .gradient_dtype = gradient.dtype},
                           context.stream);
}

}  // namespace lm
