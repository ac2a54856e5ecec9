// What the generations of Gemma have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

// Rows of the embedding are multiplied by sqrt(hidden), rounded to the weights' type: up to 0.2 % in bf16.
void scale_embedding(ModelSpec& spec);
// query_pre_attn_scalar: the softmax's scale is one by its root.
void read_query_scale(const ConfigReader& config, ModelSpec& spec);
// An offset of the norms' weights from 1 (Gemma 1 to 3).
inline constexpr NormKind kGemmaNorm = NormKind::kRmsOffset;

// Gemma 4 but for inputs of each layer: what its two text classes read.
void read_gemma4_layers(const ConfigReader& config, int64_t window, ModelSpec& spec);
void read_gemma4_ropes(const ConfigReader& config, const Family& family, ModelSpec& spec);
NameMap gemma4_names();

// What both classes assume.
inline constexpr Family kGemma4 = {
    .sizes = {.hidden = 2304, .ffn = 9216, .layers = 30, .heads = 8, .vocab = 262144},
    .max_positions = 131072,
    .kv_heads = 4,
    .head_dim = 256,
    .tied = true,
    .pad_token = 0,
    .norm = NormKind::kRmsLate,
    .activation_key = "hidden_activation",
    .activations = kGeluTanh,
    .names = gemma4_names,
    .read_ropes = read_gemma4_ropes};

}  // namespace lm::families
