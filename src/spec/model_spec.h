// What a model is, as data: read from a Hugging Face config.json, the same value for every family. The
// differences between families (names, tied heads, RoPE scaling, and what each layer is) are fields here, not
// branches in the model; what each family's file may say is in families/. Torch-free; immutable after
// construction.
//
// Symbols: H hidden, V vocabulary, L layers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/encoding_kind.h"
#include "spec/layer_spec.h"
#include "spec/name_map.h"
#include "spec/score_head.h"

namespace lm {

// One table of rotary position embeddings (Su et al., "RoFormer"): frequencies of pairs of a head's features.
struct RopeSpec {
  enum class Scaling : uint8_t {
    kNone,
    kLinear,
    kLlama3,
    kDynamic,       // NTK: theta grows with the longest text past max_position
    kYarn,          // Peng et al., "YaRN"
    kLongRope,      // Ding et al., "LongRoPE": a factor for each frequency, of short texts and of long ones
    kProportional,  // Gemma 4: the first `turned` frequencies are those of the whole head, the others 0
  };
  int64_t dim = 0;          // features of a head that are rotated, two to a frequency; the others stay
  bool neighbours = false;  // a pair is features 2i and 2i + 1; else i and i + dim/2
  double theta = 1e4;
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  double attention_factor = 1.0;         // multiplies cosines and sines (yarn, longrope)
  int64_t original_max_position = 8192;  // llama3, dynamic (max_position_embeddings), yarn, longrope
  double low_freq_factor = 1.0;          // llama3
  double high_freq_factor = 4.0;
  double beta_fast = 32, beta_slow = 1;  // yarn: turns of the frequencies between which it blends
  bool truncate = true;                  // yarn: these frequencies are whole ones
  std::vector<double> short_factors = {}, long_factors = {};  // longrope: [dim / 2]
  int64_t turned = 0;                                         // proportional
  bool operator==(const RopeSpec&) const = default;
};

// What the embedding stage makes for each layer of a token, beside the first layer's input x:
//   (norm(projection(x) / sqrt(H)) + sqrt(width) * table[token]) / sqrt(2)
// of `width` elements for each of `layers`.
struct InputsSpec {
  int64_t width = 0;  // 0: there are none
  int64_t layers = 0;
  int64_t vocab = 0;  // rows of the table
  NormSpec norm = {};
  int64_t all() const { return width * layers; }
  bool operator==(const InputsSpec&) const = default;
};

// What becomes of a token's row of the embedding.
struct EmbeddingSpec {
  double scale = 1;            // multiplies it
  bool round_scale = false;    // the factor is rounded to the weights' type first
  bool scales_prompt = false;  // embeddings that do not come of the table are multiplied by it, too
  int64_t positions = 0;       // rows of a table of learned positions, which are added to it; 0: none
  InputsSpec inputs = {};      // of the layers (LayerInputSpec)
  double dropout = 0;          // of the sum, while training
  bool operator==(const EmbeddingSpec&) const = default;
};

// What becomes of the head's products: c tanh(scale * product / c).
struct HeadSpec {
  double logit_scale = 1;
  double logit_cap = 0;  // c; 0: none
  bool operator==(const HeadSpec&) const = default;
};

struct ModelSpec {
  std::string model_type;    // "llama", "qwen2", ...: the file's word
  std::string architecture;  // "LlamaForCausalLM"
  // model_type of the file where it holds the text model inside another one (text_config); "": it does not.
  std::string wrapper;
  NameMap names = llama_names();
  // Those of files that were written as transformers' class holds the model, where the family's are others.
  std::optional<NameMap> class_names = {};
  int64_t hidden = 0;           // H
  int64_t vocab = 0;            // V
  int64_t max_positions = 0;    // max_position_embeddings
  std::vector<RopeSpec> ropes;  // that the layers' attention chooses from
  EmbeddingSpec embedding;
  HeadSpec head;
  ScoreHead score;                // in place of the vocabulary head, which `head` and `tied` are of
  NormSpec final_norm;            // before the head
  bool tied = false;              // the head is the embedding's matrix
  int64_t pad_token = -1;         // its embedding row gets no gradient from the input side; -1: none
  std::vector<LayerSpec> layers;  // L
  // Layers behind them in the files that predict further tokens (multi-token prediction). They are not
  // loaded, and an export copies them.
  int64_t predictors = 0;
  // Coefficient of the loss that balances experts, where config.json asks for one (output_router_logits).
  double router_aux_loss = 0;
  // Of the blocks' matrices in the files; a matrix may be stored plainly all the same.
  EncodingKind stored = EncodingKind::kPlain;

  // Tokens of the longest text that the model was made for, what scales its RoPE taken into account.
  int64_t longest_text() const;
  bool scores() const { return !score.labels.empty(); }
  // Of the matrix that the head multiplies by.
  int64_t head_rows() const { return scores() ? static_cast<int64_t>(score.labels.size()) : vocab; }
  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }  // L
  const LayerSpec& layer(int64_t i) const { return layers[static_cast<size_t>(i)]; }
};

// Reads and checks the text of a config.json, which `place` names in messages; throws Error(11) naming the
// key for what is missing, malformed, contradictory or not implemented (the reason included). Missing keys
// take the class's default. Of a directory of files: weights/model_directory.h.
ModelSpec parse_model_spec(const std::string& json, const std::string& place);

// cos and sin frequencies: inverse frequency per pair, length dim/2, with the scaling applied (fp32
// arithmetic, as transformers has it: f_i = theta^(-2i/dim)). `longest`: tokens of the run's longest text,
// which dynamic and longrope depend on; the reference asks each batch, this program the run.
std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t longest = 0);

}  // namespace lm
