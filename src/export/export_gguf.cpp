#include "export/export_gguf.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numbers>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "export/gguf_tokenizer.h"
#include "spec/families/family.h"

namespace lm {
namespace {

[[noreturn]] void refuse(const std::string& what, const ModelSpec& spec) {
  throw Error(Exit::kInput, {.area = "FILE-26",
                             .what = "llama.cpp does not support " + what,
                             .place = spec.architecture,
                             .next = "leave --gguf out"});
}

const LlamaCpp& llama_cpp_of(const ModelSpec& spec) {
  const Family* const family = family_of(spec);
  if (family == nullptr || family->llama_cpp.name == nullptr)
    refuse("models of type \"" + spec.model_type + "\"", spec);
  return family->llama_cpp;
}

constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"model.embed_tokens", "token_embd"},
                                                                    {"model.norm", "output_norm"},
                                                                    {"lm_head", "output"},
                                                                    {"input_layernorm", "attn_norm"},
                                                                    {"self_attn.q_proj", "attn_q"},
                                                                    {"self_attn.k_proj", "attn_k"},
                                                                    {"self_attn.v_proj", "attn_v"},
                                                                    {"self_attn.o_proj", "attn_output"},
                                                                    {"self_attn.q_norm", "attn_q_norm"},
                                                                    {"self_attn.k_norm", "attn_k_norm"},
                                                                    {"post_attention_layernorm", "ffn_norm"},
                                                                    {"mlp.gate_proj", "ffn_gate"},
                                                                    {"mlp.up_proj", "ffn_up"},
                                                                    {"mlp.down_proj", "ffn_down"}};

// "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight".
std::string gguf_name(const std::string& ours) {
  constexpr std::string_view kLayers = "model.layers.";
  std::string prefix, rest = ours;
  if (ours.starts_with(kLayers)) {
    const size_t dot = ours.find('.', kLayers.size());
    prefix = "blk." + ours.substr(kLayers.size(), dot - kLayers.size()) + ".";
    rest = ours.substr(dot + 1);
  }
  const size_t dot = rest.rfind('.');
  for (const auto& [theirs, name] : kNames) {
    if (rest.substr(0, dot) == theirs) return prefix + std::string(name) + rest.substr(dot);
  }
  throw Error(Exit::kInternal,
              {.area = "BUG-70", .what = "no GGUF name", .place = ours, .next = "report this"});
}

// The number of heads of q_proj and k_proj, weights and biases; 0 for other tensors.
int64_t turned_heads(const ModelSpec& spec, const std::string& name) {
  if (!llama_cpp_of(spec).turns_neighbours) return 0;
  if (name.find(".self_attn.q_proj.") != std::string::npos) return spec.layers.front().attention().heads;
  return name.find(".self_attn.k_proj.") != std::string::npos ? spec.layers.front().attention().kv_heads : 0;
}

// Row 2 i + j of a head is its row j d/2 + i.
std::vector<float> interleaved(std::span<const float> from, int64_t heads, int64_t head_dim) {
  std::vector<float> out(from.size());
  const int64_t columns = std::ssize(from) / (heads * head_dim), half = head_dim / 2;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t row = 0; row < head_dim; ++row) {
      const int64_t source = head * head_dim + row % 2 * half + row / 2;
      std::copy_n(from.begin() + source * columns, columns, out.begin() + (head * head_dim + row) * columns);
    }
  }
  return out;
}

// llama.cpp's divisors of the frequencies, for the scaled RoPE of Llama 3.1.
std::vector<float> rope_factors(const ModelSpec& spec) {
  const RopeSpec& rope = spec.ropes.front();
  const auto original = static_cast<double>(rope.original_max_position);
  std::vector<float> out;
  for (int64_t i = 0; i < rope.dim; i += 2) {
    const double frequency = std::pow(rope.theta, -static_cast<double>(i) / static_cast<double>(rope.dim));
    const double length = 2 * std::numbers::pi / frequency;
    if (length < original / rope.high_freq_factor) {
      out.push_back(1);
    } else if (length > original / rope.low_freq_factor) {
      out.push_back(static_cast<float>(rope.factor));
    } else {
      const double smooth =
          (original / length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      out.push_back(static_cast<float>(1 / ((1 - smooth) / rope.factor + smooth)));
    }
  }
  return out;
}

int64_t least_window(const ModelSpec& spec) {
  int64_t least = 0;
  for (const LayerSpec& layer : spec.layers) {
    const int64_t window = layer.attention().window;
    if (window > 0) least = least == 0 ? window : std::min(least, window);
  }
  return least;
}

GgufValues describe(const ModelSpec& spec, const GgufOptions& options) {
  GgufValues values;
  const std::string arch(llama_cpp_of(spec).name);
  const auto number = [&](const char* key, int64_t value) {
    values.add(arch + "." + key, static_cast<uint32_t>(value));
  };
  values.add("general.architecture", arch);
  values.add("general.type", std::string("model"));
  values.add("general.name", options.name);
  // llama.cpp's file type numbers.
  const uint32_t kind = options.type == GgufType::kF16 ? 1 : options.type == GgufType::kQ8_0 ? 7 : 32;
  values.add("general.file_type", kind);
  values.add("general.quantization_version", uint32_t{2});
  const int64_t window = least_window(spec);
  if (window > 0 && window < spec.max_positions)
    log_note("FILE-26", fmt::format("llama.cpp has no sliding window in this architecture: the file declares "
                                    "a context of {} tokens, up to which the results are the same",
                                    window));
  number("context_length", window > 0 ? std::min(window, spec.max_positions) : spec.max_positions);
  number("embedding_length", spec.hidden);
  number("block_count", spec.layer_count());
  const AttentionSpec& attention = spec.layers.front().attention();
  const RopeSpec& rope = spec.ropes.front();
  number("feed_forward_length", spec.layers.front().mlp().ffn);
  number("attention.head_count", attention.heads);
  number("attention.head_count_kv", attention.kv_heads);
  number("attention.key_length", attention.head_dim);
  number("attention.value_length", attention.head_dim);
  number("rope.dimension_count", rope.dim);
  number("vocab_size", spec.vocab);
  values.add(arch + ".attention.layer_norm_rms_epsilon", static_cast<float>(spec.final_norm.eps));
  values.add(arch + ".rope.freq_base", static_cast<float>(rope.theta));
  if (rope.scaling == RopeSpec::Scaling::kLinear) {
    values.add(arch + ".rope.scaling.type", std::string("linear"));
    values.add(arch + ".rope.scaling.factor", static_cast<float>(rope.factor));
  }
  add_tokenizer(options.tokenizer_dir, spec.vocab, options.chat_template, values);
  return values;
}

}  // namespace

void check_gguf(const ModelSpec& spec, const std::string& output) {
  const LlamaCpp& arch = llama_cpp_of(spec);
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    const AttentionSpec& attention = spec.layer(i).attention();
    if (attention.qkv_bias && !arch.qkv_bias) refuse("biases of q, k and v", spec);
    if ((attention.out_bias || spec.layer(i).mlp().bias) && !arch.other_bias)
      refuse("biases of o_proj or of the MLP", spec);
    const bool rope = arch.no_rope_every == 0 || (i + 1) % arch.no_rope_every != 0;
    if (attention.rotates() != rope) refuse("layers without RoPE other than its built-in ones", spec);
  }
  if (spec.ropes.front().scaling == RopeSpec::Scaling::kLlama3 && !arch.llama3_rope)
    refuse("Llama 3's RoPE scaling", spec);
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
  const OutgoingTensors ours(layout, OutgoingTensors::What::kModel, DType::kF32, source);
  std::vector<GgufTensor> tensors;
  const bool factors = spec.ropes.front().scaling == RopeSpec::Scaling::kLlama3;
  if (factors) tensors.push_back({"rope_freqs.weight", {spec.ropes.front().dim / 2}, GgufType::kF32});
  for (const TensorInfo& tensor : ours.tensors()) {
    const bool matrix = tensor.shape.size() > 1;
    const bool blocks = options.type != GgufType::kQ8_0 || tensor.shape.back() % kGgufBlock == 0;
    const GgufType type = !matrix ? GgufType::kF32 : blocks ? options.type : GgufType::kF16;
    tensors.push_back({gguf_name(tensor.name), tensor.shape, type});
  }
  GgufWriter writer(output, describe(spec, options), std::move(tensors));
  if (factors) writer.write(rope_factors(spec));
  std::vector<float> rows;
  for (const TensorInfo& tensor : ours.tensors()) {
    const int64_t heads = turned_heads(spec, tensor.name), columns = tensor.shape.back();
    rows.clear();
    ours.fill(tensor.name, [&](std::span<const std::byte> bytes) {
      const size_t before = rows.size();
      rows.resize(before + bytes.size() / sizeof(float));
      std::memcpy(rows.data() + before, bytes.data(), bytes.size());
      // Q/K matrices are permuted and therefore buffered whole.
      if (heads > 0) return;
      const int64_t whole = std::ssize(rows) / columns * columns;
      if (whole == 0) return;
      writer.write(std::span(rows).first(static_cast<size_t>(whole)));
      rows.erase(rows.begin(), rows.begin() + whole);
    });
    if (heads > 0) writer.write(interleaved(rows, heads, spec.layers.front().attention().head_dim));
  }
  writer.commit();
}

}  // namespace lm
