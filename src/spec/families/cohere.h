// What Cohere's Command R and Command A have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

inline constexpr KeyAlias kCohereAliases[] = {{"rms_norm_eps", "layer_norm_eps"}};

// Attention and MLP beside each other, of one norm; a factor of the logits.
void read_cohere_layers(const ConfigReader& config, ModelSpec& spec);

}  // namespace lm::families
