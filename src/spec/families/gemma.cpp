// Gemma: Llama with wide heads, a GELU in the MLP, offsets for the norms' weights, and a scaled embedding.
#include "spec/families/gemma.h"

#include <cmath>

namespace lm::families {

void scale_embedding(ModelSpec& spec) {
  spec.embedding.scale = std::sqrt(static_cast<double>(spec.hidden));
  spec.embedding.round_scale = true;
}

void read_query_scale(const ConfigReader& config, ModelSpec& spec) {
  const double scalar = config.positive("query_pre_attn_scalar", 256);
  for (LayerSpec& layer : spec.layers) layer.attention().softmax_scale = 1 / std::sqrt(scalar);
}

namespace {

// The class takes the old word for this function, too; hidden_activation it does not read.
constexpr ActivationWord kActivations[] = {{"gelu_pytorch_tanh", Activation::kGeluTanh},
                                           {"gelu", Activation::kGeluTanh}};

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  read_attention_bias(config, spec);
  scale_embedding(spec);
  check_layer_types(config, spec);
}

}  // namespace

const Family gemma = {.model_type = "gemma",
                      .architecture = "GemmaForCausalLM",
                      .max_positions = 8192,
                      .kv_heads = 16,
                      .head_dim = 256,
                      .tied = true,
                      .pad_token = 0,
                      .norm = kGemmaNorm,
                      .activations = kActivations,
                      .read_layers = read_layers};

}  // namespace lm::families
