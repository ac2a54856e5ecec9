// What GLM-4 of 2024 and of 2025 have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

// Biases of q, k and v, which a file may switch off.
void read_glm_layers(const ConfigReader& config, ModelSpec& spec);
// Linear layers: gate and up are joined.
NameMap glm_names();

}  // namespace lm::families
