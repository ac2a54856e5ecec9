// Whether two models compute the same with the same weights: what their config.json files say beside the
// shapes of tensors, which loading compares anyway. Pure.
#pragma once

#include <string>

#include "spec/model_spec.h"

namespace lm {

// The first thing in which `other` differs, as config.json has it: "model_type is \"mistral\", not
// \"llama\"";
// "" where there is none.
std::string architecture_difference(const ModelSpec& model, const ModelSpec& other);

}  // namespace lm
