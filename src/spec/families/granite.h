// What the generations of Granite have in common.
#pragma once

#include "spec/families/family.h"

namespace lm::families {

// Four factors: of the embedding, the scores (this one is the softmax's scale itself, and 1 where the file is
// silent), what is added to the residual stream, and by which logits are divided.
void read_multipliers(const ConfigReader& config, ModelSpec& spec);

}  // namespace lm::families
