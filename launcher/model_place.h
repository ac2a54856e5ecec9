// Which directory is meant by the place of a model: a model's or an adapter's stands for itself, a run's for
// its model/, ORG/NAME or ORG/NAME@REVISION for a snapshot in a hub cache. Reads files alone; any thread.
#pragma once

#include <string>

#include "config/config.h"
#include "launcher/environment.h"

namespace lm {

// The directory that `place` stands for, also of an adapter in a hub cache; `place` where that is none of a
// model, an adapter or a run.
std::string model_directory(const std::string& place, const Environment& environment);

bool holds_adapter(const std::string& directory);

// A "~" at the beginning of a path of the configuration becomes the user's home (data files' globs know it
// themselves). model.path and lora.init become the directories that they stand for. With train.method =
// "lora" a model.path that is an adapter becomes the model that it is for, and that adapter is continued;
// with another method it is left, and refused when the model is opened. Throws Error(10, 11).
void settle_model(Config& config, const Environment& environment);

// A directory with a config.json: the one that `path` stands for, or the snapshot of ORG/NAME in a hub cache:
// that of REVISION, else of refs/main. Throws Error(11): with every place that was looked at, or with what
// else `path` is. `adapter`: the directory of one that may have named it ("": none), where the name can be
// set right.
std::string resolve_model(const std::string& path, const Environment& environment,
                          const std::string& adapter = "");
// Whether there is one, or something that was meant to be: a directory at `path`, or a snapshot of ORG/NAME.
bool model_is_here(const std::string& path, const Environment& environment);
// The same, where a snapshot counts only with all of its weights.
bool weights_are_here(const std::string& path, const Environment& environment);
// Throws Error(11) for a snapshot in a hub cache that lacks weights: somebody has fetched its config.json
// alone, or a download was cut.
void require_weights(const std::string& directory);

}  // namespace lm
