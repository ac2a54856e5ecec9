// The data of a run as its configuration names them: what their preparation is asked for, and what a plan may
// know of their rows. The door's plan and the rank's run ask for the same, and so find the same tokens.
// Values.
#pragma once

#include <optional>
#include <string>

#include "data/loader.h"
#include "data/prepare.h"
#include "launcher/environment.h"
#include "launcher/planned_model.h"

namespace lm {

// Of data.train; the files are replaced for others. `date`: what a chat template is told that asks.
PrepareOptions prepare_options(const Config& config, const PlannedModel& model,
                               const Environment& environment, const std::string& date);

// Of one rank alone. `train`: what was prepared; sequences of a micro-batch matter to batches only.
LoaderOptions loader_options(const Config& config, const PlannedModel& model, const Prepared& train,
                             int64_t micro_batch);

// What the first epoch's sequences are like.
DataShape data_shape(Loader& loader);

// The same of data that an earlier start has made tokens of; nothing is prepared, and large files that are
// not known are not read. `run`: the directory of the run that is planned, "" none.
std::optional<DataShape> known_data_shape(const Config& config, const PlannedModel& model,
                                          const Environment& environment, const std::string& run);

}  // namespace lm
