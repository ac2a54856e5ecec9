#include "model/bind.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/philox.h"

namespace lm {
namespace {

constexpr int64_t kModules = 8;  // of a layer at most, for the random keys

}  // namespace

ModelBinding::Place ModelBinding::find(const BlockLayout& layout, const std::string& name) {
  const TensorPlace* const place = layout.find(name);
  if (place == nullptr) return {};
  const Parameter& p = place->parameter;
  Place out{place->offset, place->frozen, p.rows, p.columns};
  if (!place->encoded()) return out;
  out.encoding = place->encoding().kind;
  const size_t pieces = place->pieces.size() / p.parts.size();
  LM_CHECK(p.parts.size() <= kMostParts && pieces <= kMostPieces, p.name);
  for (size_t i = 0; i < p.parts.size(); ++i) {
    EncodedPart& part = out.parts[i];
    part.rows = p.parts[i].rows;
    part.pieces.fill(-1);
    for (size_t k = 0; k < pieces; ++k) part.pieces[k] = place->pieces[i * pieces + k].offset;
  }
  return out;
}

ModelBinding::LinearPlace ModelBinding::find(const BlockLayout& layout, int64_t layer, Projection projection,
                                             const std::vector<LinearModule>& modules) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  const std::string name = prefix + projection_name(projection);
  LinearPlace out{find(layout, name), find(layout, name + "_bias"), {}};
  for (const LinearModule& module : modules) {
    if (module.projection != projection) continue;
    const Place a = find(layout, prefix + module.name + ".lora_A");
    if (a.rows == 0) continue;
    out.adapters.push_back({module.first, module.rows, a, find(layout, prefix + module.name + ".lora_B"),
                            static_cast<uint32_t>(layer * kModules + static_cast<int64_t>(module.part))});
  }
  return out;
}

ModelBinding::ModelBinding(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter)
    : embedding_(find(layout.blocks.front(), "embed")),
      norm_(find(layout.blocks.back(), "norm")),
      head_(find(layout.blocks.back(), "head")) {
  const std::vector<LinearModule> modules =
      adapter == nullptr ? std::vector<LinearModule>() : linear_modules(spec);
  for (int64_t layer = 0; layer < spec.layer_count(); ++layer) {
    const BlockLayout& block = layout.blocks[static_cast<size_t>(layer) + 1];
    const auto place = [&](const char* name) {
      return find(block, fmt::format("layers.{}.{}", layer, name));
    };
    const auto linear = [&](Projection which) { return find(block, layer, which, modules); };
    blocks_.push_back({.attention_norm = place("attn.norm"),
                       .q_norm = place("attn.q_norm"),
                       .k_norm = place("attn.k_norm"),
                       .mlp_norm = place("mlp.norm"),
                       .qkv = linear(Projection::kQkv),
                       .out = linear(Projection::kOut),
                       .gate_up = linear(Projection::kGateUp),
                       .down = linear(Projection::kDown)});
  }
  if (adapter == nullptr) return;
  scale_ = static_cast<float>(adapter->scale());
  dropout_ = static_cast<float>(adapter->dropout);
}

Param ModelBinding::bind(const Place& place, const BlockMemory& memory, const BindOptions& options) {
  if (place.rows == 0) return {};
  const auto at = [&](std::byte* begin, int64_t byte, DType type) {
    return view_of(begin + byte, type, place.rows, place.columns);
  };
  if (place.encoding != EncodingKind::kPlain) {
    Param out{{nullptr, options.dtype, place.rows, place.columns, place.columns}, {}, place.encoding};
    for (size_t i = 0; i < kMostParts; ++i) {
      if (place.parts[i].rows == 0) break;
      out.parts[i].rows = place.parts[i].rows;
      for (size_t k = 0; k < kMostPieces; ++k) {
        const int64_t offset = place.parts[i].pieces[k];
        if (offset >= 0) out.parts[i].pieces[k] = memory.frozen + (offset - memory.first_frozen_byte);
      }
    }
    return out;
  }
  if (place.frozen) return {at(memory.frozen, place.offset - memory.first_frozen_byte, options.dtype), {}};
  const int64_t element = place.offset - memory.first;
  const DType trained = options.fp32_adapters ? DType::kF32 : options.dtype;
  Param out{at(memory.trainable, element * static_cast<int64_t>(dtype_size(trained)), trained), {}};
  if (memory.gradients != nullptr) {
    const auto size = static_cast<int64_t>(dtype_size(options.gradient_dtype));
    out.gradient = at(memory.gradients, element * size, options.gradient_dtype);
  }
  return out;
}

Linear ModelBinding::bind(const LinearPlace& linear, const BlockMemory& memory,
                          const BindOptions& options) const {
  Linear out{bind(linear.weight, memory, options), bind(linear.bias, memory, options), {}};
  out.adapters.reserve(linear.adapters.size());
  for (const AdapterPlace& place : linear.adapters) {
    Adapter& adapter = out.adapters.emplace_back();
    adapter.first = place.first;
    adapter.rows = place.rows;
    adapter.a = bind(place.a, memory, options);
    adapter.b = bind(place.b, memory, options);
    adapter.scale = scale_;
    if (options.training && dropout_ > 0) {
      adapter.dropout = dropout_;
      adapter.dropout_key =
          philox_key(options.seed, Purpose::kDropout, static_cast<uint64_t>(options.step), place.key);
    }
  }
  return out;
}

Param ModelBinding::embedding(const BlockMemory& memory, const BindOptions& options) const {
  return bind(embedding_, memory, options);
}

TransformerBlock ModelBinding::transformer(int64_t block, const BlockMemory& memory,
                                           const BindOptions& options) const {
  const BlockPlace& place = blocks_[static_cast<size_t>(block) - 1];
  TransformerBlock out;
  out.layer = block - 1;
  out.attention_norm = bind(place.attention_norm, memory, options);
  out.qkv = bind(place.qkv, memory, options);
  out.q_norm = bind(place.q_norm, memory, options);
  out.k_norm = bind(place.k_norm, memory, options);
  out.out = bind(place.out, memory, options);
  out.mlp_norm = bind(place.mlp_norm, memory, options);
  out.gate_up = bind(place.gate_up, memory, options);
  out.down = bind(place.down, memory, options);
  return out;
}

Param ModelBinding::final_norm(const BlockMemory& memory, const BindOptions& options) const {
  return bind(norm_, memory, options);
}

Head ModelBinding::head(const BlockMemory& memory, const Param& tied_embedding,
                        const BindOptions& options) const {
  return {bind(norm_, memory, options), head_.rows == 0 ? tied_embedding : bind(head_, memory, options)};
}

HeadSegment ModelBinding::segment(const Unit& unit, const BlockMemory& memory,
                                  const BindOptions& options) const {
  LM_CHECK(head_.rows > 0 && unit.segment(), "only an untied head has segments");
  Place rows = head_;
  rows.offset = head_.frozen ? memory.first_frozen_byte : memory.first;  // the memory begins with them
  rows.rows = unit.rows;
  return {bind(rows, memory, options), unit.first_row};
}

}  // namespace lm
