// Models for tests, written down by their sizes.
#pragma once

#include "spec/model_spec.h"

namespace lm {

struct ModelSizes {
  int64_t hidden = 64, ffn = 160, layers = 1, heads = 4, kv_heads = 2, head_dim = 16, vocab = 300;
};

// A model of Llama's layers.
inline ModelSpec llama_spec(const ModelSizes& sizes) {
  ModelSpec spec;
  spec.model_type = "llama";
  spec.hidden = sizes.hidden;
  spec.vocab = sizes.vocab;
  spec.ropes = {{.dim = sizes.head_dim}};
  const AttentionSpec attention{.heads = sizes.heads, .kv_heads = sizes.kv_heads, .head_dim = sizes.head_dim};
  const GatedMlpSpec mlp{.ffn = sizes.ffn};
  const LayerSpec layer = {{{NormSpec(), attention}, {NormSpec(), mlp}}};
  spec.layers.assign(static_cast<size_t>(sizes.layers), layer);
  return spec;
}

// q and k normed head by head, as Qwen3 has them.
inline void norm_heads(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers) layer.attention().head_norm = NormSpec();
}

// Biases on every linear layer.
inline void add_biases(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers)
    layer.attention().qkv_bias = layer.attention().out_bias = layer.mlp().bias = true;
}

inline void set_windows(ModelSpec& spec, int64_t window) {
  for (LayerSpec& layer : spec.layers) layer.attention().window = window;
}

}  // namespace lm
