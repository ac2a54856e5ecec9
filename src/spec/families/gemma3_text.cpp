// Gemma 3: Gemma 2 without caps in its attention, with norms of q's and k's heads, and a RoPE table of its
// own for layers with a window. From 4B on it stands inside a model that sees images.
#include "spec/families/gemma.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  refuse_if_set(config, spec, "mlp_bias");
  // The reference reads the key and caps nothing.
  if (config.find("attn_logit_softcapping"))
    config.fail("attn_logit_softcapping", "is not supported for gemma3_text: its attention has no cap");
  add_norms_after(spec);
  read_attention_bias(config, spec);
  scale_embedding(spec);
  read_query_scale(config, spec);
  for (LayerSpec& layer : spec.layers) layer.attention().head_norm = spec.final_norm;
  const int64_t pattern = config.size("sliding_window_pattern", 6, kMostPositions);
  read_pattern(config, read_window(config, 4096), pattern, spec);
  // The class that sees images does not read it.
  const double cap = read_cap(config, "final_logit_softcapping", 0);
  if (spec.wrapper.empty()) spec.head.logit_cap = cap;
}

void read_ropes(const ConfigReader& config, const Family&, ModelSpec& spec) {
  read_ropes_by_kind(config, {.full_theta = 1e6, .sliding_theta = 1e4, .sliding_key = "rope_local_base_freq"},
                     spec);
}

}  // namespace

const Family gemma3_text = {.model_type = "gemma3_text",
                            .architecture = "Gemma3ForCausalLM",
                            .wrapper = "gemma3",
                            .wrapper_architecture = "Gemma3ForConditionalGeneration",
                            .sizes = {.hidden = 2304, .ffn = 9216, .layers = 26, .heads = 8, .vocab = 262208},
                            .max_positions = 131072,
                            .kv_heads = 4,
                            .head_dim = 256,
                            .tied = true,
                            .pad_token = 0,
                            .norm = kGemmaNorm,
                            .activation_key = "hidden_activation",
                            .activations = kGeluTanh,
                            .names = four_norm_names,
                            .read_layers = read_layers,
                            .read_ropes = read_ropes};

}  // namespace lm::families
