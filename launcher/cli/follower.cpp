#include "launcher/cli/follower.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_names.h"
#include "config/config_print.h"
#include "launcher/cli/supervise.h"
#include "launcher/environment.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Time for the last rows after the run's end; after the death of this process longer, because the run's
// status must first be written (status_keeper.h).
constexpr double kEndSeconds = 5, kGoneSeconds = 30;
// The program's own limit comes first; its message names the tracker.
constexpr int kSlackMs = 1000;
constexpr int kPipeBytes = 1 << 20;
// A shorter wait is not logged.
constexpr int kQuietMs = 1000;

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "LOG-38", .what = what, .place = place, .next = next});
}

// The targets of log.to that need a Python library, each once.
std::vector<std::string> trackers(const LogConfig& log) {
  std::vector<std::string> out;
  for (const LogTarget target : log.to) {
    const std::string name(name_of(target));
    if (target != LogTarget::kTensorboard && std::ranges::find(out, name) == out.end()) out.push_back(name);
  }
  return out;
}

double end_seconds() {
  return follow_seconds().value_or(kEndSeconds);
}

bool asked(const LogConfig& log) {
  return !trackers(log).empty() || !log.webhook.empty();
}

// The user's own Python, with its variables and folders: imported code cannot change results.
std::vector<std::string> command() {
  const std::string python = read_environment().python;
  if (python.empty())
    refuse(Exit::kDoesNotFit, "no Python was found, which log.to and log.webhook need", "",
           "set LMLAUNCH_PYTHON, or install python3");
  const fs::path own = beside_this_program("lmlaunch");
  const std::string program = (own.parent_path() / "../share/lmlaunch/follow/follow.py").lexically_normal();
  if (access(program.c_str(), R_OK) != 0)
    refuse(Exit::kInternal, "the program that feeds trackers is not installed", program,
           "install lmlaunch again");
  return {python, "-B", program};
}

std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string joined(const std::vector<std::string>& names, const char* separator) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : separator) + name;
  return out;
}

bool write_all(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

void require_trackers(const LogConfig& log) {
  if (!asked(log)) return;
  const std::vector<std::string> argv = command(), names = trackers(log);
  const ProgramResult result = run_program({.argv = argv, .stop_signals = StopSignals::kIgnored},
                                           line_of({{"check", names}}), log_line, {});
  if (result.error != 0)
    refuse(Exit::kConfig, std::string("cannot start Python: ") + std::strerror(result.error), argv[0],
           "set LMLAUNCH_PYTHON to a Python interpreter");
  const Json answer = Json::parse(result.output, nullptr, false);
  if (result.status != 0 || !answer.is_object())
    refuse(Exit::kDoesNotFit, "this Python cannot run the program that feeds trackers", argv[0],
           "set LMLAUNCH_PYTHON to Python 3.11 or newer");
  const auto missing = answer.at("missing").get<std::vector<std::string>>();
  if (missing.empty()) return;
  refuse(Exit::kDoesNotFit, "log.to names libraries that this Python does not have: " + joined(missing, ", "),
         argv[0], argv[0] + " -m pip install " + joined(missing, " ") + ", or leave it out of log.to");
}

Follower::Follower(const Config& config, const std::string& directory) {
  if (!asked(config.log)) return;
  const fs::path run = fs::absolute(directory).lexically_normal();
  const fs::path own = run / "follow";
  std::error_code error;
  fs::create_directory(own, error);
  log_ = own / "log.txt";
  const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  int in[2] = {-1, -1}, out[2] = {-1, -1};
  if (log >= 0 && pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0)
    process_ = start_program({.argv = command(), .stop_signals = StopSignals::kIgnored, .own_session = true},
                             {in[0], out[1], log});
  const int reason = process_ < -1 ? -process_ : errno;
  for (const int fd : {log, in[0], out[1]}) {
    if (fd >= 0) close(fd);
  }
  in_ = in[1], out_ = out[0];
  if (process_ <= 0)
    refuse(Exit::kDoesNotFit,
           std::string("cannot start the program that feeds trackers: ") + std::strerror(reason), log_,
           "make the run directory writable, or leave out log.to and log.webhook");
  fcntl(out_, F_SETFL, O_NONBLOCK);
  // Writes never wait for the reader: what the pipe does not take is lost, and the program ends with an
  // error.
  fcntl(in_, F_SETPIPE_SZ, kPipeBytes);
  fcntl(in_, F_SETFL, O_NONBLOCK);
  write_all(in_, line_of({{"run", run.string()},
                          {"name", run.filename().empty() ? run.parent_path().filename().string()
                                                          : run.filename().string()},
                          {"to", trackers(config.log)},
                          {"webhook", config.log.webhook},
                          {"config", print_config(config)},
                          {"end_seconds", end_seconds()},
                          {"gone_seconds", kGoneSeconds}}));
}

Follower::~Follower() {
  for (const int fd : {in_, out_}) {
    if (fd >= 0) close(fd);
  }
  if (process_ <= 0) return;
  kill(-process_, SIGKILL);  // its workers, too
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Follower::look() {
  char text[4096];
  for (ssize_t n = 0; out_ >= 0 && (n = read(out_, text, sizeof text)) > 0;)
    said_.append(text, static_cast<size_t>(n));
  for (size_t end = 0; (end = said_.find('\n')) != std::string::npos; said_.erase(0, end + 1))
    note(said_.substr(0, end));
}

void Follower::note(const std::string& what) {
  log_note("LOG-38", what + "; the run does not depend on it, and its next start resumes there (" + log_ +
                         " has details)");
  noted_ = true;
}

bool Follower::tell(const RunStatus& status) {
  if (process_ <= 0) return false;
  const Json json = {{"state", status.state},
                     {"exit_code", status.exit_code.value_or(0)},
                     {"reason", status.reason},
                     {"step", status.step}};
  write_all(in_, line_of(json));
  close(std::exchange(in_, -1));
  return true;
}

void Follower::finish(const RunStatus& status) {
  if (!tell(status)) return;
  const Clock::time_point begin = Clock::now();
  const double most = end_seconds();
  const auto passed = [&] { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); };
  bool told = false, ended = false, stopped = false;
  noted_ = false;
  int end = 0;
  while (!(ended = waitpid(process_, &end, WNOHANG) != 0) && passed() < most * 1000 + kSlackMs) {
    look();
    if ((stopped = stop_signal_came())) break;
    if (!std::exchange(told, told || passed() >= kQuietMs) && told)
      log_line(fmt::format("waiting for the last rows to reach log.to, {:.0f} s at most", most));
    poll(nullptr, 0, 10);
  }
  look();
  // If the machine is too busy for the program's own limit.
  if (!ended && !stopped && !noted_) note("log.to has not taken the last rows in time");
  if (ended && end != 0 && !noted_) note("the program that feeds trackers has failed");
  if (ended) process_ = -1;
}

void Follower::leave(const RunStatus& status) {
  if (tell(status)) process_ = -1;
}

}  // namespace lm
