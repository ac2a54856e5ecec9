#include "launcher/cli/fetch.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/supervise.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "HUB-37", .what = what, .place = place, .next = next});
}

bool on_terminal() {
  return isatty(STDIN_FILENO) != 0 && isatty(STDERR_FILENO) != 0;
}

[[noreturn]] void stop(const std::string& name) {
  throw Error(Exit::kStopped, {.area = "HUB-37",
                               .what = "stopped before the download was complete",
                               .place = name,
                               .next = "start again",
                               .kept = "what has been fetched so far: started again, it goes on there"});
}

std::string fetch_program() {
  const fs::path own = beside_this_program("lmlaunch");
  const std::string path = (own.parent_path() / "../share/lmlaunch/fetch/fetch.py").lexically_normal();
  if (access(path.c_str(), R_OK) == 0) return path;
  refuse(Exit::kInternal, "the download program is not installed", path, "install lmlaunch again");
}

Json request_of(const HubName& name, const std::string& kind, FetchPart part) {
  const Environment environment = read_environment();
  const HubAccess access = read_hub_access();
  if (access.offline)
    refuse(Exit::kConfig, "HF_HUB_OFFLINE forbids the network", name.text(), "unset HF_HUB_OFFLINE");
  if (environment.hub_caches.empty())
    refuse(Exit::kConfig, "there is no directory for the hub's cache", name.text(), "set HF_HOME or HOME");
  return {{"name", name.repository()},
          {"revision", name.revision},
          {"kind", kind},
          {"only", part == FetchPart::kAll ? "all" : "config"},
          {"cache", environment.hub_caches.front()},
          {"endpoint", access.endpoint},
          {"token", access.token},
          {"token_from", access.token_from},
          {"progress", on_terminal() ? 0.5 : 10.0}};
}

// Lines of the program; its progress uses one line of a terminal.
void relay(const std::string& line) {
  if (line.starts_with("fetching: ") && on_terminal()) return show_line(line);
  log_line(line);
}

Json run_fetch(const Json& request, const HubName& name) {
  const std::string python = read_environment().python;
  if (python.empty())
    refuse(Exit::kConfig, "no Python was found, which the download needs", name.text(),
           "set LMLAUNCH_PYTHON, or install python3");
  // -I: no environment variable or folder of the user changes what runs; -B: no bytecode is written.
  const ProgramResult result =
      run_program({.argv = {python, "-I", "-B", fetch_program()}, .stop_signals = StopSignals::kIgnored},
                  request.dump(-1, ' ', false, Json::error_handler_t::replace), relay, stop_signal_came);
  if (result.error != 0)
    refuse(Exit::kConfig, std::string("cannot start Python: ") + std::strerror(result.error), python,
           "set LMLAUNCH_PYTHON to a Python interpreter");
  if (result.stopped) stop(name.text());
  const Json answer = Json::parse(result.output, nullptr, false);
  if (answer.is_object() && answer.contains("error")) {
    const Json& error = answer["error"];
    throw Error(static_cast<Exit>(error.value("exit", static_cast<int>(Exit::kInternal))),
                {.area = error.value("area", "HUB-37"),
                 .what = error.value("what", ""),
                 .place = error.value("place", ""),
                 .next = error.value("next", ""),
                 .kept = error.value("kept", "")});
  }
  if (result.status != 0 || !answer.is_object())
    refuse(Exit::kIo, fmt::format("the download program ended with status {}", result.status), name.text(),
           "see its message above; start again");
  return answer;
}

Json fetch(const HubName& name, const std::string& kind, FetchPart part) {
  return run_fetch(request_of(name, kind, part), name);
}

void say_fetched(const HubName& name, const Json& fetched) {
  log_line(fmt::format("{} is in the cache: {} files, {} ({} fetched), revision {}", name.text(),
                       fetched.at("files").size(), format_bytes(fetched.at("bytes").get<int64_t>()),
                       format_bytes(fetched.at("fetched_bytes").get<int64_t>()),
                       fetched.at("revision").get<std::string>()));
}

// Reads one line of the terminal; a stop signal ends the wait.
std::string answer_line(const std::string& name) {
  std::string out;
  for (;;) {
    pollfd wait{STDIN_FILENO, POLLIN, 0};
    const int ready = poll(&wait, 1, 100);
    if (stop_signal_came()) stop(name);
    if (ready <= 0) continue;
    char c = 0;
    const ssize_t got = read(STDIN_FILENO, &c, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || c == '\n') return out;
    out += c;
  }
}

bool agreed(const HubName& name, FetchPart part) {
  std::fprintf(stderr, "%s was not found locally. Fetch %s from %s now? [y/N] ", name.text().c_str(),
               part == FetchPart::kAll ? "it" : "its config.json, which a plan is made from,",
               escape_controls(read_hub_access().endpoint).c_str());
  const std::string answer = answer_line(name.text());
  return answer == "y" || answer == "Y" || answer == "yes";
}

}  // namespace

bool offer_to_fetch(const std::string& path, FetchPart part) {
  const std::optional<HubName> name = parse_hub_name(path);
  const Environment environment = read_environment();
  const bool here =
      part == FetchPart::kAll ? weights_are_here(path, environment) : model_is_here(path, environment);
  // A folder of that name means that a path was meant.
  std::error_code ignored;
  const bool folder = name && fs::is_directory(name->org, ignored);
  if (!name || here || folder || !on_terminal() || read_hub_access().offline || !agreed(*name, part))
    return false;
  say_fetched(*name, fetch(*name, "model", part));
  return true;
}

void settle_or_fetch(Config& config, FetchPart part) {
  const bool whole = part == FetchPart::kAll;
  // Random weights need no files.
  const FetchPart of_model =
      whole && config.model.init == ModelInit::kPretrained ? FetchPart::kAll : FetchPart::kConfigAlone;
  offer_to_fetch(config.model.path, of_model);
  if (!config.lora.init.empty()) offer_to_fetch(config.lora.init, part);
  const std::string asked = config.model.path;
  settle_model(config, read_environment());
  if (config.model.path != asked) offer_to_fetch(config.model.path, of_model);  // an adapter's base model
}

Exit fetch_command(const CommandLine& line) {
  if (read_launcher_job().rank > 0) return Exit::kDone;  // in an MPI job rank 0 fetches
  block_stop_signals();
  const std::string& text = line.positional[0];
  const std::optional<HubName> name = parse_hub_name(text);
  if (!name)
    refuse(Exit::kUsage, "not the name of a model or data set of the hub", text,
           "write ORG/NAME or ORG/NAME@REVISION");
  const bool data = line.has("--data");
  const Json fetched = fetch(*name, data ? "dataset" : "model", FetchPart::kAll);
  if (line.has("--json")) {
    std::printf("%s\n", fetched.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return Exit::kDone;
  }
  say_fetched(*name, fetched);
  std::printf("%s\n", escape_controls(fetched.at("directory").get<std::string>()).c_str());
  const std::string base = fetched.at("base").get<std::string>();
  const std::optional<HubName> model = parse_hub_name(base);
  if (model && !weights_are_here(base, read_environment()))
    log_line("it is an adapter of " + base + ", which was not found locally: lmlaunch fetch " + base);
  return Exit::kDone;
}

}  // namespace lm
