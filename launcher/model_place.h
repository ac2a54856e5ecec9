// Resolves the place of a model to a directory: a model's or an adapter's directory stands for itself, a
// run's for its model/, ORG/NAME or ORG/NAME@REVISION for a snapshot in a hub cache. Only reads files; any
// thread.
#pragma once

#include <string>

#include "config/config.h"
#include "launcher/environment.h"

namespace lm {

// The directory that `place` stands for, also of an adapter in a hub cache; `place` itself if that is no
// model, adapter or run.
std::string model_directory(const std::string& place, const Environment& environment);

bool holds_adapter(const std::string& directory);

// Expands "~" at the beginning of the configuration's paths (data files' globs expand it themselves).
// model.path and lora.init become the directories that they stand for. With train.method = "lora" a
// model.path that is an adapter becomes its base model, and the adapter is trained further; with another
// method it stays, and is refused when the model is opened. Throws Error(10, 11).
void settle_model(Config& config, const Environment& environment);

// A directory with a config.json: the one that `path` stands for, or the snapshot of ORG/NAME in a hub cache:
// that of REVISION, else of refs/main. Throws Error(11) with every place that was searched, or with what else
// `path` is. `adapter`: the directory of an adapter that may have named it ("": none), where the name can be
// corrected.
std::string resolve_model(const std::string& path, const Environment& environment,
                          const std::string& adapter = "");
// Whether there is a model or something meant to be one: a directory at `path`, or a snapshot of ORG/NAME.
bool model_is_here(const std::string& path, const Environment& environment);
// The same, but a snapshot must have all of its weights.
bool weights_are_here(const std::string& path, const Environment& environment);
// Throws Error(11) for a snapshot in a hub cache without all weights: only its config.json was fetched, or a
// download was interrupted.
void require_weights(const std::string& directory);

}  // namespace lm
