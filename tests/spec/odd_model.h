// A model for tests of layouts, and adapters of it.
#pragma once

#include <string>
#include <vector>

#include "spec/block_layout.h"
#include "tests/support/llama_spec.h"

namespace lm {

// Odd sizes and everything a family can have.
inline ModelSpec odd() {
  ModelSpec spec = llama_spec(
      {.hidden = 77, .ffn = 131, .layers = 3, .heads = 6, .kv_heads = 2, .head_dim = 22, .vocab = 501});
  add_biases(spec);
  norm_heads(spec);
  return spec;
}

inline AdapterSpec adapter(int64_t r, const std::vector<std::string>& targets) {
  return {.r = r,
          .alpha = 32,
          .rslora = false,
          .dropout = 0,
          .targets = resolve_targets(llama_names(), targets, "test")};
}

}  // namespace lm
