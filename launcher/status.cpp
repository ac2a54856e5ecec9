#include "launcher/status.h"

#include <fmt/format.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "config/config.h"

namespace lm {
namespace {

std::string path_of(const std::string& directory) {
  return directory + "/status.json";
}

// One word of the line: quoted if it holds a space, so that the line can be split at spaces.
std::string word(const std::string& text) {
  if (text.empty()) return "none";
  const std::string plain = escape_controls(text);
  return plain.find_first_of(" \t\n\"") == std::string::npos ? plain : Json(plain).dump();
}

}  // namespace

std::string time_text(std::time_t time) {
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&time));
  return text;
}

std::string host_name() {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return host;
}

RunStatus failed_before_start(const Error& error) {
  RunStatus out;
  out.state = "failed";
  out.exit_code = static_cast<int>(error.code());
  out.reason = "error:" + error.text().area;
  return out;
}

std::string stop_line(const RunStatus& status) {
  return fmt::format("lmlaunch: stop code={} reason={} step={} checkpoint={} repeat={}",
                     status.exit_code.value_or(0), word(status.reason), status.step, word(status.checkpoint),
                     status.repeat);
}

void log_stop(const RunStatus& status) {
  log_fields(stop_line(status), {{"exit_code", int64_t{status.exit_code.value_or(0)}},
                                 {"reason", status.reason},
                                 {"step", status.step},
                                 {"checkpoint", status.checkpoint},
                                 {"repeat", status.repeat}});
}

void use_log_format(const LogConfig& config, int rank) {
  if (config.format == LogFormat::kJson) log_as_json(rank, host_name());
}

void write_status(const std::string& directory, const RunStatus& status) {
  nlohmann::ordered_json json = {{"state", status.state}, {"step", status.step}};
  json["exit_code"] = status.exit_code ? nlohmann::ordered_json(*status.exit_code) : nlohmann::ordered_json();
  json["reason"] = status.reason;
  json["checkpoint"] = status.checkpoint;
  json["repeat"] = status.repeat;
  if (!status.on_commit.empty()) json["on_commit"] = status.on_commit;
  if (status.ranks < status.ranks_asked) {
    json["ranks"] = status.ranks;
    json["ranks_asked"] = status.ranks_asked;
  }
  json["updated_at"] = time_text(std::time(nullptr));
  json["host"] = host_name();
  json["pid"] = status.pid != 0 ? status.pid : getpid();
  // `replace`, because a path need not be UTF-8.
  atomic_write_file(path_of(directory), json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<RunStatus> read_status(const std::string& directory) {
  try {
    const Json json = read_json_file(path_of(directory), {.bytes = 1 << 16, .depth = 4});
    RunStatus out;
    out.state = json.at("state").get<std::string>();
    out.step = json.at("step").get<int64_t>();
    if (json.at("exit_code").is_number_integer()) out.exit_code = json.at("exit_code").get<int>();
    out.reason = json.at("reason").get<std::string>();
    out.checkpoint = json.at("checkpoint").get<std::string>();
    out.repeat = json.at("repeat").get<int64_t>();
    out.ranks = json.value("ranks", int64_t{0});
    out.ranks_asked = json.value("ranks_asked", int64_t{0});
    return out;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace lm
