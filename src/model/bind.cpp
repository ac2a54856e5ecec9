#include "model/bind.h"

#include "base/error.h"
#include "base/philox.h"

namespace lm {
namespace {

constexpr int64_t kModules = 8;  // adapted modules of a layer, for the random keys

}  // namespace

struct ModelBinding::Module {
  const char* name;  // as the adapter's targets spell it
  int64_t index;     // in the layer
  int64_t first;     // rows of the fused projection
  int64_t rows;
};

ModelBinding::Place ModelBinding::find(const BlockLayout& layout, const std::string& name) {
  const TensorPlace* const place = layout.find(name);
  if (place == nullptr) return {};
  const Parameter& p = place->parameter;
  Place out{place->offset, place->frozen, p.rows, p.columns};
  if (!place->frozen || place->pieces.front().encoding->materialise == nullptr) return out;
  out.encoding = place->pieces.front().encoding;
  for (const FrozenPiece& piece : place->pieces) out.pieces.push_back(piece.offset);
  LM_CHECK(out.pieces.size() <= kMostPieces, out.encoding->name);
  return out;
}

void ModelBinding::find_adapters(LinearPlace& linear, const BlockLayout& layout, int64_t layer,
                                 const std::vector<Module>& modules) {
  for (const Module& module : modules) {
    const std::string name = "layers." + std::to_string(layer) + "." + module.name;
    const Place a = find(layout, name + ".lora_A");
    if (a.rows == 0) continue;
    linear.adapters.push_back({module.first, module.rows, a, find(layout, name + ".lora_B"),
                               static_cast<uint32_t>(layer * kModules + module.index)});
  }
}

ModelBinding::ModelBinding(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter)
    : embedding_(find(layout.blocks.front(), "embed")),
      norm_(find(layout.blocks.back(), "norm")),
      head_(find(layout.blocks.back(), "head")) {
  const int64_t q = spec.q_rows(), kv = spec.kv_rows();
  for (int64_t layer = 0; layer < spec.layer_count(); ++layer) {
    const BlockLayout& block = layout.blocks[static_cast<size_t>(layer) + 1];
    const auto place = [&](const char* name) {
      return find(block, "layers." + std::to_string(layer) + "." + name);
    };
    BlockPlace& p = blocks_.emplace_back();
    p.attention_norm = place("attn.norm");
    p.qkv = {place("attn.qkv"), place("attn.qkv_bias"), {}};
    p.q_norm = place("attn.q_norm");
    p.k_norm = place("attn.k_norm");
    p.out = {place("attn.out"), place("attn.out_bias"), {}};
    p.mlp_norm = place("mlp.norm");
    p.gate_up = {place("mlp.gate_up"), place("mlp.gate_up_bias"), {}};
    p.down = {place("mlp.down"), place("mlp.down_bias"), {}};
    if (adapter == nullptr) continue;
    find_adapters(p.qkv, block, layer,
                  {{"q_proj", 0, 0, q}, {"k_proj", 1, q, kv}, {"v_proj", 2, q + kv, kv}});
    find_adapters(p.out, block, layer, {{"o_proj", 3, 0, spec.hidden}});
    find_adapters(p.gate_up, block, layer,
                  {{"gate_proj", 4, 0, spec.ffn}, {"up_proj", 5, spec.ffn, spec.ffn}});
    find_adapters(p.down, block, layer, {{"down_proj", 6, 0, spec.hidden}});
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
  if (place.encoding != nullptr) {
    Param out{{nullptr, options.dtype, place.rows, place.columns, place.columns}, {}, place.encoding};
    for (size_t i = 0; i < place.pieces.size(); ++i)
      out.pieces[i] = memory.frozen + (place.pieces[i] - memory.first_frozen_byte);
    return out;
  }
  if (place.frozen) return {at(memory.frozen, place.offset - memory.first_frozen_byte, options.dtype), {}};
  const int64_t element = place.offset - memory.first;
  Param out{at(memory.trainable, element * static_cast<int64_t>(dtype_size(options.dtype)), options.dtype),
            {}};
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
