// What OLMo 2 and 3 have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

// Norms after the mixers alone, and of all heads of q and of k together.
void read_olmo_layers(const ConfigReader& config, ModelSpec& spec);

}  // namespace lm::families
