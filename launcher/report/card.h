// The model card of a trained model, its README.md: base model, figures, data and settings, from the run's
// files.
#pragma once

#include <string>

#include "base/json.h"

namespace lm {

// The card's text from a record of RunReport. `adapter`: the directory has an adapter, not a model.
std::string model_card(const Json& record, bool adapter);

// Writes <directory>/README.md from the files of `run`. A failure is logged only: a model without it is
// complete.
void write_model_card(const std::string& directory, const std::string& run, bool adapter);

}  // namespace lm
