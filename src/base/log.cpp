#include "base/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/error.h"

namespace lm {
namespace {

std::mutex mutex;           // guards `file` and keeps lines whole
std::FILE* file = nullptr;  // the run's log.txt, open until the process ends
bool shown = false;         // a line of show_line is at the bottom

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

}  // namespace

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
  const std::string line = escape_controls(text) + "\n";
  const std::lock_guard lock(mutex);
  to_stderr(line);
  to_file(line);
}

void log_coloured(const std::string& text, const std::string& coloured) {
  if (isatty(STDERR_FILENO) == 0) return log_line(text);
  const std::lock_guard lock(mutex);
  to_stderr(coloured + "\n");
  to_file(escape_controls(text) + "\n");
}

void log_file_line(const std::string& text) {
  const std::lock_guard lock(mutex);
  to_file(escape_controls(text) + "\n");
}

void show_line(const std::string& text) {
  if (isatty(STDERR_FILENO) == 0) return;
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
  log_line("lmlaunch: note " + area + ": " + text);
}
void log_warning(const std::string& area, const std::string& text) {
  log_line("lmlaunch: warning " + area + ": " + text);
}

}  // namespace lm
