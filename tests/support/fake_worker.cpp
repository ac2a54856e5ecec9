// A rank that does what FAKE_WORKER says, for tests of the CLI process:
//   done | exit:N | signal:N                    ends so, after publishing step 7
//   stop                                        publishes step 12, waits for a stop request, leaves with 75
//   deaf                                        never stops
//   running, stopping                           writes status.json and never stops; stopping: with all that
//   one
//                                               does that leaves with 75, once it is asked to, but leave
//   ends:N[:S]                                  publishes step 7 and that it ends with N, and never does;
//   after
//                                               S (4) seconds of sleep it prints "fake rank: lives on"
//   lost:R[:STEP]                               rank R publishes STEP, if given, and is killed; the others
//                                               leave with 40. Without a rank R all are done.
//   left:R                                      rank R leaves with 40, as if it had lost another one; the
//                                               others publish step 7 and never end
//   lose:R                                      the same, once: rank R leaves with 70, as if its GPU were
//                                               gone, and writes R into the file EMULATOR_LOST
//   facts:FILE                                  writes its arguments, environment and ignored signals to FILE
// It prints "fake rank: ready" on stderr when it has started.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

#include "comm/shared_region.h"
#include "launcher/command_line.h"
#include "launcher/control.h"
#include "launcher/status.h"

namespace {

using namespace lm;

void write_facts(const std::string& path, int argc, char** argv) {
  std::ofstream file(path);
  for (int i = 1; i < argc; ++i) file << "arg " << argv[i] << "\n";
  const mode_t mask = umask(0);
  umask(mask);
  file << "umask " << std::oct << mask << std::dec << "\n";
  for (char** entry = environ; *entry != nullptr; ++entry) file << "env " << *entry << "\n";
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    file << (action.sa_handler == SIG_IGN ? "ignored " : "default ") << signal_name(number) << "\n";
  }
}

void publish(std::optional<Control>& control, const WorkerRecord& record) {
  if (control) control->publish(record);
}

// For longer than a test may last; a rank that was forgotten ends some day.
void live_on() {
  for (int i = 0; i < 3600; ++i) usleep(1000000);
}

// One rank of a run that loses rank `victim`; its exit code.
int lose(const std::string& script, const CommandLine& line, std::optional<Control>& control) {
  std::optional<SharedRegion> region;
  if (line.has("--ranks-fd"))
    region.emplace(SharedRegion::attach(static_cast<int>(*line.integer("--ranks-fd"))));
  const int victim = std::atoi(script.c_str() + 5), ranks = region ? region->ranks() : 1;
  const auto rank = static_cast<int>(line.integer("--rank").value_or(0));
  const char* gpu = std::getenv("CUDA_VISIBLE_DEVICES");
  std::fprintf(stderr, "fake rank: %d of %d on %s\n", rank, ranks, gpu == nullptr ? "the CPU" : gpu);
  const char* file = script.starts_with("lose:") ? std::getenv("EMULATOR_LOST") : nullptr;
  if (victim >= ranks || (file != nullptr && access(file, F_OK) == 0)) return 0;
  if (rank == victim) {
    if (file != nullptr) {
      std::ofstream(file) << victim;
      return 70;
    }
    const size_t step = script.find(':', 5);
    if (step != std::string::npos)
      publish(control,
              {.step = std::atoi(script.c_str() + step + 1), .repeat = 0, .checkpoint = "", .reason = ""});
    raise(SIGKILL);
  }
  for (int i = 0; i < 12000 && !region->ended(); ++i) usleep(5000);
  return 40;
}

}  // namespace

int main(int argc, char** argv) {
  const CommandLine line =
      parse_command_line(std::vector<std::string>(argv + 1, argv + argc), Reader::kWorker);
  const char* variable = std::getenv("FAKE_WORKER");
  const std::string script = variable == nullptr ? "done" : variable;
  std::optional<Control> control;
  if (line.has("--control-fd"))
    control.emplace(Control::attach(static_cast<int>(*line.integer("--control-fd"))));
  std::fputs("fake rank: ready\n", stderr);
  if (script.starts_with("facts:")) write_facts(script.substr(6), argc, argv);
  if (script.starts_with("exit:") || script.starts_with("signal:")) {
    publish(control, {.step = 7, .repeat = 0, .checkpoint = "", .reason = ""});
    const int number = std::atoi(script.c_str() + script.find(':') + 1);
    if (script.starts_with("exit:")) return number;
    signal(number, SIG_DFL);  // a sanitizer would catch it
    raise(number);
  }
  if (script.starts_with("lost:") || script.starts_with("lose:")) return lose(script, line, control);
  if (script.starts_with("left:")) {
    if (line.integer("--rank").value_or(0) == std::atoi(script.c_str() + 5)) return 40;
    publish(control, {.step = 7, .repeat = 0, .checkpoint = "", .reason = ""});
    live_on();
  }
  if (script.starts_with("ends:")) {
    publish(
        control,
        {.step = 7, .repeat = 0, .checkpoint = "", .reason = "", .exit_code = std::atoi(script.c_str() + 5)});
    const size_t seconds = script.find(':', 5);
    const int tenths = seconds == std::string::npos ? 40 : 10 * std::atoi(script.c_str() + seconds + 1);
    for (int i = 0; i < tenths; ++i) usleep(100000);
    std::fputs("fake rank: lives on\n", stderr);
    live_on();
  }
  if (script == "stop") {
    publish(control, {.step = 11, .repeat = 0, .checkpoint = "", .reason = ""});
    publish(control, {.step = 12, .repeat = 2, .checkpoint = "/a run/step_00000010", .reason = ""});
    for (int i = 0; i < 24000 && control->stop_requests() == 0; ++i) usleep(5000);
    return 75;
  }
  if (script == "running" || script == "stopping") {
    publish(control, {.step = 12, .repeat = 2, .checkpoint = "/c/step_00000010", .reason = ""});
    if (script == "stopping") {
      while (control->stop_requests() == 0) usleep(5000);
      publish(control, {.step = 12, .repeat = 0, .checkpoint = "/c/step_00000012", .reason = ""});
      control->publish_end(75);
    }
    RunStatus status;
    status.state = "running", status.step = 12, status.pid = getppid();
    write_status(*line.value("--run-dir"), status);
    std::fputs("fake rank: has written its status\n", stderr);
    live_on();
  }
  if (script == "deaf") live_on();
  return 0;
}
