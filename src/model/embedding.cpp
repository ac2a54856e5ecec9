#include "model/embedding.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/host_device.h"

namespace lm {

float embedding_scale(const EmbeddingSpec& spec, DType dtype) {
  const auto scale = static_cast<float>(spec.scale);
  return spec.round_scale ? as_stored(dtype, scale) : scale;
}

float prompt_scale(const Context& context) {
  const EmbeddingSpec& spec = context.spec.embedding;
  return spec.scales_prompt ? embedding_scale(spec, context.dtype) : 1;
}

namespace {

// The virtual tokens' rows of x become their embeddings.
void put_prompt(const Context& context, const Embedding& embedding, const DeviceBatch& batch, const View& x) {
  const float scale = prompt_scale(context);
  if (!embedding.encoder.on()) return put_virtual_rows(context, embedding.prompt, batch, x, scale);
  const View& tokens = embedding.prompt.weight;
  if (!has_virtual_rows(batch, tokens.rows)) return;
  const ArenaFrame frame(context.arena);
  const View made = encoder_forward(context, embedding.encoder, tokens);
  put_virtual_rows(context, {made, {}}, batch, x, scale);
}

// factor B[token] [T, r]; surplus rows are zero.
View table_rows(const Context& context, const TableAdapter& adapter, const DeviceBatch& batch, int64_t rows) {
  const Param& b = adapter.b;
  const View out = context.tensor(rows, b.weight.columns);
  context.kernels.gather_rows(
      {.table = b.weight.data,
       .index = batch.token,
       .out = out.data,
       .rows = batch.tokens,
       .width = out.columns,
       .scale = adapter.scale * embedding_scale(context.spec.embedding, context.dtype),
       .dtype = context.dtype},
      context.stream);
  zero_surplus(context, out, batch.tokens);
  return out;
}

void add_table_adapter(const Context& context, const TableAdapter& adapter, const DeviceBatch& batch,
                       const View& x) {
  if (!adapter.defined()) return;
  const ArenaFrame frame(context.arena);
  context.kernels.gemm(
      {.a = table_rows(context, adapter, batch, x.rows), .b = adapter.a.weight, .out = x, .addend = x},
      context.stream);
}

}  // namespace

void prompt_backward(const Context& context, const Embedding& embedding, const DeviceBatch& batch,
                     const View& dx, bool first) {
  const float scale = prompt_scale(context);
  if (!embedding.encoder.on())
    return take_virtual_gradient(context, embedding.prompt, batch, dx, first, scale);
  const ArenaFrame frame(context.arena);
  const View gradient = take_virtual_rows(context, embedding.prompt.weight.rows, batch, dx, scale);
  encoder_backward(context, embedding.encoder, embedding.prompt, gradient, first);
}

void embedding_forward(const Context& context, const Embedding& embedding, const DeviceBatch& batch,
                       const View& x) {
  write_token_rows(context, embedding.tokens, embedding.table.weight);
  context.kernels.gather_rows({.table = embedding.table.weight.data,
                               .index = batch.token,
                               .out = x.data,
                               .rows = batch.tokens,
                               .width = x.columns,
                               .scale = embedding_scale(context.spec.embedding, context.dtype),
                               .dtype = context.dtype},
                              context.stream);
  put_prompt(context, embedding, batch, x);
  zero_surplus(context, x, batch.tokens);
  add_table_adapter(context, embedding.adapter, batch, x);
  if (embedding.positions.weight.defined()) {
    context.kernels.gather_rows({.table = embedding.positions.weight.data,
                                 .index = batch.position,
                                 .out = x.data,
                                 .rows = batch.tokens,
                                 .width = x.columns,
                                 .add = true,
                                 .dtype = context.dtype},
                                context.stream);
  }
  if (embedding.dropout.on()) drop(context, embedding.dropout, batch, x, x);
}

View table_adapter_backward(const Context& context, const TableAdapter& adapter, const DeviceBatch& batch,
                            const View& dx, bool first) {
  const View out = context.tensor(dx.rows, adapter.b.weight.columns);
  context.kernels.gemm({.a = dx, .b = adapter.a.weight, .out = out, .transpose_b = true}, context.stream);
  const ArenaFrame frame(context.arena);
  add_weight_gradient(context, adapter.a.gradient, table_rows(context, adapter, batch, dx.rows), dx, first);
  return out;
}

UpdatedRows updated_rows(const ModelSpec& spec, int64_t step_tokens, int64_t max_length) {
  const int64_t tokens = std::min(spec.vocab, step_tokens);
  return {.tokens = tokens,
          .positions = std::min(spec.embedding.positions, max_length),
          .inputs = spec.embedding.inputs.width > 0 ? tokens : 0,
          .pairs = tokens};
}

UpdatedRows trained_rows(UpdatedRows rows, const BlockLayout& embedding) {
  const TensorPlace* const chosen = embedding.find("embed.tokens");
  rows.chosen = chosen == nullptr ? 0 : std::min(rows.tokens, chosen->parameter.rows);
  if (!embedding.trains("embed.lora_B")) rows.pairs = 0;
  if (!embedding.trains("embed")) rows.tokens = 0;
  if (!embedding.trains("positions")) rows.positions = 0;
  if (!embedding.trains("inputs.table")) rows.inputs = 0;
  return rows;
}

RowGradient::RowGradient(const Table& table, int64_t max_rows, int64_t max_tokens, DeviceType device)
    : table_(table),
      max_rows_(max_rows),
      slot_of_row_(static_cast<size_t>(table.rows), -1),
      sums_(device, max_rows * table.columns * static_cast<int64_t>(sizeof(float))),
      index_(device, device == DeviceType::kCpu ? 0 : (max_tokens + 2 * max_rows + 3) * 4) {}

void RowGradient::begin(const Context& context, const std::vector<Batch>& micro_batches) {
  for (const int32_t row : rows_) slot_of_row_[static_cast<size_t>(row)] = -1;
  rows_.clear();
  for (const Batch& batch : micro_batches) {
    for (const int32_t row : batch.*table_.index) {
      const int32_t place = place_of(row);
      if (place < 0) continue;
      int32_t& slot = slot_of_row_[static_cast<size_t>(place)];
      if (slot >= 0) continue;
      slot = static_cast<int32_t>(rows_.size());
      rows_.push_back(place);
    }
  }
  const auto slots = static_cast<int64_t>(rows_.size());
  LM_CHECK(slots <= max_rows_, "distinct rows of a step");
  micro_.resize(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const std::vector<int32_t>& chosen = micro_batches[m].*table_.index;
    micro_[m].tokens = std::ssize(chosen);
    std::vector<int32_t>& index = micro_[m].order_and_start;
    index.assign(chosen.size() + static_cast<size_t>(slots) + 1, 0);
    const std::span<int32_t> order(index.data(), chosen.size()),
        start(index.begin() + std::ssize(chosen), index.end());
    const auto slot_of = [&](int32_t row) {
      const int32_t place = place_of(row);
      return place < 0 ? -1 : slot_of_row_[static_cast<size_t>(place)];
    };
    for (const int32_t row : chosen) {
      const int32_t slot = slot_of(row);
      if (slot >= 0) ++start[static_cast<size_t>(slot) + 1];
    }
    for (size_t s = 0; s + 1 < start.size(); ++s) start[s + 1] += start[s];
    std::vector<int32_t> next(start.begin(), start.end() - 1);
    for (size_t t = 0; t < chosen.size(); ++t) {
      const int32_t slot = slot_of(chosen[t]);
      if (slot >= 0) order[static_cast<size_t>(next[static_cast<size_t>(slot)]++)] = static_cast<int32_t>(t);
    }
  }
  zero_bytes(sums_.data(), slots * table_.columns * static_cast<int64_t>(sizeof(float)), context.stream);
}

void RowGradient::add(const Context& context, size_t micro, const View& dx) {
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
                            .width = table_.columns,
                            .dtype = context.dtype},
                           context.stream);
}

void RowGradient::finish(const Context& context, const View& gradient, float scale) {
  const int32_t* rows = rows_.data();
  if (context.device == DeviceType::kCuda) {
    context.uploads.send(index_.data(), rows, std::ssize(rows_) * 4, context.stream);
    rows = reinterpret_cast<const int32_t*>(index_.data());
  }
  context.kernels.add_rows({.sums = reinterpret_cast<const float*>(sums_.data()),
                            .row = rows,
                            .gradient = gradient.data,
                            .slots = static_cast<int64_t>(rows_.size()),
                            .width = table_.columns,
                            .scale = scale,
                            .gradient_dtype = gradient.dtype},
                           context.stream);
}

EmbeddingGradient::EmbeddingGradient(const ModelSpec& spec, const UpdatedRows& most, int64_t max_tokens,
                                     DeviceType device, std::span<const int64_t> chosen, int64_t rank) {
  using Table = RowGradient::Table;
  const InputsSpec& inputs = spec.embedding.inputs;
  if (most.tokens > 0) {
    tokens_.emplace(Table{.rows = spec.vocab, .columns = spec.hidden, .ignored = spec.pad_token}, most.tokens,
                    max_tokens, device);
  }
  if (most.chosen > 0 && !chosen.empty()) {
    std::vector<int32_t> places(static_cast<size_t>(spec.vocab), -1);
    for (size_t i = 0; i < chosen.size(); ++i)
      places[static_cast<size_t>(chosen[i])] = static_cast<int32_t>(i);
    chosen_.emplace(Table{.rows = std::ssize(chosen),
                          .columns = spec.hidden,
                          .ignored = spec.pad_token,
                          .places = std::move(places)},
                    most.chosen, max_tokens, device);
  }
  if (most.pairs > 0 && rank > 0)
    pairs_.emplace(Table{.rows = spec.vocab, .columns = rank, .ignored = spec.pad_token}, most.pairs,
                   max_tokens, device);
  if (most.positions > 0) {
    positions_.emplace(
        Table{.rows = spec.embedding.positions, .columns = spec.hidden, .index = &Batch::position},
        most.positions, max_tokens, device);
  }
  if (most.inputs > 0) {
    inputs_.emplace(Table{.rows = inputs.vocab, .columns = inputs.all(), .ignored = spec.pad_token},
                    most.inputs, max_tokens, device);
  }
}

void EmbeddingGradient::begin(const Context& context, const std::vector<Batch>& micro_batches) {
  if (tokens_) tokens_->begin(context, micro_batches);
  if (chosen_) chosen_->begin(context, micro_batches);
  if (positions_) positions_->begin(context, micro_batches);
  if (inputs_) inputs_->begin(context, micro_batches);
  if (pairs_) pairs_->begin(context, micro_batches);
}

void EmbeddingGradient::add(const Context& context, size_t micro, const RowGradients& of) {
  if (tokens_) tokens_->add(context, micro, of.dx);
  if (chosen_) chosen_->add(context, micro, of.dx);
  if (positions_) positions_->add(context, micro, of.dx);
  if (inputs_) inputs_->add(context, micro, of.inputs);
  if (pairs_) pairs_->add(context, micro, of.pairs);
}

void EmbeddingGradient::finish(const Context& context, const Embedding& embedding) {
  const float scale = embedding_scale(context.spec.embedding, context.dtype);
  if (tokens_) tokens_->finish(context, embedding.table.gradient, scale);
  if (chosen_) chosen_->finish(context, embedding.tokens.rows.gradient, scale);
  if (pairs_) pairs_->finish(context, embedding.adapter.b.gradient, embedding.adapter.scale * scale);
  if (positions_) positions_->finish(context, embedding.positions.gradient, 1);
  if (inputs_) {
    inputs_->finish(context, embedding.inputs.table.gradient,
                    input_scale(context.spec.embedding.inputs, context.dtype));
  }
}

}  // namespace lm
