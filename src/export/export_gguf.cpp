#include "export/export_gguf.h"

#include <fmt/format.h>
#include <algorithm>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "export/gguf_layers.h"

namespace lm {
namespace {

using Pair = std::pair<std::string_view, std::string_view>;

// llama.cpp's names of our parameters, biases being their matrix's or norm's.
constexpr Pair kOutside[] = {{"embed", "token_embd"},
                             {"positions", "position_embd"},
                             {"head", "output"},
                             {"norm", "output_norm"},
                             {"inputs.table", "per_layer_token_embd"},
                             {"inputs.projection", "per_layer_model_proj"},
                             {"inputs.norm", "per_layer_proj_norm"}};
// In a layer: norms, and what nobody trains.
constexpr Pair kInLayer[] = {{"attn.norm", "attn_norm"},       {"attn.norm_after", "post_attention_norm"},
                             {"attn.q_norm", "attn_q_norm"},   {"attn.k_norm", "attn_k_norm"},
                             {"mlp.norm", "ffn_norm"},         {"mlp.norm_after", "post_ffw_norm"},
                             {"scalar", "layer_output_scale"}, {"input.norm_after", "post_norm"}};
// Where the MLP's output is added to the experts' before it is normed once more.
constexpr Pair kJoined[] = {{"mlp.norm_after", "post_ffw_norm_1"},
                            {"mlp.norm_joined", "post_ffw_norm"},
                            {"experts.input_norm", "pre_ffw_norm_2"},
                            {"experts.norm_after", "post_ffw_norm_2"}};
// In a layer: whole names.
constexpr Pair kVectors[] = {{"experts.router_norm", "ffn_gate_inp.scale"},
                             {"experts.factors", "ffn_down_exps.scale"}};
// The parts of its matrices, and the matrices themselves where it has several parts as one.
constexpr Pair kParts[] = {{"attn.q", "attn_q"},
                           {"attn.k", "attn_k"},
                           {"attn.v", "attn_v"},
                           {"attn.o", "attn_output"},
                           {"mlp.gate", "ffn_gate"},
                           {"mlp.up", "ffn_up"},
                           {"mlp.down", "ffn_down"},
                           {"attn.qkv", "attn_qkv"},
                           {"mlp.gate_up", "ffn_up"},
                           {"input.gate", "inp_gate"},
                           {"input.out", "proj"},
                           {"experts.router", "ffn_gate_inp"},
                           {"experts.gate_up", "ffn_gate_up_exps"},
                           {"experts.gate", "ffn_gate_exps"},
                           {"experts.up", "ffn_up_exps"},
                           {"experts.down", "ffn_down_exps"}};

// "": not among them.
std::string_view find_if_named(std::span<const Pair> names, std::string_view ours) {
  const auto found = std::ranges::find(names, ours, &Pair::first);
  return found != names.end() ? found->second : std::string_view();
}
std::string_view find_name(std::span<const Pair> names, std::string_view ours) {
  if (const std::string_view found = find_if_named(names, ours); !found.empty()) return found;
  throw Error(Exit::kInternal,
              {.area = "BUG-70", .what = "no GGUF name", .place = std::string(ours), .next = "report this"});
}

// A tensor of the file: rows of a parameter, or the same rows of each expert's, one behind another.
struct Outgoing {
  GgufTensor tensor;
  size_t block = 0;
  const TensorPlace* place = nullptr;
  int64_t first = 0, rows = 0;
  int64_t heads = 0;                            // of q or k, whose rows are permuted; 0: they are not
  std::vector<const TensorPlace*> others = {};  // of the experts behind the first
};

class Tensors {
 public:
  Tensors(const ModelSpec& spec, const LlamaCpp& arch, const ModelLayout& layout, GgufType type)
      : spec_(spec), arch_(arch), type_(type) {
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const auto layer = static_cast<int64_t>(b) - 1;
      if (layer >= 0 && layer < spec.layer_count()) matrices_ = layer_matrices(spec, layer);
      for (const TensorPlace& place : layout.blocks[b].tensors) {
        if (!adapts(place.parameter.role)) add(b, place);
      }
    }
    if (!spec.tied || !arch.needs_head) return;
    const TensorPlace* const embedding = layout.blocks.front().find("embed");
    LM_CHECK(embedding != nullptr, "an embedding");
    put("output.weight", 0, *embedding, 0, embedding->parameter.rows);
  }
  const std::vector<Outgoing>& all() const { return all_; }

 private:
  Outgoing& put(const std::string& name, size_t block, const TensorPlace& place, int64_t first,
                int64_t rows) {
    const Parameter& parameter = place.parameter;
    // A router's products decide what is computed at all: fp32, as llama.cpp's converter has it.
    const bool vector = parameter.vector() || parameter.plain || name.starts_with("position_embd");
    const bool blocks = type_ != GgufType::kQ8_0 || parameter.columns % kGgufBlock == 0;
    const GgufType type = vector ? GgufType::kF32 : blocks ? type_ : GgufType::kF16;
    all_.push_back({{name, shape_of(parameter, rows), type}, block, &place, first, rows});
    return all_.back();
  }
  static std::vector<int64_t> shape_of(const Parameter& parameter, int64_t rows) {
    if (!parameter.vector()) return {rows, parameter.columns};
    const ParameterPart& part = parameter.parts.front();
    return part.heads > 0 ? parameter.shape(part) : std::vector{rows};  // a norm's weight for each head
  }

  // "layers.3.attn.qkv_bias" -> "blk.3.attn_q.bias" and so on.
  void add(size_t block, const TensorPlace& place) {
    constexpr std::string_view kLayers = "layers.", kBias = "_bias";
    std::string_view name = place.parameter.name;
    const bool bias = name.ends_with(kBias);
    if (bias) name.remove_suffix(kBias.size());
    const std::string kind = bias ? ".bias" : ".weight";
    if (!name.starts_with(kLayers)) {
      put(std::string(find_name(kOutside, name)) + kind, block, place, 0, place.parameter.rows);
      return;
    }
    const auto layer = static_cast<int64_t>(block) - 1;
    const std::string prefix = fmt::format("blk.{}.", layer);
    name = name.substr(name.find('.', kLayers.size()) + 1);
    const auto matrix =
        std::ranges::find_if(matrices_, [&](const MatrixSpec& one) { return one.name == name; });
    if (matrix == matrices_.end()) {
      put(prefix + vector_name(layer, name, kind), block, place, 0, place.parameter.rows);
    } else if (joined(name)) {
      put(prefix + std::string(find_name(kParts, name)) + kind, block, place, 0, place.parameter.rows);
    } else {
      add_parts(*matrix, {prefix, kind}, block, place);
    }
  }
  std::string vector_name(int64_t layer, std::string_view name, const std::string& kind) const {
    if (const std::string_view whole = find_if_named(kVectors, name); !whole.empty())
      return std::string(whole);
    const bool joins = std::ranges::any_of(spec_.layer(layer).sublayers, [](const SublayerSpec& sublayer) {
      return sublayer.norm_joined.has_value();
    });
    const std::string_view beside = joins ? find_if_named(kJoined, name) : std::string_view();
    return std::string(beside.empty() ? find_name(kInLayer, name) : beside) + kind;
  }
  bool joined(std::string_view matrix) const {
    return (matrix == "attn.qkv" && arch_.joined_qkv) || (matrix == "mlp.gate_up" && arch_.joined_gate_up);
  }
  void add_parts(const MatrixSpec& matrix, const std::pair<std::string, std::string>& around, size_t block,
                 const TensorPlace& place) {
    int64_t row = 0;
    const std::vector<MatrixSpec::Part> whole = {{"experts.gate_up", place.parameter.rows}};
    const bool joins = arch_.gemma4 && matrix.expert >= 0 && matrix.parts.size() > 1;
    for (const MatrixSpec::Part& part : joins ? whole : matrix.parts) {
      const std::string name = around.first + std::string(find_name(kParts, part.name)) + around.second;
      if (matrix.expert > 0) {
        all_[stacks_.at(name)].others.push_back(&place);
      } else {
        put(name, block, place, row, part.rows).heads = permuted_heads(block, part.name);
      }
      if (matrix.expert == 0) {
        stacks_[name] = all_.size() - 1;
        all_.back().tensor.shape.insert(all_.back().tensor.shape.begin(), matrix.experts);
      }
      row += part.rows;
    }
  }
  // Of a part of q or k whose rows llama.cpp has in another order.
  int64_t permuted_heads(size_t block, std::string_view part) const {
    const RopeSpec* const rope = GgufLayers(spec_).rope();
    if (!arch_.neighbours || (rope != nullptr && rope->neighbours)) return 0;
    const AttentionSpec& attention = spec_.layer(static_cast<int64_t>(block) - 1).attention();
    return part == "attn.q" ? attention.heads : part == "attn.k" ? attention.kv_heads : 0;
  }

  const ModelSpec& spec_;
  const LlamaCpp& arch_;
  GgufType type_;
  std::vector<MatrixSpec> matrices_;  // of the layer that is looked at
  std::vector<Outgoing> all_;
  std::map<std::string, size_t> stacks_;  // of experts, by their names: places in all_
};

// Row 2 i + j of a head is its row j dim/2 + i, of the first `dim` rows, which RoPE turns.
std::vector<float> interleaved(std::span<const float> from, int64_t heads, int64_t head_dim, int64_t dim) {
  std::vector<float> out(from.begin(), from.end());
  const int64_t columns = std::ssize(from) / (heads * head_dim), half = dim / 2;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t row = 0; row < dim; ++row) {
      const int64_t source = head * head_dim + row % 2 * half + row / 2;
      std::copy_n(from.begin() + source * columns, columns, out.begin() + (head * head_dim + row) * columns);
    }
  }
  return out;
}

// Writes the next tensor. What is permuted is held whole, and every vector.
void write(const Outgoing& one, const ModelSpec& spec, const WeightSource& source, GgufWriter& writer) {
  const Parameter& parameter = one.place->parameter;
  const bool whole = one.heads > 0 || parameter.vector();
  // llama.cpp has no offsets: its factors are those that a norm multiplies by.
  const float offset = parameter.kind == ParameterKind::kNorm ? 1 - parameter.neutral : 0;
  std::vector<float> rows;
  const auto take = [&](int64_t, int64_t count, const std::byte* memory, DType dtype) {
    LM_CHECK(dtype == DType::kF32, "fp32");
    const std::span from(reinterpret_cast<const float*>(memory),
                         static_cast<size_t>(count * parameter.columns));
    if (!whole) return writer.write(from);
    rows.insert(rows.end(), from.begin(), from.end());
  };
  for_each_view(source, one.block, *one.place, one.first, one.first + one.rows, take);
  for (const TensorPlace* const expert : one.others)
    for_each_view(source, one.block, *expert, one.first, one.first + one.rows, take);
  if (!whole) return;
  if (offset != 0) {
    for (float& value : rows) value += offset;
  }
  if (one.heads == 0) return writer.write(rows);
  const AttentionSpec& attention = spec.layer(static_cast<int64_t>(one.block) - 1).attention();
  // A model that knows no positions is permuted like the others of its architecture.
  const RopeSpec* const rope = GgufLayers(spec).rope();
  writer.write(
      interleaved(rows, one.heads, attention.head_dim, rope != nullptr ? rope->dim : attention.head_dim));
}

}  // namespace

void check_gguf(const ModelSpec& spec, const std::string& output) {
  check_layers(spec, llama_cpp_of(spec));
  std::error_code ignored;
  if (std::filesystem::exists(output, ignored))
    throw Error(Exit::kIncompatible, {.area = "FILE-14",
                                      .what = "the output exists already",
                                      .place = output,
                                      .next = "remove it or choose another name"});
}

void export_gguf(const std::string& output, const ModelSpec& spec, const ModelLayout& layout,
                 const WeightSource& source, const GgufOptions& options) {
  check_gguf(spec, output);
  const LlamaCpp& arch = llama_cpp_of(spec);
  const Tensors ours(spec, arch, layout, options.type);
  const std::vector<RopeFactors> factors = rope_factors(spec);
  std::vector<GgufTensor> tensors;
  for (const RopeFactors& one : factors)
    tensors.push_back({one.name, {std::ssize(one.divisors)}, GgufType::kF32});
  for (const Outgoing& one : ours.all()) tensors.push_back(one.tensor);
  GgufWriter writer(output, describe(spec, arch, options), std::move(tensors));
  for (const RopeFactors& one : factors) writer.write(one.divisors);
  for (const Outgoing& one : ours.all()) write(one, spec, source, writer);
  writer.commit();
}

}  // namespace lm
