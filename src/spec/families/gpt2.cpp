// GPT-2: LayerNorms, learned positions, an MLP without a gate, biases everywhere, and matrices that the files
// hold transposed.
#include <fmt/format.h>
#include <cmath>

#include "spec/families/family.h"

namespace lm::families {
namespace {

constexpr KeyAlias kAliases[] = {{"hidden_size", "n_embd"},
                                 {"intermediate_size", "n_inner"},
                                 {"num_hidden_layers", "n_layer"},
                                 {"num_attention_heads", "n_head"},
                                 {"max_position_embeddings", "n_positions"},
                                 {"rms_norm_eps", "layer_norm_epsilon"}};

// The same function.
constexpr ActivationWord kActivations[] = {{"gelu_new", Activation::kGeluTanh},
                                           {"gelu_pytorch_tanh", Activation::kGeluTanh}};

NameMap names() {
  return {.embedding = "transformer.wte",
          .positions = "transformer.wpe",
          .layers = "transformer.h.",
          .norms = {{"attn.norm", "ln_1"}, {"mlp.norm", "ln_2"}},
          .modules = {{"attn.c_attn", "attn.q", "attn.v", true},
                      {"attn.c_proj", "attn.o", nullptr, true},
                      {"mlp.c_fc", "mlp.up", nullptr, true},
                      {"mlp.c_proj", "mlp.down", nullptr, true}},
          .norm = "transformer.ln_f",
          .head = "lm_head"};
}

// reorder_and_upcast_attn computes the same scores in fp32, which they are here anyway.
void read_layers(const ConfigReader& config, ModelSpec& spec) {
  // As many as there may be tokens: bytes of the whole model stay inside 63 bits.
  constexpr int64_t kMost = int64_t{1} << 24;
  if (spec.max_positions > kMost)
    config.fail("max_position_embeddings", fmt::format("= {} is more than {}", spec.max_positions, kMost));
  spec.embedding.positions = spec.max_positions;
  set_qkv_bias(spec, true);
  set_mlp_bias(spec, true);
  const bool by_width = config.boolean("scale_attn_weights", true);
  const bool by_layer = config.boolean("scale_attn_by_inverse_layer_idx", false);
  double layers = 0;
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    attention.out_bias = true;
    attention.rope = AttentionSpec::kNoRope;
    const double scale = by_width ? 1 / std::sqrt(static_cast<double>(attention.head_dim)) : 1;
    if (!by_width || by_layer) attention.softmax_scale = by_layer ? scale / ++layers : scale;
  }
}

}  // namespace

const Family gpt2 = {.model_type = "gpt2",
                     .architecture = "GPT2LMHeadModel",
                     .aliases = kAliases,
                     .ffn_factor = 4,
                     .max_positions = 1024,
                     .norm_eps = 1e-5,
                     .tied = true,
                     .norm = NormKind::kLayer,
                     .gated = false,
                     .activation_key = "activation_function",
                     .activations = kActivations,
                     .embedding_dropout = {"embd_pdrop", 0.1},
                     .residual_dropout = {"resid_pdrop", 0.1},
                     .left_out = {"attn_pdrop", 0.1},
                     .dropouts = {},
                     .names = names,
                     .read_layers = read_layers,
                     .read_ropes = nullptr};

}  // namespace lm::families
