// What a model is, as data: read from a Hugging Face config.json, the same value for every family. The
// differences between families (names, tied heads, RoPE scaling, and what each layer is) are fields here, not
// branches in the model; what each family's file may say is in families/. Torch-free; immutable after
// construction.
//
// Symbols: H hidden, F ffn, V vocabulary, L layers, n_h / n_kv query / key-value heads, d head size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/encoding_kind.h"
#include "spec/layer_spec.h"
#include "spec/name_map.h"

namespace lm {

struct RopeScaling {
  enum class Type : uint8_t { kNone, kLinear, kLlama3 };
  Type type = Type::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;  // llama3 only
  double high_freq_factor = 4.0;
  int64_t original_max_position = 8192;
};

struct ModelSpec {
  std::string model_type;    // "llama", "qwen2", ...: the file's word
  std::string architecture;  // "LlamaForCausalLM"
  NameMap names = llama_names();
  int64_t hidden = 0;         // H
  int64_t ffn = 0;            // F
  int64_t heads = 0;          // n_h
  int64_t kv_heads = 0;       // n_kv
  int64_t head_dim = 0;       // d
  int64_t vocab = 0;          // V
  int64_t max_positions = 0;  // max_position_embeddings
  double rms_eps = 1e-6;
  double rope_theta = 1e4;
  RopeScaling rope;
  bool tied = false;              // the head is the embedding's matrix
  int64_t pad_token = -1;         // its embedding row gets no gradient from the input side; -1: none
  std::vector<LayerSpec> layers;  // L
  // Of the blocks' matrices in the files; a matrix may be stored plainly all the same.
  EncodingKind stored = EncodingKind::kPlain;

  // Tokens of the longest text that the model was made for, what scales its RoPE taken into account.
  int64_t longest_text() const;
  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }  // L
  const LayerSpec& layer(int64_t i) const { return layers[static_cast<size_t>(i)]; }
  NormKind final_norm() const { return layers.back().norm; }  // before the head: as the last layer's
  int64_t q_rows() const { return heads * head_dim; }
  int64_t kv_rows() const { return kv_heads * head_dim; }
  int64_t qkv_rows() const { return q_rows() + 2 * kv_rows(); }
};

// Reads and checks `directory`/config.json; throws Error(11) naming the key for what is missing, malformed,
// contradictory or not implemented (the reason included). Missing keys take the class's default.
ModelSpec read_model_spec(const std::string& directory);
// The same from the text; `place` names it in messages.
ModelSpec parse_model_spec(const std::string& json, const std::string& place);

// cos and sin frequencies: inverse frequency per pair, length d/2, with the scaling applied (fp32 arithmetic,
// as transformers has it: f_i = theta^(-2i/d)).
std::vector<float> rope_frequencies(const ModelSpec& spec);

}  // namespace lm
