#include "model/bind.h"

#include "base/error.h"
#include "base/philox.h"

namespace lm {
namespace {

constexpr int64_t kModules = 8;  // adapted modules of a layer, for the random keys

struct Module {
  const char* name;  // as the adapter's targets spell it
  int64_t index;     // in the layer
  int64_t first;     // rows of the fused projection
  int64_t rows;
};

void add_adapters(Linear& linear, const BlockLayout& layout, int64_t layer,
                  const std::vector<Module>& modules, const BlockMemory& memory, const BindOptions& options) {
  if (options.adapter == nullptr) return;
  for (const Module& module : modules) {
    const std::string name = "layers." + std::to_string(layer) + "." + module.name;
    const TensorPlace* const place = layout.find(name + ".lora_A");
    if (place == nullptr) continue;
    Adapter adapter{.first = module.first,
                    .rows = module.rows,
                    .a = bind_param(layout, name + ".lora_A", memory, options),
                    .b = bind_param(layout, name + ".lora_B", memory, options),
                    .scale = static_cast<float>(options.adapter->scale()),
                    .dropout = 0,
                    .dropout_key = 0};
    if (options.training && options.adapter->dropout > 0) {
      adapter.dropout = static_cast<float>(options.adapter->dropout);
      adapter.dropout_key = philox_key(options.seed, Purpose::kDropout, static_cast<uint64_t>(options.step),
                                       static_cast<uint32_t>(layer * kModules + module.index));
    }
    linear.adapters.push_back(std::move(adapter));
  }
}

// `offset` as a TensorPlace's, but from where the memory begins.
Param bind_at(int64_t offset, bool frozen, const std::vector<int64_t>& shape, const BlockMemory& memory,
              const BindOptions& options) {
  if (frozen) return {view_memory(memory.frozen + offset, shape, options.dtype, options.device), {}};
  const auto size = static_cast<int64_t>(dtype_size(options.dtype));
  Param out{view_memory(memory.trainable + offset * size, shape, options.dtype, options.device), {}};
  if (memory.gradients != nullptr) {
    const auto gradient_size = static_cast<int64_t>(dtype_size(options.gradient_dtype));
    out.gradient =
        view_memory(memory.gradients + offset * gradient_size, shape, options.gradient_dtype, options.device);
  }
  return out;
}

}  // namespace

Param bind_param(const BlockLayout& layout, const std::string& name, const BlockMemory& memory,
                 const BindOptions& options) {
  const TensorPlace* const place = layout.find(name);
  if (place == nullptr) return {};
  const Parameter& p = place->parameter;
  const std::vector<int64_t> shape =
      p.vector() ? std::vector<int64_t>{p.rows} : std::vector<int64_t>{p.rows, p.columns};
  const int64_t first = place->frozen ? memory.first_frozen_byte : memory.first;
  return bind_at(place->offset - first, place->frozen, shape, memory, options);
}

HeadSegment bind_segment(const BlockLayout& layout, const Unit& unit, const BlockMemory& memory,
                         const BindOptions& options) {
  const TensorPlace* const place = layout.find("head");
  LM_CHECK(place != nullptr && unit.segment(), "only an untied head has segments");
  return {bind_at(0, place->frozen, {unit.rows, place->parameter.columns}, memory, options), unit.first_row};
}

TransformerBlock bind_transformer(const ModelSpec& spec, const BlockLayout& layout, int64_t layer,
                                  const BlockMemory& memory, const BindOptions& options) {
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  const auto param = [&](const char* name) { return bind_param(layout, prefix + name, memory, options); };
  TransformerBlock block;
  block.layer = layer;
  block.attention_norm = param("attn.norm");
  block.qkv = {param("attn.qkv"), param("attn.qkv_bias"), {}};
  block.q_norm = param("attn.q_norm");
  block.k_norm = param("attn.k_norm");
  block.out = {param("attn.out"), param("attn.out_bias"), {}};
  block.mlp_norm = param("mlp.norm");
  block.gate_up = {param("mlp.gate_up"), param("mlp.gate_up_bias"), {}};
  block.down = {param("mlp.down"), param("mlp.down_bias"), {}};
  const int64_t q = spec.q_rows(), kv = spec.kv_rows();
  add_adapters(block.qkv, layout, layer,
               {{"q_proj", 0, 0, q}, {"k_proj", 1, q, kv}, {"v_proj", 2, q + kv, kv}}, memory, options);
  add_adapters(block.out, layout, layer, {{"o_proj", 3, 0, spec.hidden}}, memory, options);
  add_adapters(block.gate_up, layout, layer,
               {{"gate_proj", 4, 0, spec.ffn}, {"up_proj", 5, spec.ffn, spec.ffn}}, memory, options);
  add_adapters(block.down, layout, layer, {{"down_proj", 6, 0, spec.hidden}}, memory, options);
  return block;
}

Head bind_head(const BlockLayout& layout, const BlockMemory& memory, const Param& tied_embedding,
               const BindOptions& options) {
  Head head{bind_param(layout, "norm", memory, options), bind_param(layout, "head", memory, options)};
  if (!head.weight.weight.defined()) head.weight = tied_embedding;
  return head;
}

}  // namespace lm
