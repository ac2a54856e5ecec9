#include "base/log.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/error.h"

namespace lm {
namespace {

std::mutex mutex;           // guards `file` and keeps lines whole
std::FILE* file = nullptr;  // the run's log.txt, open until the process ends

}  // namespace

void log_to_file(const std::string& path) {
  std::FILE* opened = std::fopen(path.c_str(), "ae");
  if (opened == nullptr) {
    throw Error(Exit::kIo, {.area = "IO-05",
                            .what = std::string("cannot open the log: ") + std::strerror(errno),
                            .place = path,
                            .next = "make the run directory writable",
                            .kept = ""});
  }
  const std::lock_guard lock(mutex);
  if (file != nullptr) std::fclose(file);
  file = opened;
}

void log_line(const std::string& text) {
  const std::string line = escape_controls(text) + "\n";
  const std::lock_guard lock(mutex);
  std::fputs(line.c_str(), stderr);
  if (file != nullptr) {
    std::fputs(line.c_str(), file);
    std::fflush(file);
  }
}

void log_note(const std::string& area, const std::string& text) {
  log_line("lmlaunch: note " + area + ": " + text);
}
void log_warning(const std::string& area, const std::string& text) {
  log_line("lmlaunch: warning " + area + ": " + text);
}

}  // namespace lm
