#include "spec/model_spec.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "spec/families/family.h"

namespace lm {
namespace {

// Caps that keep every product of sizes (bytes of the whole model, 16 B per parameter of state) inside 63
// bits.
constexpr int64_t kMostHidden = int64_t{1} << 20, kMostFfn = int64_t{1} << 22, kMostLayers = 4096;
constexpr int64_t kMostVocab = int64_t{1} << 24, kMostHeads = 1 << 14, kMostHeadDim = 1 << 12;
constexpr int64_t kMostRows = int64_t{1} << 22;
constexpr int64_t kMostConfigBytes = int64_t{4} << 20;

void check_architecture(const ConfigReader& config, const Family& family) {
  const Json* list = config.find("architectures");
  if (!list) return;
  if (!list->is_array() ||
      !std::all_of(list->begin(), list->end(), [](const Json& j) { return j.is_string(); })) {
    config.fail("architectures", "must be a list of strings");
  }
  if (list->empty()) return;
  const std::string first = list->front().get<std::string>();
  if (list->size() != 1 || first != family.architecture) {
    config.fail("architectures", "= \"" + first.substr(0, 100) + "\" is not supported: only " +
                                     family.architecture + " is implemented for " + family.model_type);
  }
}

// Features that a key switches on and that are not implemented; to ignore one would train another model.
void refuse_what_is_set(const ConfigReader& config) {
  for (const char* key : {"use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"}) {
    if (config.boolean(key, false)) config.fail(key, "= true is not supported: only causal decoders are");
  }
  if (config.number("attention_dropout", 0.0) != 0.0) {
    config.fail("attention_dropout", "other than 0 is not supported");
  }
  if (config.number("partial_rotary_factor", 1.0) != 1.0) {
    config.fail("partial_rotary_factor", "other than 1 is not supported");
  }
  const std::string act = config.text("hidden_act").value_or("silu");
  if (act != "silu")
    config.fail("hidden_act", "= \"" + act.substr(0, 100) + "\" is not supported, only silu");
}

// What bitsandbytes quantised is read as it is.
EncodingKind read_quantisation(const ConfigReader& config) {
  constexpr const char* kKey = "quantization_config";
  const Json* const table = config.find(kKey);
  if (table == nullptr || table->is_null()) return EncodingKind::kPlain;
  if (!table->is_object()) config.fail(kKey, "must be an object");
  const std::string method =
      table->contains("quant_method") ? (*table)["quant_method"].dump().substr(0, 100) : "an unnamed method";
  const ConfigReader q(*table, config.place(), std::string(kKey) + ".");
  const bool four = q.boolean("load_in_4bit", false), eight = q.boolean("load_in_8bit", false);
  if (method != "\"bitsandbytes\"" || four == eight) {
    config.fail(kKey, "quantised weights (" + method +
                          ") are not supported: use the model's bf16, fp16 or fp32 version, or what "
                          "bitsandbytes made of it in 4 or 8 bits");
  }
  if (eight) return EncodingKind::kInt8;
  const std::string type = q.text("bnb_4bit_quant_type").value_or("fp4");
  if (type != "nf4" && type != "fp4")
    q.fail("bnb_4bit_quant_type", "= \"" + type.substr(0, 100) + "\" is neither nf4 nor fp4");
  const std::string storage = q.text("bnb_4bit_quant_storage").value_or("uint8");
  if (storage != "uint8")
    q.fail("bnb_4bit_quant_storage", "= \"" + storage.substr(0, 100) + "\" is not supported, only uint8");
  const bool twice = q.boolean("bnb_4bit_use_double_quant", false);
  if (type == "fp4") return twice ? EncodingKind::kFp4Double : EncodingKind::kFp4;
  return twice ? EncodingKind::kNf4Double : EncodingKind::kNf4;
}

GatedMlpSpec read_mlp(const ConfigReader& config) {
  return {.ffn = config.required_size("intermediate_size", kMostFfn)};
}

AttentionSpec read_attention(const ConfigReader& config, const Family& family, int64_t hidden) {
  AttentionSpec out;
  out.heads = config.required_size("num_attention_heads", kMostHeads);
  const bool kv_null = config.is_null("num_key_value_heads");
  out.kv_heads = config.size("num_key_value_heads", family.kv_heads && !kv_null ? family.kv_heads : out.heads,
                             kMostHeads);
  if (out.heads % out.kv_heads != 0) {
    config.fail("num_key_value_heads",
                fmt::format("= {} does not divide num_attention_heads = {}", out.kv_heads, out.heads));
  }
  if (!config.find("head_dim") && family.head_dim == 0 && hidden % out.heads != 0) {
    config.fail("hidden_size",
                fmt::format("= {} is not a multiple of num_attention_heads = {}, and there is no head_dim",
                            hidden, out.heads));
  }
  out.head_dim = config.size(
      "head_dim", family.head_dim ? family.head_dim : std::max<int64_t>(hidden / out.heads, 1), kMostHeadDim);
  if (out.head_dim % 2 != 0) {
    config.fail("head_dim", fmt::format("= {} is odd: RoPE turns pairs of features", out.head_dim));
  }
  if (out.q_rows() > kMostRows) {
    config.fail("head_dim",
                fmt::format("× num_attention_heads = {} is more than {}", out.q_rows(), kMostRows));
  }
  return out;
}

// Sizes, and layers that are all alike: what only some families have is read by Family::read_layers.
void read_sizes(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  spec.hidden = config.required_size("hidden_size", kMostHidden);
  const GatedMlpSpec mlp = read_mlp(config);
  const int64_t layers = config.required_size("num_hidden_layers", kMostLayers);
  spec.vocab = config.required_size("vocab_size", kMostVocab);
  spec.max_positions = config.size("max_position_embeddings", family.max_positions, kMostPositions);
  const AttentionSpec attention = read_attention(config, family, spec.hidden);
  spec.final_norm.eps = config.number("rms_norm_eps", 1e-6);
  if (!(spec.final_norm.eps >= 0) || spec.final_norm.eps > 1)
    config.fail("rms_norm_eps", "must be in [0, 1]");
  spec.layers.assign(static_cast<size_t>(layers), llama_layer(spec.final_norm, attention, mlp));
  spec.ropes = {{.dim = attention.head_dim}};
}

void read_rope(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  RopeSpec& out = spec.ropes.front();
  // Old form: rope_theta and rope_scaling; newer: rope_parameters with both. If all are there, rope_scaling's
  // entries count, and a theta inside wins over the one outside: the order of the reference.
  const char* key = "rope_parameters";
  const Json* table = config.find("rope_scaling");
  if (table && table->is_object() && !table->empty()) {
    key = "rope_scaling";
  } else {
    table = config.find(key);
  }
  out.theta = config.number("rope_theta", family.rope_theta);
  std::string type = "default";
  if (table) {
    if (!table->is_object()) config.fail(key, "must be an object");
    for (const char* nested : {"full_attention", "sliding_attention"}) {
      if (table->contains(nested)) config.fail(key, "per kind of layer is not supported");
    }
    const ConfigReader rope(*table, config.place(), std::string(key) + ".");
    type = rope.text("rope_type").value_or(rope.text("type").value_or("default"));
    out.theta = rope.number("rope_theta", out.theta);
    if (rope.number("partial_rotary_factor", 1.0) != 1.0) {
      rope.fail("partial_rotary_factor", "other than 1 is not supported");
    }
    if (type == "linear") {
      out.scaling = RopeSpec::Scaling::kLinear;
      out.factor = rope.required_number("factor");
    } else if (type == "llama3") {
      out.scaling = RopeSpec::Scaling::kLlama3;
      out.factor = rope.required_number("factor");
      out.low_freq_factor = rope.required_number("low_freq_factor");
      out.high_freq_factor = rope.required_number("high_freq_factor");
      out.original_max_position = config.size(
          "original_max_position_embeddings",
          rope.size("original_max_position_embeddings", spec.max_positions, kMostPositions), kMostPositions);
      if (!(out.low_freq_factor >= 1e-6) || !(out.high_freq_factor > out.low_freq_factor) ||
          out.high_freq_factor > 1e6) {
        rope.fail("high_freq_factor", "must be more than low_freq_factor, both in [1e-6, 1e6]");
      }
    } else if (type != "default") {
      rope.fail("rope_type",
                "= \"" + type.substr(0, 100) + "\" is not supported (supported: default, linear, llama3)");
    }
    if (!(out.factor >= 1e-6) || out.factor > 1e6) rope.fail("factor", "must be in [1e-6, 1e6]");
  }
  if (!(out.theta >= 1) || out.theta > 1e15) config.fail("rope_theta", "must be in [1, 1e15]");
}

void read_tokens(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  auto check = [&](const char* key, const Json& id) {
    if (!id.is_number_integer()) config.fail(key, "must be an integer or null");
    // An unsigned number past 2^63 would turn negative in get<int64_t>.
    const bool huge = id.is_number_unsigned() && id.get<uint64_t>() >= static_cast<uint64_t>(spec.vocab);
    if (huge || id.get<int64_t>() >= spec.vocab) {
      config.fail(key, fmt::format("= {} is not below vocab_size = {}", id.dump(), spec.vocab));
    }
  };
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    const Json* id = config.find(key);
    if (!id) continue;
    if (id->is_array()) {
      for (const Json& one : *id) check(key, one);
    } else {
      check(key, *id);
    }
  }
  Json pad = family.pad_token;
  if (const Json* written = config.find("pad_token_id"))
    pad = *written;
  else if (family.pad_token < 0 || config.is_null("pad_token_id"))
    return;
  check("pad_token_id", pad);
  spec.pad_token = pad.get<int64_t>();
  // A negative index counts from the end, as in torch's embedding.
  if (spec.pad_token < 0) spec.pad_token += spec.vocab;
  if (spec.pad_token < 0) config.fail("pad_token_id", "= " + pad.dump() + " is below -vocab_size");
}

}  // namespace

ModelSpec parse_model_spec(const std::string& json, const std::string& place) {
  const Json root = parse_json(json, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!root.is_object()) fail_json("config.json must hold one object", place, 0);
  const ConfigReader config(root, place, "");
  const Family& family = find_family(config);
  check_architecture(config, family);
  ModelSpec spec;
  spec.model_type = family.model_type;
  spec.architecture = family.architecture;
  spec.names = family.names();
  refuse_what_is_set(config);
  spec.stored = read_quantisation(config);
  read_sizes(config, family, spec);
  spec.tied = config.boolean("tie_word_embeddings", family.tied);
  family.read_layers(config, spec);
  read_rope(config, family, spec);
  read_tokens(config, family, spec);
  return spec;
}

ModelSpec read_model_spec(const std::string& directory) {
  const std::string path = directory + "/config.json";
  return parse_model_spec(read_small_file(path, kMostConfigBytes), path);
}

int64_t ModelSpec::longest_text() const {
  int64_t longest = max_positions;
  for (const RopeSpec& rope : ropes) {
    const auto scaled = [&](int64_t positions) {
      return static_cast<int64_t>(std::min(rope.factor * static_cast<double>(positions), 1e15));
    };
    switch (rope.scaling) {
      case RopeSpec::Scaling::kNone:
        break;
      case RopeSpec::Scaling::kLinear:  // files name the positions before scaling or after it
        longest = std::max(longest, scaled(max_positions));
        break;
      case RopeSpec::Scaling::kLlama3:
        longest = std::max(longest, scaled(rope.original_max_position));
        break;
    }
  }
  return longest;
}

std::vector<float> rope_frequencies(const RopeSpec& rope) {
  // The reference divides a number by a tensor, which torch computes as reciprocal × number; the same order
  // here, because these few roundings are all there is to agree on.
  const float factor = static_cast<float>(rope.factor);
  const float low = static_cast<float>(rope.low_freq_factor);
  const float spread = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  const float original = static_cast<float>(rope.original_max_position);
  const float low_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.low_freq_factor);
  const float high_wavelength =
      static_cast<float>(static_cast<double>(rope.original_max_position) / rope.high_freq_factor);
  std::vector<float> frequencies(static_cast<size_t>(rope.dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope.dim);
    // fp64 inside, rounded once: within one unit of the last place of any good fp32 power.
    const float power = static_cast<float>(
        std::pow(static_cast<double>(static_cast<float>(rope.theta)), static_cast<double>(exponent)));
    float f = 1.0f / power;
    if (rope.scaling == RopeSpec::Scaling::kLinear) f = f / factor;
    if (rope.scaling == RopeSpec::Scaling::kLlama3) {
      const float wavelength = (1.0f / f) * static_cast<float>(2 * std::numbers::pi);
      if (wavelength > low_wavelength) {
        f = f / factor;
      } else if (!(wavelength < high_wavelength)) {
        const float smooth = ((1.0f / wavelength) * original - low) / spread;
        f = (1.0f - smooth) * f / factor + smooth * f;
      }
    }
    frequencies[i] = f;
  }
  return frequencies;
}

}  // namespace lm
