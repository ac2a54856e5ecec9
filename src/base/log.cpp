#include "base/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace lm {
namespace {

std::mutex mutex;           // guards `file` and keeps lines whole
std::FILE* file = nullptr;  // the run's log.txt, open until the process ends
bool shown = false;         // a line of show_line is at the bottom
// Set once, before threads log.
bool json = false;
int own_rank = 0;
std::string own_host;

std::string time_now() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  char text[40], all[48];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(all, sizeof all, "%s.%03dZ", text, static_cast<int>(now.tv_nsec / 1000000));
  return all;
}

// Bytes that are no UTF-8 are replaced: names of files may have them.
std::string object_line(const char* level, const std::string& text, const std::vector<LogField>& fields) {
  nlohmann::ordered_json out = {
      {"time", time_now()}, {"rank", own_rank}, {"host", own_host}, {"level", level}, {"message", text}};
  for (const LogField& field : fields)
    std::visit([&](const auto& value) { out[field.name] = value; }, field.value);
  return out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// Both need the mutex held.
void to_stderr(const std::string& line) {
  if (shown) std::fputc('\n', stderr);
  shown = false;
  std::fputs(line.c_str(), stderr);
}
void to_file(const std::string& line) {
  if (file == nullptr) return;
  std::fputs(line.c_str(), file);
  std::fflush(file);
}

void write_line(const char* level, const std::string& text, const std::vector<LogField>& fields) {
  const std::string line = escape_controls(text) + "\n";
  const std::lock_guard lock(mutex);
  to_stderr(json ? object_line(level, text, fields) : line);
  to_file(line);
}

}  // namespace

void log_as_json(int rank, const std::string& host) {
  const std::lock_guard lock(mutex);
  json = true;
  own_rank = rank;
  own_host = host;
}

bool logs_json() {
  return json;
}

void log_to_file(const std::string& path) {
  std::FILE* opened = std::fopen(path.c_str(), "ae");
  if (opened == nullptr) {
    throw Error(Exit::kIo, {.area = "IO-05",
                            .what = std::string("cannot open the log: ") + std::strerror(errno),
                            .place = path,
                            .next = "make the run directory writable"});
  }
  const std::lock_guard lock(mutex);
  if (file != nullptr) std::fclose(file);
  file = opened;
}

void log_line(const std::string& text) {
  write_line("info", text, {});
}

void log_fields(const std::string& text, const std::vector<LogField>& fields) {
  write_line("info", text, fields);
}

void log_coloured(const std::string& text, const std::string& coloured) {
  if (json || isatty(STDERR_FILENO) == 0) return log_line(text);
  const std::lock_guard lock(mutex);
  to_stderr(coloured + "\n");
  to_file(escape_controls(text) + "\n");
}

void log_file_line(const std::string& text) {
  const std::lock_guard lock(mutex);
  to_file(escape_controls(text) + "\n");
}

void show_line(const std::string& text) {
  if (json || isatty(STDERR_FILENO) == 0) return;
  const std::lock_guard lock(mutex);
  std::fprintf(stderr, "\r\033[K%s", escape_controls(text).c_str());
  std::fflush(stderr);
  shown = true;
}

int line_columns() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col - 1 : 79;
}

void log_note(const std::string& area, const std::string& text) {
  write_line("note", "lmlaunch: note " + area + ": " + text, {{"area", area}});
}
void log_warning(const std::string& area, const std::string& text) {
  write_line("warning", "lmlaunch: warning " + area + ": " + text, {{"area", area}});
}

void log_error(const Error& error) {
  const std::string lines = error_lines(error);
  const std::lock_guard lock(mutex);
  to_stderr(lines);
}

std::string error_lines(const Error& error) {
  if (!json) return error.report();
  const ErrorText& text = error.text();
  return object_line("error", error.what(),
                     {{"area", text.area},
                      {"exit_code", static_cast<int64_t>(error.code())},
                      {"kept", text.kept},
                      {"next", text.advice()}});
}

}  // namespace lm
