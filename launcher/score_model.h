// The head of scores that a run's configuration asks for (train.objective = "classify" | "reward"): its
// labels and the token behind which a text's padding begins.
#pragma once

#include <string>

#include "config/config.h"
#include "spec/model_spec.h"

namespace lm {

// Gives the model the head, unless its files describe one, with which the configuration must agree. Throws
// Error(10). `directory`: the model's; "": there is none.
void settle_scores(const Config& config, const std::string& directory, ModelSpec& spec);

// For commands that write text: throws Error(10) if the model has a head of scores, or if its adapter has one
// (`adapter`).
void refuse_scores(const ModelSpec& spec, bool adapter, const std::string& place);

}  // namespace lm
