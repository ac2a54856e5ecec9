// What GLM-4 of 2024 and of 2025 have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

// Biases of q, k and v, which a file may switch off.
void read_glm_layers(const ConfigReader& config, ModelSpec& spec);
// Linear layers: gate and up are joined.
NameMap glm_names();

// The class's defaults, which GLM-4-0414 took over.
inline constexpr Family kGlm = {.model_type = "glm",
                                .architecture = "GlmForCausalLM",
                                .max_positions = 131072,
                                .kv_heads = 2,
                                .head_dim = 128,
                                .norm_eps = 1.5625e-7,
                                .rotated = 0.5,
                                .pad_token = 151329,
                                .neighbours = true,
                                .names = glm_names,
                                .read_layers = read_glm_layers};

}  // namespace lm::families
