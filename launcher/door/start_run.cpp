#include "launcher/door/start_run.h"

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/log.h"
#include "base/process.h"
#include "config/config_toml.h"
#include "launcher/control.h"
#include "launcher/door/commands.h"
#include "launcher/door/device_choice.h"
#include "launcher/door/preflight.h"
#include "launcher/door/run_directory.h"
#include "launcher/door/supervise.h"
#include "launcher/environment.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/survey.h"
#include "launcher/machine/visible_gpus.h"
#include "launcher/recorded.h"
#include "launcher/status.h"

namespace lm {
namespace {

DeviceFacts device_facts() {
  const CudaVariables cuda = read_cuda_variables();
  // Without a choice their number is enough; UUIDs would take NVML's tens of milliseconds.
  const std::vector<GpuFacts> cards =
      cuda.visible_devices ? survey_gpus().cards : std::vector<GpuFacts>(static_cast<size_t>(count_gpus()));
  const VisibleGpus visible = visible_gpus(cards, cuda.visible_devices, cuda.device_order);
  return {.gpus = static_cast<int>(cards.size()),
          .visible = static_cast<int>(visible.gpus.size()),
          .hidden_by = cuda.visible_devices.value_or(""),
          .cuda_program = !beside_this_program("lmlaunch-cuda").empty()};
}

std::string rank_program(const CommandLine& line, DeviceChoice configured) {
  const DeviceFacts facts = device_facts();
  const DeviceDecision decision = decide_device(line, configured, facts);
  if (!decision.note.empty()) log_note("DEV-34", decision.note);
  const std::string name = decision.cuda ? "lmlaunch-cuda" : "lmlaunch-cpu";
  const std::string path = beside_this_program(name);
  if (path.empty()) {
    throw Error(Exit::kDoesNotFit, {.area = "DEV-34",
                                    .what = name + " is not beside lmlaunch",
                                    .place = "",
                                    .next = "./dev build",
                                    .kept = ""});
  }
  return path;
}

// The rank's executable, dying with this process, in an environment without what changes results.
pid_t start_rank(const std::string& executable, const CommandLine& line, const std::vector<int>& keep_fds,
                 StopSignals stop_signals) {
  std::vector<std::string> argv = to_arguments(line);
  argv.insert(argv.begin(), executable);
  const pid_t child = start_program({.argv = std::move(argv),
                                     .environment = rank_environment(),
                                     .keep_fds = keep_fds,
                                     .stop_signals = stop_signals});
  if (child > 0) return child;
  throw Error(Exit::kDoesNotFit, {.area = "RUN-33",
                                  .what = std::string("cannot start the rank: ") + std::strerror(-child),
                                  .place = executable,
                                  .next = "build it again, or see `lmlaunch doctor`",
                                  .kept = ""});
}

// A run that could not be recorded is still a finished run: the last line is printed all the same.
void record(const std::string& directory, const RunStatus& status) {
  try {
    write_status(directory, status);
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
  }
}

}  // namespace

int train_in_rank(const CommandLine& line) {
  block_stop_signals();  // first: from here on a stop signal is counted, and the run ends with 75
  const std::string& config_path = line.positional[0];
  const Config config = load_config(config_path, line.overrides);
  raise_descriptor_limit();
  resolve_model(config.model.path, read_environment());
  check_disks(config);
  const std::string program = rank_program(line, config.run.device);
  const std::string directory = run_directory(config, config_path);
  const std::vector<std::string> overridden = line.list("--override");
  check_run_directory(directory, config, overridden);

  // From here on things are created.
  const RunLock lock(directory);
  // Another run may have come and gone since.
  for (const KeyDifference& one : check_run_directory(directory, config, overridden))
    log_note("CKPT-26", one.key + ": " + one.recorded + " before, " + one.asked + " from here on");
  if (!lock.taken_over().empty())
    log_note("LOCK-31", "took over the lock of a dead run: " + lock.taken_over());
  remove_leftovers(directory, lock);
  try_run_directory(directory);
  Control control = Control::create();
  CommandLine handed_on = line;
  handed_on.flags["--run-dir"] = directory;
  handed_on.flags["--control-fd"] = std::to_string(control.fd());
  handed_on.flags["--lock-fd"] = std::to_string(lock.fd());
  RunStatus status;
  try {
    // The door counts stop signals, not the rank.
    const pid_t child = start_rank(program, handed_on, {control.fd(), lock.fd()}, StopSignals::kIgnored);
    status = supervise_run(child, control,
                           {.less_memory = [&line] { return less_host_memory(line); },
                            .left_behind = [&lock] { lock.release(); }});
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    status = failed_before_start(error);
  }
  record(directory, status);
  std::fprintf(stderr, "%s\n", stop_line(status).c_str());
  return *status.exit_code;
}

int command_in_rank(const CommandLine& line) {
  DeviceChoice configured = DeviceChoice::kCpu;  // export and verify move bytes
  if (line.command == "generate") configured = DeviceChoice::kAuto;
  if (line.command == "eval") {
    const std::string& what = line.positional[0];
    const bool run = std::filesystem::is_directory(what);
    configured = load_config(run ? run_of(what) + "/config.toml" : what, line.overrides).run.device;
    // A run records where it was trained; that decides until the command line does.
    if (run && (line.has("--gpus") || line.has("--ranks"))) configured = DeviceChoice::kAuto;
  }
  const std::string program = rank_program(line, configured);
  block_stop_signals();
  return supervise_command(start_rank(program, line, {}, StopSignals::kDefault));
}

}  // namespace lm
