#include "base/name_pattern.h"

namespace lm {

std::string NamePattern::mistake(const std::string& text) {
  if (text.empty()) return "it is empty";
  if (!text.starts_with(kRegex)) return "";
  try {
    const std::regex regex(text.substr(kRegex.size()));
    return "";
  } catch (const std::regex_error& error) {
    return error.what();
  }
}

NamePattern::NamePattern(const std::string& text) : text_(text) {
  if (text.starts_with(kRegex)) regex_.emplace(text.substr(kRegex.size()));
}

bool NamePattern::matches(const std::string& name) const {
  if (regex_) return std::regex_search(name, *regex_);
  for (size_t at = name.find(text_); at != std::string::npos; at = name.find(text_, at + 1)) {
    const size_t end = at + text_.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return true;
  }
  return false;
}

std::vector<std::string> segment_runs(const std::string& name, size_t count) {
  std::vector<size_t> starts = {0};
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '.') starts.push_back(i + 1);
  }
  starts.push_back(name.size() + 1);
  std::vector<std::string> out;
  for (size_t s = 0; s + count < starts.size(); ++s)
    out.push_back(name.substr(starts[s], starts[s + count] - 1 - starts[s]));
  return out;
}

}  // namespace lm
