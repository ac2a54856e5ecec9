#include "model/bind.h"

#include <fmt/format.h>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/philox.h"
#include "spec/adapter_sites.h"

namespace lm {
namespace {

// The random key of a module's dropout. The first modules of all layers come before all others.
uint32_t dropout_place(int64_t layer, int64_t module) {
  constexpr int64_t kModules = 8, kMostLayers = 4096;
  return static_cast<uint32_t>((module / kModules * kMostLayers + layer) * kModules + module % kModules);
}

constexpr int64_t kSublayers = 8;  // of a layer at most, for the random keys

// `tensor`: of the model's dropouts, or of its adapters'.
DropoutMask mask_of(double p, Purpose purpose, int64_t tensor, const BindOptions& options) {
  if (!options.training || p == 0) return {};
  return {static_cast<float>(p), philox_key(options.seed, purpose, static_cast<uint64_t>(options.step),
                                            static_cast<uint32_t>(tensor))};
}

// What the block's passes take for granted of sublayers beside each other.
void check_groups(const LayerSpec& layer) {
  const SublayerSpec* first = nullptr;
  for (size_t s = 0; s < layer.sublayers.size(); ++s) {
    const SublayerSpec& sublayer = layer.sublayers[s];
    LM_CHECK(!sublayer.beside || first != nullptr, "a layer's first sublayer is beside none");
    if (!sublayer.beside) first = &sublayer;
    LM_CHECK(!sublayer.beside || first->norm_joined || !sublayer.norm,
             "a sublayer beside another one reads that one's norm");
    LM_CHECK(
        !first->norm_joined || (sublayer.norm_after && sublayer.residual_scale == 1 && sublayer.dropout == 0),
        "what is normed once more has been normed, and is added as it is");
    LM_CHECK(!sublayer.beside || !sublayer.norm_joined, "a group has one norm of its sum");
  }
}

}  // namespace

ModelBinding::Place ModelBinding::find(const BlockLayout& layout, const std::string& name) {
  const TensorPlace* const place = layout.find(name);
  if (place == nullptr) return {};
  const TensorPlace* const copy = layout.beside(*place, 0, TrainableRole::kReplacement);
  return place_of(copy != nullptr ? copy : place);
}

ModelBinding::Place ModelBinding::place_of(const TensorPlace* place) {
  if (place == nullptr) return {};
  const Parameter& p = place->parameter;
  Place out{place->offset, place->frozen, p.rows, p.columns, p.fp32};
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

// Looks up the parts that a mixer visits, with the adapters that the layout has for them.
class ModelBinding::Finder {
 public:
  // `modules`: none without an adapter.
  Finder(const BlockLayout& layout, int64_t layer, const std::vector<LinearModule>& modules,
         const AdapterSpec* adapter, SublayerPlace& out)
      : layout_(layout), layer_(layer), modules_(modules), adapter_(adapter), out_(out) {}

  Place place(const std::string& name) const { return find(layout_, prefix_ + name); }
  void operator()(const char* name, const Norm& /*part*/) { out_.norms.push_back(place(name)); }
  void operator()(const char* name, const Prefix& /*part*/) { out_.prefixes.push_back(place(name)); }
  void operator()(const char* name, const Buffer& /*part*/) { out_.buffers.push_back(place(name)); }
  void operator()(const char* name, const Sinks& /*part*/) { out_.sinks = place(name); }
  void operator()(const char* name, const Factors& /*part*/) { out_.factors.push_back(place(name)); }
  void operator()(const char* name, const Linear& /*part*/) {
    LinearPlace& linear = out_.linears.emplace_back();
    const TensorPlace* const weight = layout_.find(prefix_ + name);
    linear.weight = place_of(weight);
    if (weight == nullptr) return pair_of_absent(name, linear);
    const TensorPlace* const bias = layout_.find(prefix_ + name + "_bias");
    linear.bias = place_of(bias);
    size_t part = 0;  // modules are the matrix's parts, in their order
    for (const LinearModule& module : modules_) {
      if (module.matrix != name) continue;
      const TensorPlace* const lora_a = layout_.beside(*weight, part, TrainableRole::kLoraA);
      const Place a = place_of(lora_a), b = place_of(layout_.beside(*weight, part, TrainableRole::kLoraB)),
                  magnitude = place_of(layout_.beside(*weight, part, TrainableRole::kMagnitude)),
                  start_a = place_of(layout_.beside(*weight, part, TrainableRole::kStartA)),
                  start_b = place_of(layout_.beside(*weight, part, TrainableRole::kStartB)),
                  output = place_of(layout_.beside(*weight, part, TrainableRole::kOutputScale)),
                  input = place_of(layout_.beside(*weight, part, TrainableRole::kInputScale));
      const Place copy =
          bias == nullptr ? Place{} : place_of(layout_.beside(*bias, part, TrainableRole::kBias));
      if (copy.rows > 0) linear.biases.push_back({module.first, module.rows, copy});
      if (output.rows > 0) linear.scales.push_back({module.first, module.rows, output});
      if (input.rows > 0) linear.input_scale = input;
      ++part;
      if (a.rows == 0) continue;
      // An expert's pair is beside its matrix's first part, and on all of its rows.
      linear.adapters.push_back({module.first, b.rows, a, b, magnitude, start_a, start_b,
                                 dropout_place(layer_, module.part),
                                 static_cast<float>(adapter_->scale_of(lora_a->parameter.site))});
    }
  }

 private:
  // Of an expert that another rank keeps; every rank has all pairs.
  void pair_of_absent(const char* name, LinearPlace& linear) const {
    const Place a = place(name + std::string(".lora_A")), b = place(name + std::string(".lora_B"));
    if (a.rows == 0) return;
    AdapterPlace& pair = linear.adapters.emplace_back();
    pair.rows = b.rows, pair.a = a, pair.b = b;
  }

  const BlockLayout& layout_;
  int64_t layer_;
  const std::string prefix_ = fmt::format("layers.{}.", layer_);
  const std::vector<LinearModule>& modules_;
  const AdapterSpec* adapter_;
  SublayerPlace& out_;
};

// Fills the parts that a mixer visits, in the order in which they were looked up.
class ModelBinding::Binder {
 public:
  Binder(const ModelBinding& binding, const SublayerPlace& place, const BlockMemory& memory,
         const BindOptions& options)
      : binding_(binding), place_(place), memory_(memory), options_(options) {}

  void operator()(const char* /*name*/, Norm& part) {
    part.weight = bind(place_.norms[norm_++], memory_, options_);
  }
  void operator()(const char* /*name*/, Linear& part) {
    part = binding_.bind(place_.linears[linear_++], memory_, options_);
  }
  void operator()(const char* /*name*/, Prefix& part) {
    part.rows = bind(place_.prefixes[prefix_++], memory_, options_);
  }
  void operator()(const char* /*name*/, Buffer& part) {
    part.values = bind(place_.buffers[buffer_++], memory_, options_).weight;
  }
  void operator()(const char* /*name*/, Sinks& part) { part.logits = bind(place_.sinks, memory_, options_); }
  void operator()(const char* /*name*/, Factors& part) {
    part.values = bind(place_.factors[factor_++], memory_, options_);
  }

 private:
  const ModelBinding& binding_;
  const SublayerPlace& place_;
  const BlockMemory& memory_;
  const BindOptions& options_;
  size_t norm_ = 0, linear_ = 0, prefix_ = 0, buffer_ = 0, factor_ = 0;
};

ModelBinding::ModelBinding(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter)
    : embedding_dropout_(spec.embedding.dropout),
      final_norm_(spec.final_norm),
      input_norm_spec_(spec.embedding.inputs.norm),
      embedding_(find(layout.blocks.front(), "embed")),
      tokens_(find(layout.blocks.front(), "embed.tokens")),
      positions_(find(layout.blocks.front(), "positions")),
      prompt_(find(layout.blocks.front(), "prompt")),
      input_table_(find(layout.blocks.front(), "inputs.table")),
      input_projection_(find(layout.blocks.front(), "inputs.projection")),
      head_(find(layout.blocks.back(), "head")),
      table_a_(find(layout.blocks.front(), "embed.lora_A")),
      table_b_(find(layout.blocks.front(), "embed.lora_B")),
      head_a_(find(layout.blocks.back(), "head.lora_A")),
      head_b_(find(layout.blocks.back(), "head.lora_B")),
      norm_{find(layout.blocks.back(), "norm"), find(layout.blocks.back(), "norm_bias")},
      input_norm_{find(layout.blocks.front(), "inputs.norm"), {}} {
  for (size_t i = 0; i < encoder_.size(); ++i) {
    const std::string encoder = fmt::format("encoder.{}.", 2 * i);
    encoder_[i].weight = find(layout.blocks.front(), encoder + "weight");
    encoder_[i].bias = find(layout.blocks.front(), encoder + "bias");
  }
  for (int64_t layer = 0; layer < spec.layer_count(); ++layer) {
    const std::vector<LinearModule> modules =
        adapter == nullptr ? std::vector<LinearModule>() : linear_modules(spec, layer);
    const BlockLayout& block = layout.blocks[static_cast<size_t>(layer) + 1];
    LayerPlace& places = layers_.emplace_back();
    if (spec.layer(layer).scalar) places.scalar = find(block, fmt::format("layers.{}.scalar", layer));
    LM_CHECK(std::ssize(spec.layer(layer).sublayers) <= kSublayers,
             "a layer has too many sublayers for its random keys");
    check_groups(spec.layer(layer));
    for (const SublayerSpec& sublayer : spec.layer(layer).sublayers) {
      SublayerPlace& place = places.sublayers.emplace_back();
      place.spec = sublayer;
      std::visit(
          [&](const auto& mixer) {
            Finder finder(block, layer, modules, adapter, place);
            place.norm = {finder.place(sublayer.norm_name()), finder.place(sublayer.norm_bias_name())};
            place.norm_after = {finder.place(sublayer.norm_after_name()),
                                finder.place(sublayer.norm_after_bias_name())};
            place.norm_joined = {finder.place(sublayer.norm_joined_name()),
                                 finder.place(sublayer.norm_joined_name() + "_bias")};
            auto parts = unbound_mixer(mixer, layer);
            parts.visit(parts, finder);
          },
          sublayer.mixer);
    }
  }
  if (adapter != nullptr) runs_ = row_runs(adapter->tokens);
  if (table_a_.rows > 0) table_scale_ = static_cast<float>(adapter->scale_of(spec.names.embedding));
  if (head_a_.rows > 0) head_scale_ = static_cast<float>(adapter->scale_of(spec.names.head));
  if (adapter != nullptr) dropout_ = static_cast<float>(adapter->dropout);
}

Param ModelBinding::bind(const Place& place, const BlockMemory& memory, const BindOptions& options) {
  if (place.rows == 0) return {};
  const auto at = [&](std::byte* begin, int64_t byte, DType type) {
    return view_of(begin == nullptr ? nullptr : begin + byte, type, place.rows, place.columns);
  };
  if (place.encoding != EncodingKind::kPlain) {
    Param out{{nullptr, options.dtype, place.rows, place.columns, place.columns}, {}, place.encoding};
    for (size_t i = 0; i < kMostParts; ++i) {
      if (place.parts[i].rows == 0) break;
      out.parts[i].rows = place.parts[i].rows;
      for (size_t k = 0; k < kMostPieces; ++k) {
        const int64_t offset = place.parts[i].pieces[k];
        if (offset >= 0) out.parts[i].pieces[k] = memory.frozen_at(offset);
      }
    }
    return out;
  }
  const DType stored = place.fp32 ? DType::kF32 : options.dtype;
  if (place.frozen) return {at(memory.frozen_at(place.offset), 0, stored), {}};
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
    adapter.magnitude = bind(place.magnitude, memory, options);
    adapter.start_a = bind(place.start_a, memory, options).weight;
    adapter.start_b = bind(place.start_b, memory, options).weight;
    adapter.scale = place.scale;
    adapter.dropout = mask_of(dropout_, Purpose::kDropout, place.key, options);
  }
  for (const ScalePlace& place : linear.biases)
    out.biases.push_back({place.first, place.rows, bind(place.factors, memory, options)});
  for (const ScalePlace& place : linear.scales)
    out.scales.push_back({place.first, place.rows, bind(place.factors, memory, options)});
  out.input_scale = bind(linear.input_scale, memory, options);
  return out;
}

Norm ModelBinding::bind(const NormSpec& spec, const NormPlace& place, const BlockMemory& memory,
                        const BindOptions& options) {
  return {spec, bind(place.weight, memory, options), bind(place.bias, memory, options)};
}

Embedding ModelBinding::embedding(const BlockMemory& memory, const BindOptions& options) const {
  PromptEncoder encoder;
  for (size_t i = 0; i < encoder_.size(); ++i) encoder.layers[i] = bind(encoder_[i], memory, options);
  return {bind(embedding_, memory, options),
          bind(positions_, memory, options),
          {bind(input_table_, memory, options),
           {bind(input_projection_, memory, options), {}, {}},
           bind(input_norm_spec_, input_norm_, memory, options)},
          embedding_dropout(options),
          bind(prompt_, memory, options),
          {bind(tokens_, memory, options), runs_},
          encoder,
          {bind(table_a_, memory, options), bind(table_b_, memory, options), table_scale_}};
}

DropoutMask ModelBinding::embedding_dropout(const BindOptions& options) const {
  return mask_of(embedding_dropout_, Purpose::kModelDropout, 0, options);
}

TransformerBlock ModelBinding::transformer(int64_t block, const BlockMemory& memory,
                                           const BindOptions& options) const {
  const LayerPlace& layer = layers_[static_cast<size_t>(block) - 1];
  TransformerBlock out;
  out.scalar = bind(layer.scalar, memory, options).weight;
  for (const SublayerPlace& place : layer.sublayers) {
    Sublayer& sublayer = out.sublayers.emplace_back();
    const auto norm = [&](const std::optional<NormSpec>& spec, const NormPlace& of) {
      return spec ? std::optional(bind(*spec, of, memory, options)) : std::nullopt;
    };
    sublayer.norm = norm(place.spec.norm, place.norm);
    sublayer.norm_after = norm(place.spec.norm_after, place.norm_after);
    sublayer.norm_joined = norm(place.spec.norm_joined, place.norm_joined);
    sublayer.residual_scale = static_cast<float>(place.spec.residual_scale);
    sublayer.beside = place.spec.beside;
    sublayer.dropout = mask_of(place.spec.dropout, Purpose::kModelDropout,
                               block * kSublayers + std::ssize(out.sublayers) - 1, options);
    std::visit(
        [&](const auto& spec) {
          auto mixer = unbound_mixer(spec, block - 1);
          mixer.visit(mixer, Binder(*this, place, memory, options));
          if constexpr (std::is_same_v<decltype(mixer), Experts>)
            mixer.fetch = memory.experts, mixer.exchange = memory.exchange;
          sublayer.mixer = std::move(mixer);
        },
        place.spec.mixer);
  }
  return out;
}

Norm ModelBinding::final_norm(const BlockMemory& memory, const BindOptions& options) const {
  return bind(final_norm_, norm_, memory, options);
}

Head ModelBinding::head(const BlockMemory& memory, const Embedding& tied, const BindOptions& options) const {
  if (head_.rows == 0) return {final_norm(memory, options), tied.table, tied.tokens};
  return {final_norm(memory, options),
          bind(head_, memory, options),
          {},
          {bind(head_a_, memory, options), bind(head_b_, memory, options), head_scale_}};
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
