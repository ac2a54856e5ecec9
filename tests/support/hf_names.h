// The names of a model's tensors in Hugging Face's files.
#pragma once

#include "spec/parameter.h"

namespace lm {

// Each name that the model consists of (no adapters), in block order.
inline std::vector<std::string> hf_names(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const std::vector<Parameter>* list : {&block.trainable, &block.frozen}) {
      for (const Parameter& parameter : *list) {
        for (const ParameterPart& part : parameter.parts) names.push_back(part.name);
      }
    }
  }
  return names;
}

}  // namespace lm
