// The numerics that a run has recorded in its directory, beside its config.toml. A file of its own: plan.json
// tells of one start, this is kept from the first. Reads only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/config_print.h"
#include "plan/numerics.h"
#include "spec/name_map.h"

namespace lm {

inline constexpr char kNumericsFile[] = "numerics.json";
// The day on which a run was begun, where its chat template asks for the date: "2026-01-31" and a line break.
inline constexpr char kDateFile[] = "date.txt";
// That of a run's directory; today's, in local time, where it has none. Throws Error(14) for a damaged file.
std::string recorded_date(const std::string& directory);
// Of a run whose model came from the hub: {"name": "ORG/NAME", "revision": COMMIT}, as its first start found
// it.
inline constexpr char kBaseModelFile[] = "base_model.json";

// The keys that were left to "auto", which a run's config.toml has as they were resolved: a line of comment
// at its head, "# auto: run.threads, train.micro_batch"; "" for none. `asked_text`: the file that the run was
// started with, which may be such a config.toml itself.
std::string auto_mark(const Config& asked, const std::string& asked_text);
std::vector<std::string> auto_keys(const std::string& toml);

// Whether a command that takes a configuration or a directory is given the former.
bool names_configuration(const std::string& what);

// The run that a directory is, or is a checkpoint or the trained model of; "" where it is none of these.
std::string run_of(const std::string& directory);

// config_difference between what a run recorded and what is asked for now, where adapters are named in the
// same way: "all-linear" is the modules that it stands for in a model with these names, and what lora.init
// decided is not asked for again.
std::vector<KeyDifference> run_differences(const Config& recorded, const Config& asked, const NameMap& names);

// Nothing where `directory` ("": none) holds no run, or one of another configuration, or of another device:
// none of these is what starts now. Throws Error(14) for a damaged file.
std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              const NameMap& names, DeviceType device);

}  // namespace lm
