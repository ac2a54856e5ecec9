// The model's parameters as a list of blocks: embedding, L transformer blocks, final norm + head. A parameter
// is a tensor of ours; projections that share an input are one tensor (q, k, v; gate, up), so that they are
// one GEMM, and remember the rows of each Hugging Face tensor in it. Torch-free values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/choices.h"
#include "spec/model_spec.h"
#include "spec/trainable.h"

namespace lm {

// What stands before a tensor's name in an adapter's file.
inline constexpr std::string_view kAdapterPrefix = "base_model.model.";

enum class ParameterKind : uint8_t {
  kEmbedding,  // of tokens, of positions, or of layers' inputs
  kMatrix,
  kBias,
  kSinks,    // logits of an attention's heads
  kFactors,  // that multiply something of a router, 1 where a model is fresh
  kNorm,
  kBuffer,     // a vector of the files that nobody trains: frozen in every run, and written back
  kMagnitude,  // a vector of an adapter: the lengths of a matrix's rows, or factors of its rows or columns
};

// One Hugging Face tensor inside a parameter of ours: rows [first, first + rows).
struct ParameterPart {
  std::string name;  // e.g. "model.layers.3.self_attn.q_proj.weight"
  int64_t first = 0;
  int64_t rows = 0;
  bool transposed = false;  // the files hold it as [columns, rows]
  int64_t heads = 0;        // of a vector: the files hold it as [heads, rows / heads]; 0: as [rows]
  // Columns [column, column + columns) of a tensor of the files with `file_columns` of them, which has other
  // parts beside this one. `file`: its name, `name` being the part's own; "": the part is a whole tensor.
  std::string file = {};
  int64_t column = 0, file_columns = 0;
  // Of `file`, the matrices (or vectors) of `slices` experts one behind another, that of this one; 0: it has
  // columns.
  int64_t slice = 0, slices = 0;
  bool flat = false;  // of slices: the file has [slices * rows, columns], and not [slices, rows, columns]
  // Of columns: one of so many is the part's, from `column` on; those between are other parts'.
  int64_t step = 1;
  const std::string& tensor() const { return file.empty() ? name : file; }
};

struct Parameter {
  std::string name;  // ours, unique in the model: "layers.3.attn.qkv", "embed", "head", "norm"
  ParameterKind kind = ParameterKind::kMatrix;
  int64_t rows = 0;  // a vector has rows = its length and columns = 1
  int64_t columns = 1;
  std::vector<ParameterPart> parts;  // in row order, covering all rows
  TrainableRole role = TrainableRole::kWeight;
  std::string owner = {};  // the tensor of the files that it belongs to; "": itself
  float neutral = 1;       // of a norm's weight, a buffer or factors: the fresh value
  int64_t fan_in = 0;      // of an encoder's tensors: the inputs of their layer, which fresh values are of
  bool plain = false;      // a matrix that is never quantized
  int64_t expert = -1;     // of its layer, whose tensor only some tokens meet; -1: of none
  bool fp32 = false;       // a buffer that is fp32, whatever the model's type
  std::string site = {};   // of a pair of low rank: the path that its rank and alpha are chosen by
  int64_t elements() const { return rows * columns; }
  bool of_expert() const { return expert >= 0; }
  bool vector() const { return kind != ParameterKind::kEmbedding && kind != ParameterKind::kMatrix; }
  // Of that part, as the files have it.
  std::vector<int64_t> shape(const ParameterPart& part) const {
    if (role == TrainableRole::kOutputScale) return {part.rows, 1};
    if (role == TrainableRole::kInputScale) return {1, part.rows};
    if (vector())
      return part.heads > 0 ? std::vector{part.heads, part.rows / part.heads} : std::vector{part.rows};
    return part.transposed ? std::vector{columns, part.rows} : std::vector{part.rows, columns};
  }
  // Of the tensor of the files that has the part.
  std::vector<int64_t> file_shape(const ParameterPart& part) const {
    if (part.slices > 0 && part.flat) return {part.slices * part.rows, columns};
    if (part.slices > 0) {
      std::vector<int64_t> all = shape(part);
      all.insert(all.begin(), part.slices);
      return all;
    }
    return part.file.empty() ? shape(part) : std::vector{part.rows, part.file_columns};
  }
};

// What the tensors of an adapter are.
enum class AdapterKind : uint8_t {
  kLora,    // pairs of low rank beside linear layers, with DoRA also lengths of rows
  kIa3,     // factors of linear layers' outputs, and of the inputs of an MLP's last layer
  kNorms,   // LN tuning: copies of norms
  kPrefix,  // keys and values of virtual tokens before each document, of every layer
  kPrompt,  // embeddings of such tokens
};
// The tensor of the files of prefix, prompt and P-tuning.
inline constexpr std::string_view kPromptTensor = "prompt_embeddings";
// P-tuning's encoder is in checkpoints alone, where its tensors begin with this: peft's names while it
// trains.
inline constexpr std::string_view kEncoderPrefix = "prompt_encoder.";

// An adapter as the parameter list needs it; without pairs r and what follows from it are unused. Modules are
// named by LinearModule::name ("q_proj"), or by whole paths
// ("model.layers.3.self_attn.q_proj"); spec/adapter_sites.h resolves patterns to these. Among them may be the
// parameters of a layer's experts (spec/expert_adapters.h).
struct AdapterSpec {
  int64_t r = 0;
  double alpha = 0;
  bool rslora = false;
  bool dora = false;  // the lengths of the rows are trained, too
  // The pairs began as the best approximations of the matrices, and count from there: W' = W + s (B A - B0
  // A0), A0 and B0 frozen (PiSSA).
  bool pissa = false;
  double dropout = 0;
  std::vector<std::string> targets;  // the adapted modules, e.g. {"q_proj", "k_proj", ..., "down_proj"}
  std::vector<int64_t> layers = {};  // in which targets without a path are adapted; empty: in all
  // Modules whose rank is not `r`, or whose alpha is not `alpha`.
  std::vector<std::pair<std::string, int64_t>> ranks = {};
  std::vector<std::pair<std::string, double>> alphas = {};
  AdapterKind kind = AdapterKind::kLora;
  int64_t virtual_tokens = 0;  // before each document; of prefix and prompt tuning
  bool encoded = false;        // a prompt that an encoder has computed, whose weights are nowhere (P-tuning)
  int64_t encoder = 0;  // P-tuning: hidden size of the encoder that is trained with the prompt; 0: none
  // Paths of modules that are trained whole beside it (spec/whole_modules.h), in the order of whole_modules.
  std::vector<std::string> also = {};
  // Tokens whose rows of the embedding (and of a tied head) are trained, in the order of their rows in the
  // files.
  std::vector<int64_t> tokens = {};
  AdapterBias bias = AdapterBias::kNone;

  bool operator==(const AdapterSpec&) const = default;
  // Whether the tensor of the base's files with this name is trained whole.
  bool trains_whole(std::string_view tensor) const;
  // Of the module with this path.
  bool adapts(int64_t layer, std::string_view path) const;
  int64_t rank_of(std::string_view path) const;
  double alpha_of(std::string_view path) const;
  double scale_of(std::string_view path) const;
  double scale() const;  // alpha / r, or alpha / sqrt(r): of modules that have both
};

// The matrices of a layer, in the order of its sublayers.
std::vector<MatrixSpec> layer_matrices(const ModelSpec& spec, int64_t layer);

// A linear layer of the family's files, which an adapter may target: some rows of a matrix, or all.
struct LinearModule {
  std::string path;  // in its layer: "self_attn.q_proj"
  // The end of that, "q_proj"; the path where several modules of the family's layers end alike.
  std::string name;
  std::string matrix;                        // the MatrixSpec's name: "attn.qkv"
  int64_t part = 0;                          // the first part that it has, counted in the layer
  int64_t first = 0, rows = 0, columns = 0;  // rows [first, first + rows) of the matrix [*, columns]
  bool transposed = false;                   // the files hold it as [columns, rows]
  bool adapts = true;                        // adapters may target it
  // Names in the layer of the tensors of the files that hold its weight, and its bias, with those of the
  // other experts; "": it has tensors of its own.
  std::string stack = {}, bias_stack = {};
  int64_t slice = 0, slices = 0;  // as ParameterPart
  // Whether it is an MLP's last layer, whose input IA3 scales; it scales the output of the others.
  bool feedforward() const { return matrix == "mlp.down" || matrix == "shared.down"; }
};
// The attention whose keys and values those of every layer are like, in number and size: prefix tuning has
// one size for all. Null where layers differ, borrow keys or have none.
const AttentionSpec* common_attention(const ModelSpec& spec);
// Sizes of virtual tokens, as peft's adapter_config.json has them. All 0 where the model cannot have them.
struct PromptShape {
  int64_t token_dim = 0;  // of a prefix: of a layer's keys; of a prompt: H
  int64_t heads = 0;      // of a prefix: of keys; of a prompt: of queries
  int64_t layers = 0;
};
PromptShape prompt_shape(const ModelSpec& spec, AdapterKind kind);
// Why the model cannot have a prefix or a prompt; "": it can.
std::string virtual_token_mistake(const ModelSpec& spec, AdapterKind kind);

// Of a layer, in the order of its matrices.
std::vector<LinearModule> linear_modules(const ModelSpec& spec, int64_t layer);

struct BlockParameters {
  std::string name;                  // "embedding", "block 3", "head"
  std::vector<Parameter> trainable;  // order of the flat array: decayed first, then norms and biases
  std::vector<Parameter> frozen;     // order of the frozen bytes; of a full run: buffers
};

// Ours, per block b in 0 .. L+1:
//   block 0:        embed [V, H], positions [P, H] where a model learns them, and where layers have inputs of
//                   their own inputs.table [V', L width], inputs.projection [L width, H] and inputs.norm
//                   [width]
//   block 1 + i:    "layers.i." and the names of the sublayers' matrices (spec/mixers), then of the norms
//                   before and behind the mixers [H], of the norms inside them, attn.sinks [n_h], a router's
//                   factors, of the matrices' biases ("attn.qkv_bias") and the norms' ("attn.norm_bias"), the
//                   layer's scalar [1] and the mixers' buffers
//   block L + 1:    (head [V, H] unless tied; [labels, H] of scores), norm [H], norm_bias [H] where the norm
//   has one
// Buffers are frozen. With an adapter every one of these is frozen, and per target module of block i, in the
// order of linear_modules, the trainable part has layers.i.<module>.lora_A [r, in] and .lora_B [out, r], r
// being that module's rank; behind them those of experts, layers.i.experts.<e>.gate_up.lora_A and so on; with
// DoRA layers.i.<module>.lora_magnitude_vector [out] of each behind all of
// these, and with PiSSA, frozen, layers.i.<module>.start_A [r, in] and .start_B [out, r]. With trained biases
// layers.i.<module>.bias [out] and <norm>_bias_tuned follow.
// IA3 has layers.i.<module>.ia3_l, [in] of "mlp.down" and [out] of the others; LN tuning <norm>_tuned
// and <norm>_bias_tuned of each target norm, in the norm's own block. Prefix tuning has layers.i.attn.prefix
// [virtual tokens, 2 n_kv d], keys and then values; prompt tuning has prompt [virtual tokens, H] in block 0,
// where with P-tuning the encoder's layers follow: encoder.0.weight [E, H], encoder.2.weight [E, E],
// encoder.4.weight [H, E], then their biases.
// Beside each of the others a head of scores stays trained, and so do the tensors of the modules in
// AdapterSpec::also: vectors behind the adapter's. Of AdapterSpec::tokens block 0 has embed.tokens [tokens,
// H]. Of an adapted head the last block has head.lora_A [r, H] and head.lora_B [V, r]; of an adapted
// embedding block 0 has embed.lora_A and embed.lora_B of these shapes.
std::vector<BlockParameters> list_parameters(const ModelSpec& spec, const AdapterSpec* adapter);

// "all-linear" and suffixes -> the family's module names (LinearModule::name) in block order, of those that
// adapters may target. Throws Error(10) naming an unknown target.
std::vector<std::string> resolve_targets(const NameMap& names, const std::vector<std::string>& targets,
                                         const std::string& place);

}  // namespace lm
