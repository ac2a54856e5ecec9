#include "launcher/cli/checked_run.h"

#include <cstring>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "config/config_toml.h"
#include "launcher/cli/commit_hook.h"
#include "launcher/cli/device_choice.h"
#include "launcher/cli/fetch.h"
#include "launcher/cli/follower.h"
#include "launcher/cli/preflight.h"
#include "launcher/environment.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/survey.h"
#include "launcher/machine/visible_gpus.h"
#include "launcher/model_place.h"
#include "launcher/planned_model.h"
#include "launcher/recorded.h"
#include "launcher/report/card.h"
#include "launcher/status.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

DeviceFacts device_facts() {
  const CudaVariables cuda = read_cuda_variables();
  // Without CUDA_VISIBLE_DEVICES the number of cards is enough; UUIDs would take NVML's tens of milliseconds.
  const std::vector<GpuFacts> cards =
      cuda.visible_devices ? survey_gpus().cards : std::vector<GpuFacts>(static_cast<size_t>(count_gpus()));
  const VisibleGpus visible = visible_gpus(cards, cuda.visible_devices, cuda.device_order);
  return {.gpus = static_cast<int>(cards.size()),
          .visible = static_cast<int>(visible.gpus.size()),
          .hidden_by = cuda.visible_devices.value_or(""),
          .cuda_program = !beside_this_program("lmlaunch-cuda").empty()};
}

}  // namespace

std::string worker_program(const CommandLine& line, DeviceChoice configured, bool quiet) {
  const DeviceFacts facts = device_facts();
  const DeviceDecision decision = decide_device(line, configured, facts);
  if (!decision.note.empty() && !quiet) log_note("DEV-34", decision.note);
  const std::string name = decision.cuda ? "lmlaunch-cuda" : "lmlaunch-cpu";
  const std::string path = beside_this_program(name);
  if (path.empty()) {
    throw Error(Exit::kDoesNotFit, {.area = "DEV-34",
                                    .what = name + " was not found beside lmlaunch",
                                    .place = "",
                                    .next = how_to_mend()});
  }
  return path;
}

int visible_gpu_count() {
  return device_facts().visible;
}

std::vector<std::string> visible_gpu_names() {
  const CudaVariables cuda = read_cuda_variables();
  std::vector<std::string> out;
  for (const GpuFacts& gpu : visible_gpus(survey_gpus().cards, cuda.visible_devices, cuda.device_order).gpus)
    out.push_back(gpu.uuid.empty() ? std::to_string(gpu.card) : gpu.uuid);
  return out;
}

bool computes_on_gpu(const std::string& program) {
  return program.ends_with("lmlaunch-cuda");
}

namespace {

// The model whose modules an adapter's targets stand for; a full fine-tune does not need it.
ModelSpec adapted_model(const Config& config, const std::string& model) {
  return trains_adapter(config) ? read_model_spec(model) : ModelSpec();
}

// Throws Error(10) if train.only or optimizer.groups names what the model does not have: the worker would
// find it in a directory that exists by then.
void require_names(const Config& config) {
  if (config.train.only.empty() && config.optimizer.groups.empty()) return;
  open_model(config, read_environment());
}

}  // namespace

pid_t start_worker(const std::string& executable, const CommandLine& line, const std::vector<int>& keep_fds,
                   StopSignals stop_signals, const std::vector<std::string>& variables) {
  std::vector<std::string> argv = to_arguments(line);
  argv.insert(argv.begin(), executable);
  std::vector<std::string> environment = worker_environment();
  for (const std::string& variable : variables)
    std::erase_if(environment, [name = variable.substr(0, variable.find('=') + 1)](const std::string& entry) {
      return entry.starts_with(name);
    });
  const pid_t child = start_program({.argv = std::move(argv),
                                     .environment = std::move(environment),
                                     .variables = variables,
                                     .keep_fds = keep_fds,
                                     .stop_signals = stop_signals});
  if (child > 0) return child;
  throw Error(Exit::kDoesNotFit, {.area = "RUN-33",
                                  .what = std::string("cannot start the worker: ") + std::strerror(-child),
                                  .place = executable,
                                  .next = "build it again, or see `lmlaunch doctor`"});
}

namespace {

// A run that resumes from its mirror must have its configuration.
void check_mirror(const CheckedRun& run) {
  namespace fs = std::filesystem;
  const std::string mirror = mirror_of(run.config.checkpoint, run.directory);
  if (mirror.empty()) return;
  std::error_code error;
  const fs::path copies = fs::weakly_canonical(mirror, error);
  if (!copies.empty() && copies == fs::weakly_canonical(run.directory, error)) {
    throw Error(Exit::kConfig, {.area = "MIRR-41",
                                .what = "checkpoint.mirror would copy the run's checkpoints onto themselves",
                                .place = mirror,
                                .next = "set checkpoint.mirror to a directory on another disk"});
  }
  if (fs::exists(mirror + "/config.toml", error) && !fs::exists(run.directory + "/config.toml", error))
    check_run_directory(mirror, run.config, run.model, run.overridden);
}

}  // namespace

CheckedRun check_run(const CommandLine& line) {
  const std::string& config_path = line.positional[0];
  CheckedRun run{.config = load_config(config_path, line.overrides)};
  use_log_format(run.config.log, 0);
  settle_or_fetch(run.config, FetchPart::kAll);
  raise_descriptor_limit();
  const std::string model = resolve_model(run.config.model.path, read_environment(), run.config.lora.init);
  if (run.config.model.init == ModelInit::kPretrained) require_weights(model);
  run.model = adapted_model(run.config, model);
  check_disks(run.config, PlanPurpose::kTrain);
  run.program = worker_program(line, run.config.run.device);
  run.directory = run_directory(run.config, config_path);
  run.overridden = line.list("--override");
  check_run_directory(run.directory, run.config, run.model, run.overridden);
  check_mirror(run);
  require_names(run.config);
  require_trackers(run.config.log);
  require_hook(run.config.checkpoint);
  return run;
}

CheckedRun check_run_of_leader(const CommandLine& line) {
  const std::string& config_path = line.positional[0];
  CheckedRun run{.config = load_config(config_path, line.overrides)};
  use_log_format(run.config.log, read_launcher_job().rank);
  settle_model(run.config, read_environment());
  raise_descriptor_limit();
  resolve_model(run.config.model.path, read_environment(), run.config.lora.init);
  run.program = worker_program(line, run.config.run.device, true);
  run.directory = run_directory(run.config, config_path);
  return run;
}

namespace {

// A run whose directory is gone has its configuration in the mirror; the worker finds the checkpoints there.
void restore_files(const CheckedRun& run) {
  namespace fs = std::filesystem;
  const std::string mirror = mirror_of(run.config.checkpoint, run.directory);
  std::error_code error;
  if (mirror.empty() || fs::exists(run.directory + "/" + kConfigFile, error) ||
      !fs::exists(mirror + "/" + kConfigFile, error))
    return;
  log_note("MIRR-41", "the run's directory has no configuration: restored from " + mirror);
  for (const char* name : kMirroredFiles)
    if (fs::exists(mirror + "/" + name, error))
      atomic_write_file(run.directory + "/" + name, read_small_file(mirror + "/" + name, kMiB));
}

}  // namespace

RunLock take_directory(const CheckedRun& run) {
  RunLock lock(run.directory);
  // Another run may have used the directory in the meantime.
  for (const KeyDifference& one : check_run_directory(run.directory, run.config, run.model, run.overridden))
    log_note("CKPT-26", one.key + ": " + one.recorded + " before, " + one.asked + " from here on");
  if (!lock.taken_over().empty())
    log_note("LOCK-31", "took over the lock of a dead run: " + lock.taken_over());
  remove_leftovers(run.directory, lock);
  restore_files(run);
  try_run_directory(run.directory);
  return lock;
}

void record_end(const CheckedRun& run, const RunStatus& status, LiveReport& report) {
  try {
    write_status(run.directory, status);
  } catch (const Error& error) {
    log_error(error);
  }
  report.finish();
  const std::string model = run.directory + "/model";
  if (status.state == "done" && std::filesystem::is_directory(model))
    write_model_card(model, run.directory, trains_adapter(run.config));
}

}  // namespace lm
