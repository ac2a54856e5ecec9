// A run's data as its configuration names them: options of their preparation, and what a plan may know of
// their rows. The CLI's plan and the rank's run use the same options, and so find the same cached tokens.
// Values.
#pragma once

#include <optional>
#include <string>

#include "data/loader.h"
#include "data/prepare.h"
#include "launcher/environment.h"
#include "launcher/planned_model.h"

namespace lm {

// For data.train; the caller replaces the files for other data. `date`: for chat templates that print it.
PrepareOptions prepare_options(const Config& config, const PlannedModel& model,
                               const Environment& environment, const std::string& date);

// For one rank. `train`: the prepared data. The sequences of a micro-batch matter to batches only.
LoaderOptions loader_options(const Config& config, const PlannedModel& model, const Prepared& train,
                             int64_t micro_batch);

// Row lengths of the first epoch.
DataShape data_shape(Loader& loader);
// Row lengths of streamed data, estimated from its first rows.
DataShape data_shape(const Prepared& first, const Config& config);

// The same, from tokens that an earlier start has cached; prepares nothing, and does not read large files
// that are not cached. `run`: the directory of the planned run, "": none.
std::optional<DataShape> cached_data_shape(const Config& config, const PlannedModel& model,
                                           const Environment& environment, const std::string& run);

// What data.streaming reads, for a plan; `found`: false, if no file is here.
struct StreamedFiles {
  bool found = false;
  int64_t files = 0, bytes = 0;
};
StreamedFiles streamed_files(const Config& config, const Environment& environment);
// "data: 3 files, 1.2 GiB, ..."; "" without data.streaming.
std::string describe_streamed(const Config& config, const StreamedFiles& files);

}  // namespace lm
