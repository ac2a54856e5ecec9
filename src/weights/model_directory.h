// What a model's directory says of the model: config.json, and of its files the names of their tensors.
// Reads headers only; any thread.
#pragma once

#include <string>

#include "spec/model_spec.h"

namespace lm {

// parse_model_spec of `directory`/config.json. A family's files come in two forms where transformers' class
// has other names than the family's published files (ModelSpec::class_names): the spec has the names of the
// form that is there. Without files, for a plan, it has the family's. Throws Error(11), also for a damaged
// index or header of a family with two forms.
ModelSpec read_model_spec(const std::string& directory);

}  // namespace lm
