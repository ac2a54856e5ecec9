// A family of models is a value: what its config.json may say, what its configuration class assumes where the
// file is silent, and how its files call the tensors. Each has a file in this folder and a line in table.inc;
// the rest of the program sees the ModelSpec that comes of it.
#pragma once

#include <span>
#include <string>

#include "spec/config_reader.h"
#include "spec/families/ropes.h"
#include "spec/model_spec.h"

namespace lm {

// Caps that keep every product of sizes (bytes of the whole model, 16 B per parameter of state) inside 63
// bits.
inline constexpr int64_t kMostPositions = int64_t{1} << 30;
inline constexpr int64_t kMostConfigBytes = int64_t{4} << 20;
inline constexpr int64_t kMostHeads = 1 << 14, kMostHeadDim = 1 << 12;

// A word of the files for an activation function.
struct ActivationWord {
  const char* word = "";
  Activation activation = Activation::kSilu;
};
inline constexpr ActivationWord kSilu[] = {{"silu", Activation::kSilu}};
inline constexpr ActivationWord kGeluTanh[] = {{"gelu_pytorch_tanh", Activation::kGeluTanh}};
inline constexpr ActivationWord kRelu2[] = {{"relu2", Activation::kRelu2}};

// A dropout of the reference's training: its key, and what the class assumes where that is missing.
struct DropoutKey {
  const char* key = nullptr;  // null: the family has none
  double missing = 0;
};
inline constexpr const char* kAttentionDropout[] = {"attention_dropout"};

// Sizes that the class assumes. A file of the model alone has to name its own; a text_config is written as
// what differs from the class.
struct ClassSizes {
  int64_t hidden = 0, ffn = 0, layers = 0, heads = 0, vocab = 0;
};

struct Family {
  const char* model_type = "";    // as config.json has it
  const char* architecture = "";  // the only one of `architectures` that is implemented
  // model_type and class of files that hold the model inside another one (text_config); null: none do.
  const char* wrapper = nullptr;
  const char* wrapper_architecture = nullptr;

  std::span<const KeyAlias> aliases = {};

  // For missing keys.
  ClassSizes sizes = {};   // in a text_config
  int64_t ffn_factor = 0;  // intermediate_size is so many times hidden_size; 0: the file must say
  int64_t max_positions = 0;
  int64_t original_positions = 0;  // original_max_position_embeddings; 0: the class has no such key
  int64_t kv_heads = 0;            // 0: as many as query heads
  int64_t head_dim = 0;            // 0: hidden / heads
  double norm_eps = 1e-6;
  double rope_theta = 1e4;
  double rotated = 0;  // partial_rotary_factor; 0: heads are turned whole, and another value is refused
  bool tied = false;
  int64_t pad_token = -1;  // -1: none

  NormKind norm = NormKind::kRms;  // of all norms of whole rows
  bool gated = true;               // the MLP
  bool mxfp4 = false;              // its files may hold the experts' matrices as MXFP4
  const char* activation_key = "hidden_act";
  std::span<const ActivationWord> activations = kSilu;  // the first is the class's default
  bool neighbours = false;                              // RopeSpec::neighbours
  bool old_longrope = false;  // longrope is also called su and yarn, and no other kind of RoPE is known
  // Dropouts that training applies: to the embedding's output, and to that of each sublayer.
  DropoutKey embedding_dropout = {}, residual_dropout = {};
  // The attention's, where the family's published files name it: training leaves it out, and a note says so.
  DropoutKey left_out = {};
  // Keys that must be 0, of dropouts that are neither.
  std::span<const char* const> dropouts = kAttentionDropout;

  NameMap (*names)() = llama_names;
  // What transformers' class calls the same, made of `names`; null: the same.
  NameMap (*class_names)(NameMap names) = nullptr;
  // Fills `spec.layers` (one value for each layer is there) from the keys that only some families have.
  // Throws as ConfigReader does.
  void (*read_layers)(const ConfigReader&, ModelSpec& spec) = nullptr;
  // Fills `spec.ropes` once the layers are there; null: the model has none.
  void (*read_ropes)(const ConfigReader&, const Family&, ModelSpec& spec) = read_rope;
};

namespace families {
#define LM_FAMILY(name) extern const Family name;
#include "spec/families/table.inc"
#undef LM_FAMILY
}  // namespace families

// The family that a file names, and the object that holds its keys: the file's own, or text_config.
struct FoundFamily {
  const Family& family;
  ConfigReader config;
  bool wrapped = false;
};
// Throws with what is supported otherwise.
FoundFamily find_family(const Json& root, const ConfigReader& file);

// ---- Names

// `names` with other names of norms (q_norm and k_norm stay), or with other linear layers.
NameMap with_norms(NameMap names, std::vector<NormName> norms);
NameMap with_modules(NameMap names, std::vector<ModuleName> modules);
// Norms before and after a sublayer, as Gemma's files call them.
NameMap four_norm_names();
// Norms after a sublayer alone.
NameMap norms_after_names();

// ---- Shapes of a block. read_sizes has left x += mixer(norm(x)) for each of two mixers.

void add_norms_after(ModelSpec& spec);   // x += norm(mixer(norm(x)))
void move_norms_after(ModelSpec& spec);  // x += norm(mixer(x))
void put_beside(ModelSpec& spec);        // n = norm(x); x += attention(n) + mlp(n)
void set_qkv_bias(ModelSpec& spec, bool bias);
void set_mlp_bias(ModelSpec& spec, bool bias);

// ---- What several families read alike

// Refuses sizes of heads that do not fit each other.
void check_heads(const ConfigReader& config, const AttentionSpec& attention);
// attention_bias: biases on q, k, v and o.
void read_attention_bias(const ConfigReader& config, ModelSpec& spec);
// mlp_bias: biases on all of the MLP's layers.
void read_mlp_bias(const ConfigReader& config, ModelSpec& spec);
// Refuses a key that would switch on what the architecture does not have; the reference ignores it, and the
// file's author meant another model.
void refuse_if_set(const ConfigReader& config, const ModelSpec& spec, const char* key);
// A soft cap: null is none.
double read_cap(const ConfigReader& config, const char* key, double missing);
// sliding_window in tokens: null is none.
int64_t read_window(const ConfigReader& config, int64_t missing);
// use_sliding_window and sliding_window (`missing`: when the key is): tokens, 0 for none.
int64_t read_optional_window(const ConfigReader& config, int64_t missing);
// layer_types, where a family lets it choose which layers have the `window`. Without it windows stay.
void read_layer_types(const ConfigReader& config, int64_t window, ModelSpec& spec);
// The same of a family whose layers all slide without it, but each `pattern`-th.
void read_pattern(const ConfigReader& config, int64_t window, int64_t pattern, ModelSpec& spec);
// use_sliding_window, sliding_window, and from which layer on: max_window_layers, unless layer_types says
// more.
void read_last_windows(const ConfigReader& config, ModelSpec& spec);
// layer_types, where all layers of a family are alike: it must say what they are.
void check_layer_types(const ConfigReader& config, const ModelSpec& spec);

}  // namespace lm
