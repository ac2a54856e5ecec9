// Lines for people: to stderr and, once a run has a directory, to its log.txt. On request stderr gets a JSON
// object in place of each line, for the log collectors of clusters. Any thread may call.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lm {

class Error;

// From here on stderr gets {"time": "2026-01-31T12:00:00.123Z", "rank": 0, "host": "...", "level": "info",
// "note", "warning" or "error", "message": "..."} and the fields of the line; no line is redrawn. Call it
// before threads log.
void log_as_json(int rank, const std::string& host);
bool logs_json();

// Further lines also go to `path` (appended). Throws Error when it cannot be opened.
void log_to_file(const std::string& path);

// One line, "<text>\n"; control characters are escaped.
void log_line(const std::string& text);
// The same; a JSON object also has the fields, which name what the text says.
struct LogField {
  const char* name;
  std::variant<int64_t, double, std::string> value;
};
void log_fields(const std::string& text, const std::vector<LogField>& fields);
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
// To stderr alone: the error's report.
void log_error(const Error& error);
// What log_error writes.
std::string error_lines(const Error& error);

}  // namespace lm
