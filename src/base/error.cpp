#include "base/error.h"

#include <cstdio>
#include <cstring>

namespace lm {
namespace {

std::string one_line(const ErrorText& text) {
  return text.what + (text.place.empty() ? "" : " at " + text.place);
}

}  // namespace

Error::Error(Exit code, ErrorText text)
    : std::runtime_error(one_line(text)), code_(code), text_(std::move(text)) {}

std::string Error::report() const {
  std::string out = "lmlaunch: error " + text_.area + " (exit " + std::to_string(static_cast<int>(code_)) +
                    "): " + escape_controls(one_line(text_)) + "\n";
  if (!text_.kept.empty()) out += "  kept: " + escape_controls(text_.kept) + "\n";
  if (!text_.next.empty()) out += "  next: " + escape_controls(text_.next) + "\n";
  return out;
}

void fail_check(const char* expression, const char* file, int line, const std::string& detail) {
  const char* name = std::strrchr(file, '/');
  throw Error(Exit::kInternal, {.area = "BUG-70",
                                .what = std::string("assumption does not hold: ") + expression +
                                        (detail.empty() ? "" : ": " + detail),
                                .place = std::string(name ? name + 1 : file) + ":" + std::to_string(line),
                                .next = "report this message; it is a bug in lmlaunch",
                                .kept = ""});
}

std::string escape_controls(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if (c == '\n' || c == '\t' || (c >= 0x20 && c != 0x7f)) {
      out += static_cast<char>(c);
    } else {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\x%02x", c);
      out += hex;
    }
  }
  return out;
}

}  // namespace lm
