// The numerics that a run has recorded in its directory, beside its config.toml. A separate file: plan.json
// describes one start, this one is kept from the first. Only reads.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "config/config_print.h"
#include "plan/numerics.h"
#include "spec/model_spec.h"

namespace lm {

inline constexpr char kConfigFile[] = "config.toml";
inline constexpr char kNumericsFile[] = "numerics.json";
// The day on which a run was begun, if its chat template prints the date: "2026-01-31" and a line break.
inline constexpr char kDateFile[] = "date.txt";
// The date of a run's directory; today's, in local time, if it has none. Throws Error(14) for a damaged file.
std::string recorded_date(const std::string& directory);
// For a run whose model came from the hub: {"name": "ORG/NAME", "revision": COMMIT}, as its first start found
// it.
inline constexpr char kBaseModelFile[] = "base_model.json";

// The keys that were left to "auto", whose values a run's config.toml has resolved: a line of comment at its
// head, "# auto: run.threads, train.micro_batch"; "" for none. `asked_text`: the file that the run was
// started with, which may be such a config.toml itself.
std::string auto_mark(const Config& asked, const std::string& asked_text);
std::vector<std::string> auto_keys(const std::string& toml);

// Whether an argument names a configuration, not a directory.
bool names_configuration(const std::string& what);

// The run that a directory is, or that it is a checkpoint or the trained model of; "": none.
std::string run_of(const std::string& directory);
// The same, but throws Error(11) if it is none.
std::string require_run(const std::string& path);

// config_difference between a run's recorded configuration and the requested one, with adapters spelt the
// same: "all-linear", patterns and excluded modules become the modules that have adapters in this model, and
// settings that lora.init decided are not compared.
std::vector<KeyDifference> run_differences(const Config& recorded, const Config& asked,
                                           const ModelSpec& model);

// The numerics recorded in `directory`; empty if it ("": none) holds no run, or one of another configuration
// or device. Throws Error(14) for a damaged file.
std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              const ModelSpec& model, DeviceType device);

// What a mirror has beside the checkpoints, so that a run without its directory resumes from there; the
// configuration last.
inline constexpr std::array<const char*, 4> kMirroredFiles = {kNumericsFile, kDateFile, kBaseModelFile,
                                                              kConfigFile};
// The mirror of a run's directory: checkpoint.mirror with the name of the run's directory; "": none.
std::string mirror_of(const CheckpointConfig& config, const std::string& run_directory);

}  // namespace lm
