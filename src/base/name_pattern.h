// A pattern over names of tensors such as "model.layers.3.self_attn.q_proj.weight": a run of whole segments
// between points ("q_proj", "model.layers"), or "regex:" and an ECMAScript expression that is found anywhere
// in the name. A value, any thread.
#pragma once

#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

class NamePattern {
 public:
  static constexpr std::string_view kRegex = "regex:";
  // Why `text` is no pattern; empty if it is one.
  static std::string mistake(const std::string& text);
  explicit NamePattern(const std::string& text);  // REQUIRES: mistake(text) is empty

  bool matches(const std::string& name) const;
  bool is_regex() const { return regex_.has_value(); }

 private:
  std::string text_;
  std::optional<std::regex> regex_;
};

// Every run of `count` segments of a name, in order.
std::vector<std::string> segment_runs(const std::string& name, size_t count);

}  // namespace lm
