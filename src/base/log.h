// Lines for people: to stderr and, once a run has a directory, to its log.txt. Any thread may call.
#pragma once

#include <string>

namespace lm {

// Further lines also go to `path` (appended). Throws Error when it cannot be opened.
void log_to_file(const std::string& path);

// One line, "<text>\n"; control characters are escaped.
void log_line(const std::string& text);
// "lmlaunch: note <area>: <text>" and "lmlaunch: warning <area>: <text>".
void log_note(const std::string& area, const std::string& text);
void log_warning(const std::string& area, const std::string& text);

}  // namespace lm
