#include "model/bind.h"

#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "base/philox.h"

namespace lm {
namespace {

constexpr int64_t kModules = 8;  // of a layer at most, for the random keys

}  // namespace

ModelBinding::Place ModelBinding::find(const BlockLayout& layout, const std::string& name) {
  return place_of(layout.find(name));
}

ModelBinding::Place ModelBinding::place_of(const TensorPlace* place) {
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

// Looks up the parts that a mixer visits, with the adapters that the layout has for them.
class ModelBinding::Finder {
 public:
  Finder(const BlockLayout& layout, int64_t layer, const std::vector<LinearModule>& modules,
         SublayerPlace& out)
      : layout_(layout), layer_(layer), modules_(modules), out_(out) {}

  Place place(const std::string& name) const { return find(layout_, prefix_ + name); }
  void operator()(const char* name, const Norm& /*part*/) { out_.norms.push_back(place(name)); }
  void operator()(const char* name, const Linear& /*part*/) {
    LinearPlace& linear = out_.linears.emplace_back();
    const TensorPlace* const weight = layout_.find(prefix_ + name);
    linear.weight = place_of(weight);
    linear.bias = place(std::string(name) + "_bias");
    size_t part = 0;  // modules are the matrix's parts, in their order
    for (const LinearModule& module : modules_) {
      if (module.matrix != name) continue;
      const Place a = place_of(layout_.beside(*weight, part, TrainableRole::kLoraA)),
                  b = place_of(layout_.beside(*weight, part, TrainableRole::kLoraB));
      ++part;
      if (a.rows == 0) continue;
      LM_CHECK(module.part < kModules, "a layer has too many modules for its random keys");
      linear.adapters.push_back(
          {module.first, module.rows, a, b, static_cast<uint32_t>(layer_ * kModules + module.part)});
    }
  }

 private:
  const BlockLayout& layout_;
  int64_t layer_;
  const std::string prefix_ = fmt::format("layers.{}.", layer_);
  const std::vector<LinearModule>& modules_;
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

 private:
  const ModelBinding& binding_;
  const SublayerPlace& place_;
  const BlockMemory& memory_;
  const BindOptions& options_;
  size_t norm_ = 0, linear_ = 0;
};

ModelBinding::ModelBinding(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter)
    : final_norm_(spec.final_norm),
      embedding_(find(layout.blocks.front(), "embed")),
      norm_(find(layout.blocks.back(), "norm")),
      head_(find(layout.blocks.back(), "head")) {
  for (int64_t layer = 0; layer < spec.layer_count(); ++layer) {
    const std::vector<LinearModule> modules =
        adapter == nullptr ? std::vector<LinearModule>() : linear_modules(spec, layer);
    std::vector<SublayerPlace>& block = blocks_.emplace_back();
    for (const SublayerSpec& sublayer : spec.layer(layer).sublayers) {
      SublayerPlace& place = block.emplace_back();
      place.spec = sublayer;
      std::visit(
          [&](const auto& mixer) {
            Finder finder(layout.blocks[static_cast<size_t>(layer) + 1], layer, modules, place);
            place.norm = finder.place(sublayer.norm_name());
            place.norm_after = finder.place(sublayer.norm_after_name());
            auto parts = unbound_mixer(mixer, layer);
            parts.visit(parts, finder);
          },
          sublayer.mixer);
    }
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
  TransformerBlock out;
  for (const SublayerPlace& place : blocks_[static_cast<size_t>(block) - 1]) {
    Sublayer& sublayer = out.sublayers.emplace_back();
    sublayer.norm = {place.spec.norm.value_or(NormSpec()), bind(place.norm, memory, options)};
    sublayer.norm_after = {place.spec.norm_after.value_or(NormSpec()),
                           bind(place.norm_after, memory, options)};
    sublayer.residual_scale = static_cast<float>(place.spec.residual_scale);
    std::visit(
        [&](const auto& spec) {
          auto mixer = unbound_mixer(spec, block - 1);
          mixer.visit(mixer, Binder(*this, place, memory, options));
          sublayer.mixer = std::move(mixer);
        },
        place.spec.mixer);
  }
  return out;
}

Norm ModelBinding::final_norm(const BlockMemory& memory, const BindOptions& options) const {
  return {final_norm_, bind(norm_, memory, options)};
}

Head ModelBinding::head(const BlockMemory& memory, const Param& tied_embedding,
                        const BindOptions& options) const {
  return {final_norm(memory, options), head_.rows == 0 ? tied_embedding : bind(head_, memory, options)};
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
