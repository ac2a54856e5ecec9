// A model's layers as llama.cpp sees them: those with a sliding window and those without, each kind with one
// window, one RoPE table and one size of heads. Borrows the spec; values.
#pragma once

#include <cstdint>
#include <optional>

#include "export/llama_cpp.h"
#include "spec/model_spec.h"

namespace lm {

struct GgufLayers {
  explicit GgufLayers(const ModelSpec& spec);

  // The first layer of each kind; null: there is none.
  const AttentionSpec* full = nullptr;
  const AttentionSpec* sliding = nullptr;
  // Of the first layer of each kind that turns q and k; null: none does.
  const RopeSpec* full_rope = nullptr;
  const RopeSpec* sliding_rope = nullptr;

  // What the file names without saying for which layers.
  const AttentionSpec& attention() const { return full != nullptr ? *full : *sliding; }
  const RopeSpec* rope() const { return full_rope != nullptr ? full_rope : sliding_rope; }
};

// n, where each n-th layer has no window and all others have one; 0: all layers slide, 1: none. Empty: the
// layers do not follow such a rule. What the architecture assumes is tried first.
std::optional<int64_t> full_each(const ModelSpec& spec, const LlamaCpp& arch);

// The width of a layer's MLP, or of each of its experts.
int64_t feed_forward(const LayerSpec& layer);

// The number of layers that read the keys and values of others. check_layers accepts them at the end alone.
int64_t borrowers(const ModelSpec& spec);

// Throws Error(11) that names the first thing which llama.cpp's implementation of the architecture lacks.
void check_layers(const ModelSpec& spec, const LlamaCpp& arch);

}  // namespace lm
