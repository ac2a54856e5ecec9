// Lines for people: to stderr and, once a run has a directory, to its log.txt. Any thread may call.
#pragma once

#include <string>

namespace lm {

// Further lines also go to `path` (appended). Throws Error when it cannot be opened.
void log_to_file(const std::string& path);

// One line, "<text>\n"; control characters are escaped.
void log_line(const std::string& text);
// The same, but a terminal gets `coloured`, unchanged: the caller has escaped untrusted parts. log.txt and a
// pipe get `text`.
void log_coloured(const std::string& text, const std::string& coloured);
// To log.txt alone.
void log_file_line(const std::string& text);
// On a terminal: redraws the bottom line, which the next log_line keeps above its own. Elsewhere a no-op.
void show_line(const std::string& text);
// The greatest width of such a line: one less than the terminal's, 79 if it is unknown.
int line_columns();
// "lmlaunch: note <area>: <text>" and "lmlaunch: warning <area>: <text>".
void log_note(const std::string& area, const std::string& text);
void log_warning(const std::string& area, const std::string& text);

}  // namespace lm
