// A family of models is a value: what its config.json may say, what its configuration class assumes where the
// file is silent, and how its files call the tensors. Each has a file in this folder and a line in table.inc;
// the rest of the program sees the ModelSpec that comes of it.
#pragma once

#include <string>

#include "spec/config_reader.h"
#include "spec/model_spec.h"

namespace lm {

inline constexpr int64_t kMostPositions = int64_t{1} << 30;

struct Family {
  const char* model_type = "";    // as config.json has it
  const char* architecture = "";  // the only one of `architectures` that is implemented

  // For missing keys.
  int64_t max_positions = 0;
  int64_t kv_heads = 0;  // 0: as many as query heads
  int64_t head_dim = 0;  // 0: hidden / heads
  double rope_theta = 1e4;
  bool tied = false;
  int64_t pad_token = -1;  // -1: none

  NameMap (*names)() = llama_names;
  // Fills `spec.layers` (one value for each layer is there) from the keys that only some families have.
  // Throws as ConfigReader does.
  void (*read_layers)(const ConfigReader&, ModelSpec& spec) = nullptr;
};

namespace families {
#define LM_FAMILY(name) extern const Family name;
#include "spec/families/table.inc"
#undef LM_FAMILY
}  // namespace families

// The family that `config` names; throws with what is supported otherwise.
const Family& find_family(const ConfigReader& config);
// The family of a spec that was read; null: of another one, made by hand.
const Family* family_of(const ModelSpec& spec);

// ---- What several families read alike

// attention_bias: biases on q, k, v and o.
void read_attention_bias(const ConfigReader& config, ModelSpec& spec);
// mlp_bias: biases on gate, up and down.
void read_mlp_bias(const ConfigReader& config, ModelSpec& spec);
// Refuses a key that would switch on what the architecture does not have; the reference ignores it, and the
// file's author meant another model.
void refuse_if_set(const ConfigReader& config, const ModelSpec& spec, const char* key);
// use_sliding_window and sliding_window (`missing`: when the key is): tokens, 0 for none.
int64_t read_optional_window(const ConfigReader& config, int64_t missing);
// layer_types, where a family lets it choose which layers have the `window`. Without it windows stay.
void read_layer_types(const ConfigReader& config, int64_t window, ModelSpec& spec);
// use_sliding_window, sliding_window, and from which layer on: max_window_layers, unless layer_types says
// more.
void read_last_windows(const ConfigReader& config, ModelSpec& spec);
// layer_types, where all layers of a family are alike: it must say what they are.
void check_layer_types(const ConfigReader& config, const ModelSpec& spec);

}  // namespace lm
