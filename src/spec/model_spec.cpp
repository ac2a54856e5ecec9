#include "spec/model_spec.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "spec/families/family.h"

namespace lm {
namespace {

constexpr int64_t kMostHidden = int64_t{1} << 20, kMostFfn = int64_t{1} << 22, kMostLayers = 4096;
constexpr int64_t kMostVocab = int64_t{1} << 24, kMostLabels = int64_t{1} << 16;

// A file that holds the model inside another one names that one's class, or the model's.
void check_architecture(const ConfigReader& file, const Family& family, bool wrapped) {
  const Json* list = file.find("architectures");
  if (!list) return;
  if (!list->is_array() ||
      !std::all_of(list->begin(), list->end(), [](const Json& j) { return j.is_string(); })) {
    file.fail("architectures", "must be a list of strings");
  }
  if (list->empty()) return;
  const std::string first = list->front().get<std::string>();
  const bool known = first == family.architecture || (wrapped && first == family.wrapper_architecture) ||
                     (!wrapped && first == classifier_of(family.model_type));
  if (list->size() != 1 || !known) {
    const std::string one = wrapped ? family.wrapper_architecture : family.architecture;
    file.fail("architectures", "= \"" + first.substr(0, 100) + "\" is not supported: only " + one +
                                   " is implemented for " + (wrapped ? family.wrapper : family.model_type));
  }
}

// Features that a key switches on and that are not implemented; to ignore one would train another model.
void refuse_what_is_set(const ConfigReader& config, const Family& family) {
  for (const char* key : {"is_encoder_decoder", "add_cross_attention"}) {
    if (config.boolean(key, false)) config.fail(key, "= true is not supported: only causal decoders are");
  }
  // "vision" concerns tokens of images alone.
  constexpr const char* kBoth = "use_bidirectional_attention";
  const Json* const both = config.find(kBoth);
  if (both && *both != false && *both != "vision") {
    config.fail(kBoth, "= " + both->dump(-1, ' ', true).substr(0, 100) +
                           " is not supported: only causal decoders are");
  }
  for (const char* key : family.dropouts) {
    if (config.number(key, 0.0) != 0.0) config.fail(key, "other than 0 is not supported");
  }
}

// What bitsandbytes quantized is read as it is, and so is MXFP4, of families that were published in it.
EncodingKind read_quantization(const ConfigReader& config, const Family& family) {
  constexpr const char* kKey = "quantization_config";
  const Json* const table = config.find(kKey);
  if (table == nullptr) return EncodingKind::kPlain;
  const ConfigReader q = config.inside(kKey);
  const std::string method =
      table->contains("quant_method") ? (*table)["quant_method"].dump().substr(0, 100) : "an unnamed method";
  if (family.mxfp4 && method == "\"mxfp4\"") return EncodingKind::kMxfp4;
  const bool four = q.boolean("load_in_4bit", false), eight = q.boolean("load_in_8bit", false);
  if (method != "\"bitsandbytes\"" || four == eight) {
    config.fail(kKey, "quantized weights (" + method +
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

// A size that a text_config may leave to the class.
int64_t read_size(const ConfigReader& config, const char* key, int64_t assumed, int64_t most) {
  return assumed > 0 ? config.size(key, assumed, most) : config.required_size(key, most);
}

Activation read_activation(const ConfigReader& config, const Family& family) {
  const char* const key = family.activation_key;
  const std::string written = config.text(key).value_or(family.activations.front().word);
  std::string supported;
  for (const ActivationWord& one : family.activations) {
    if (written == one.word) return one.activation;
    supported += (supported.empty() ? "" : " or ") + std::string(one.word);
  }
  config.fail(key, "= \"" + written.substr(0, 100) + "\" is not supported, only " + supported);
}

MixerSpec read_mlp(const ConfigReader& config, const Family& family, const ClassSizes& assumed,
                   int64_t hidden) {
  const int64_t missing = family.ffn_factor > 0 ? family.ffn_factor * hidden : assumed.ffn;
  const int64_t ffn = read_size(config, "intermediate_size", missing, kMostFfn);
  const Activation activation = read_activation(config, family);
  if (family.gated) return GatedMlpSpec{.activation = activation, .ffn = ffn};
  return PlainMlpSpec{.activation = activation, .ffn = ffn};
}

AttentionSpec read_attention(const ConfigReader& config, const Family& family, const ClassSizes& assumed,
                             int64_t hidden) {
  AttentionSpec out;
  out.heads = read_size(config, "num_attention_heads", assumed.heads, kMostHeads);
  const bool kv_null = config.is_null("num_key_value_heads");
  out.kv_heads = config.size("num_key_value_heads", family.kv_heads && !kv_null ? family.kv_heads : out.heads,
                             kMostHeads);
  const bool by_hidden = family.head_dim == 0 || config.is_null("head_dim");
  if (!config.find("head_dim") && by_hidden && hidden % out.heads != 0) {
    config.fail("hidden_size",
                fmt::format("= {} is not a multiple of num_attention_heads = {}, and there is no head_dim",
                            hidden, out.heads));
  }
  out.head_dim = config.size(
      "head_dim", by_hidden ? std::max<int64_t>(hidden / out.heads, 1) : family.head_dim, kMostHeadDim);
  check_heads(config, out);
  return out;
}

// Sizes, and layers that are all alike: what only some families have is read by Family::read_layers.
void read_sizes(const ConfigReader& config, const Family& family, const ClassSizes& assumed,
                ModelSpec& spec) {
  spec.hidden = read_size(config, "hidden_size", assumed.hidden, kMostHidden);
  const MixerSpec mlp = read_mlp(config, family, assumed, spec.hidden);
  const int64_t layers = read_size(config, "num_hidden_layers", assumed.layers, kMostLayers);
  spec.vocab = read_size(config, "vocab_size", assumed.vocab, kMostVocab);
  spec.max_positions = config.size("max_position_embeddings", family.max_positions, kMostPositions);
  const AttentionSpec attention = read_attention(config, family, assumed, spec.hidden);
  spec.final_norm = {.kind = family.norm, .eps = config.number("rms_norm_eps", family.norm_eps)};
  if (!(spec.final_norm.eps >= 0) || spec.final_norm.eps > 1)
    config.fail("rms_norm_eps", "must be in [0, 1]");
  const LayerSpec layer{{{spec.final_norm, attention}, {spec.final_norm, mlp}}};
  spec.layers.assign(static_cast<size_t>(layers), layer);
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

double read_dropout(const ConfigReader& config, const DropoutKey& dropout) {
  if (dropout.key == nullptr) return 0;
  const double p = config.number(dropout.key, dropout.missing);
  if (!(p >= 0 && p < 1)) config.fail(dropout.key, fmt::format("= {} is not in [0, 1)", p));
  return p;
}

void read_dropouts(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  spec.embedding.dropout = read_dropout(config, family.embedding_dropout);
  const double p = read_dropout(config, family.residual_dropout);
  for (LayerSpec& layer : spec.layers)
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.dropout = p;
}

// Label names as transformers assumes them where the file has none.
std::vector<std::string> read_labels(const ConfigReader& config) {
  const Json* const names = config.find("id2label");
  if (names == nullptr) {
    const int64_t count = config.size("num_labels", 2, kMostLabels);
    std::vector<std::string> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(fmt::format("LABEL_{}", i));
    return out;
  }
  if (!names->is_object() || names->empty() || std::ssize(*names) > kMostLabels)
    config.fail("id2label", fmt::format("must be an object of 1 to {} names", kMostLabels));
  std::vector<std::string> out;
  for (size_t i = 0; i < names->size(); ++i) {
    const auto name = names->find(std::to_string(i));
    if (name == names->end() || !name->is_string())
      config.fail("id2label", fmt::format("has no name for \"{}\": its keys count from 0", i));
    out.push_back(name->get<std::string>());
  }
  return out;
}

LabelProblem read_problem(const ConfigReader& config, size_t labels) {
  const std::optional<std::string> word = config.text("problem_type");
  if (!word) return labels == 1 ? LabelProblem::kRegression : LabelProblem::kSingleLabel;
  for (const LabelProblem problem :
       {LabelProblem::kSingleLabel, LabelProblem::kMultiLabel, LabelProblem::kRegression}) {
    if (*word == problem_name(problem)) return problem;
  }
  config.fail("problem_type", "= \"" + word->substr(0, 100) + "\" is none that transformers knows");
}

// Whether the file is of transformers' class for sequence classification.
bool is_classifier(const ConfigReader& file, const Family& family) {
  const Json* const list = file.find("architectures");
  return list != nullptr && list->is_array() && !list->empty() && list->front().is_string() &&
         list->front().get<std::string>() == classifier_of(family.model_type);
}

void read_score_head(const ConfigReader& config, const std::string& place, ModelSpec& spec) {
  ScoreHead head{.labels = read_labels(config), .pad_token = spec.pad_token};
  head.problem = read_problem(config, head.labels.size());
  set_score_head(spec, std::move(head), place);
}

}  // namespace

ModelSpec parse_model_spec(const std::string& json, const std::string& place) {
  const Json root = parse_json(json, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!root.is_object()) fail_json("config.json must hold one object", place, 0);
  const ConfigReader file(root, place, "");
  const auto [family, config, wrapped] = find_family(root, file);
  check_architecture(file, family, wrapped);
  ModelSpec spec;
  spec.model_type = family.model_type;
  spec.architecture = wrapped ? family.wrapper_architecture : family.architecture;
  if (wrapped) spec.wrapper = family.wrapper;
  spec.names = family.names();
  if (family.class_names != nullptr) spec.class_names = family.class_names(spec.names);
  refuse_what_is_set(config, family);
  spec.stored = read_quantization(wrapped && !file.find("quantization_config") ? config : file, family);
  read_sizes(config, family, wrapped ? family.sizes : ClassSizes{}, spec);
  // Older files of a model inside another one have the key in neither object, and mean the text's class.
  constexpr const char* kTied = "tie_word_embeddings";
  spec.tied = file.boolean(kTied, config.boolean(kTied, family.tied));
  family.read_layers(config, spec);
  read_dropouts(config, family, spec);
  if (family.read_ropes != nullptr) family.read_ropes(config, family, spec);
  read_tokens(config, family, spec);
  if (!wrapped && is_classifier(file, family)) read_score_head(config, place, spec);
  return spec;
}

}  // namespace lm
