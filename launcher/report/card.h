// The README.md of a model that a run has trained: its base, figures, data and settings, out of the run's
// files. What Hugging Face calls a model card.
#pragma once

#include <string>

#include "base/json.h"

namespace lm {

// Of a record as RunReport makes it. `adapter`: the directory has an adapter, not a model.
std::string model_card(const Json& record, bool adapter);

// <directory>/README.md, out of the files of `run`. One that cannot be written is said: a model without it is
// whole.
void write_model_card(const std::string& directory, const std::string& run, bool adapter);

}  // namespace lm
