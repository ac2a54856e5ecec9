// The CLI: what a user starts. Torch-free, so that a wrong key, `plan`, `presets` or `--help` answer in
// milliseconds; training and other commands that need torch run in lmlaunch-cpu or lmlaunch-cuda, as its
// child.
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/fetch.h"
#include "launcher/cli/start_run.h"
#include "launcher/command_line.h"
#include "launcher/environment.h"
#include "launcher/status.h"

namespace {

using namespace lm;

int run_command(const CommandLine& line) {
  if (line.command == "help") return static_cast<int>(help_command(line));
  if (line.command == "version") {
    std::puts("lmlaunch " LM_VERSION);
    return 0;
  }
  if (line.command == "doctor") return static_cast<int>(doctor_command(line));
  if (line.command == "presets") return static_cast<int>(presets_command(line));
  if (line.command == "completions") return static_cast<int>(completions_command(line));
  if (line.command == "init") return static_cast<int>(init_command(line));
  if (line.command == "fetch") return static_cast<int>(fetch_command(line));
  if (line.command == "report") return static_cast<int>(report_command(line));
  if (line.command == "plan" || line.has("--dry-run")) {
    // In an MPI job one process plans for all of them.
    return read_launcher_job().rank > 0 ? 0 : static_cast<int>(plan_command(line));
  }
  return line.command == "train" ? train_in_worker(line) : command_in_worker(line);
}

// Prints the message and, for training, the last line that a scheduler's script looks for. In an MPI job one
// process reports mistakes of the command line.
int report(const Error& error, bool training) {
  if (read_launcher_job().rank > 0) {
    // mpirun ends all others with the first that ends with an error.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    return static_cast<int>(error.code());
  }
  log_error(error);
  if (training) log_stop(failed_before_start(error));
  return static_cast<int>(error.code());
}

}  // namespace

int main(int argc, char** argv) {
  bool training = false;
  try {
    limit_processor();
    const CommandLine line =
        parse_command_line(std::vector<std::string>(argv + 1, argv + argc), Reader::kCli);
    training = line.command == "train" && !line.has("--dry-run");
    return run_command(line);
  } catch (const Error& error) {
    return report(error, training);
  } catch (const std::bad_alloc&) {
    return report(
        Error(
            Exit::kHostMemory,
            {.area = "MEM-16", .what = "out of host memory", .place = "", .next = "raise the memory limit"}),
        training);
  } catch (const std::exception& error) {
    return report(Error(Exit::kInternal, {.area = "BUG-70",
                                          .what = error.what(),
                                          .place = "",
                                          .next = "report this message; it is a bug in lmlaunch"}),
                  training);
  }
}
