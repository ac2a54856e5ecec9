#include "weights/peft_modules.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

constexpr size_t kMostPattern = 1000;  // characters: the compiler of expressions is recursive

// libstdc++'s matcher without backtracking: an untrusted expression cannot take exponential time.
constexpr auto kSyntax = std::regex::ECMAScript | std::regex_constants::__polynomial;

bool is_letter_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// Letters, digits, '_', '-' and '.', which stands for any character.
bool is_plain(std::string_view key) {
  return std::all_of(key.begin(), key.end(),
                     [](char c) { return is_letter_or_digit(c) || c == '_' || c == '-' || c == '.'; });
}

// Whether Python and ECMAScript read the expression alike, if both accept it.
bool means_the_same(std::string_view text) {
  bool bracket = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i], next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (c == '\0' || static_cast<unsigned char>(c) >= 0x80) return false;
    if (c == '\\') {
      if (is_letter_or_digit(next) && std::string_view("dDwWsSbB").find(next) == std::string_view::npos)
        return false;
      if (bracket && (next == 'b' || next == 'B')) return false;
      ++i;
    } else if (bracket) {
      if (c == '[') return false;  // "[[:alpha:]]"
      bracket = c != ']';
    } else if (c == '[') {
      bracket = true;
      if (next == '^') ++i;
      if (i + 1 < text.size() && text[i + 1] == ']')
        return false;  // a bracket in Python, nothing in ECMAScript
    } else if (c == '(' && next == '?') {
      const char kind = i + 2 < text.size() ? text[i + 2] : '\0';
      if (kind != ':' && kind != '=' && kind != '!') return false;
    } else if ((c == '*' || c == '+' || c == '?' || c == '}') && next == '+') {
      return false;
    } else if (c == '{') {
      return false;  // each repetition is a copy, and the matcher recurses as deep as there are states
    }
  }
  return true;
}

std::string shown(const std::string& text) {
  return "\"" + text.substr(0, 100) + "\"";
}

// A name in target_modules as this program has it: without an adapter's prefix and a wrapper's.
std::string canonical_path(std::string name) {
  constexpr std::string_view kPrefix = "base_model.model.";
  if (name.starts_with(kPrefix)) name.erase(0, kPrefix.size());
  std::string path = canonical_name(name + ".").text;
  path.pop_back();
  return path;
}

std::vector<std::string> texts_of(const Json& value, const char* key, const std::string& place) {
  std::vector<std::string> out;
  for (const Json& name : value) {
    if (!name.is_string()) refuse_adapter(key, "must be a list of strings", place);
    out.push_back(name.get<std::string>());
  }
  return out;
}

}  // namespace

void refuse_adapter(const std::string& key, const std::string& what, const std::string& place) {
  throw Error(Exit::kInput, {.area = "FILE-23",
                             .what = key + " " + what,
                             .place = place,
                             .next = "use a plain LoRA adapter of linear layers"});
}

PeftPattern::PeftPattern(const std::string& text)
    : whole_(text, kSyntax), end_("(?:.*\\.)?(?:" + text + ")", kSyntax) {}

std::optional<PeftPattern> PeftPattern::parse(const std::string& text) {
  if (text.size() > kMostPattern || !means_the_same(text)) return std::nullopt;
  try {
    return PeftPattern(text);
  } catch (const std::regex_error&) {
    return std::nullopt;
  }
}

bool PeftChoice::Number::matches(const std::string& path) const {
  if (pattern) return pattern->matches_end(path);
  if (key.empty() || key.size() > path.size()) return false;
  const size_t first = path.size() - key.size();
  if (first > 0 && path[first - 1] != '.') return false;
  return std::equal(key.begin(), key.end(), path.begin() + static_cast<std::ptrdiff_t>(first),
                    [](char expected, char c) { return expected == '.' || expected == c; });
}

PeftChoice::PeftChoice(const Json& config, const std::string& text, std::string place)
    : place_(std::move(place)) {
  targets_ = read_names(config, "target_modules");
  targets_pattern_ = targets_.pattern || targets_.unreadable;
  const Names parameters = read_names(config, "target_parameters");
  if (parameters.all || parameters.pattern || parameters.unreadable)
    refuse_adapter("target_parameters", "must be a list of names", place_);
  parameters_ = parameters.names;
  // With parameters alone there need be no modules.
  if (!targets_.all && !targets_pattern_ && targets_.names.empty() && parameters_.empty())
    refuse_adapter("target_modules", "must be a list of module names or a pattern", place_);
  exclude_ = read_names(config, "exclude_modules");
  if (exclude_.unreadable)
    refuse_adapter("exclude_modules", "is a regular expression that is not supported", place_);
  read_layers(config);
  ranks_ = read_numbers(text, "rank_pattern");
  alphas_ = read_numbers(text, "alpha_pattern");
}

PeftChoice::Names PeftChoice::read_names(const Json& config, const char* key) const {
  Names out;
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return out;
  if (it->is_array()) {
    out.names = texts_of(*it, key, place_);
    return out;
  }
  if (!it->is_string()) refuse_adapter(key, "must be a list of module names or a pattern", place_);
  const auto text = it->get<std::string>();
  if (text.empty()) return out;
  out.all = text == "all-linear";
  if (out.all) return out;
  out.pattern = PeftPattern::parse(text);
  out.unreadable = !out.pattern;
  return out;
}

std::vector<PeftChoice::Number> PeftChoice::read_numbers(const std::string& text, const char* key) const {
  std::vector<Number> out;
  // In the file's order: `text` was parsed before, with limits.
  const auto config = nlohmann::ordered_json::parse(text);
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return out;
  if (!it->is_object()) refuse_adapter(key, "must be an object of names and numbers", place_);
  const bool ranks = std::string_view(key) == "rank_pattern";
  for (const auto& [name, value] : it->items()) {
    Number number{.key = name, .pattern = std::nullopt, .value = 0};
    if (!is_plain(name)) {
      number.pattern = PeftPattern::parse(name);
      if (!number.pattern)
        refuse_adapter(key, "has " + shown(name) + ", a regular expression that is not supported", place_);
    }
    if (!value.is_number() || (ranks && !value.is_number_integer()))
      refuse_adapter(key, "must have " + std::string(ranks ? "integers" : "numbers") + " as values", place_);
    number.value = value.get<double>();
    if (!std::isfinite(number.value) ||
        (ranks && (number.value < 1 || number.value > static_cast<double>(kMostRank))))
      refuse_adapter(key, fmt::format("must have ranks in 1 .. {}", kMostRank), place_);
    out.push_back(std::move(number));
  }
  return out;
}

void PeftChoice::read_layers(const Json& config) {
  const auto layers = config.find("layers_to_transform"), pattern = config.find("layers_pattern");
  if (pattern != config.end() && !pattern->is_null()) {
    if (!pattern->is_string() && !pattern->is_array())
      refuse_adapter("layers_pattern", "must be a name or a list of names", place_);
    if (pattern->is_array()) layers_pattern_ = texts_of(*pattern, "layers_pattern", place_);
    if (pattern->is_string() && *pattern != "") layers_pattern_ = {pattern->get<std::string>()};
    for (const std::string& name : layers_pattern_) {
      if (!is_plain(name) || name.find('.') != std::string::npos)
        refuse_adapter("layers_pattern", "has " + shown(name) + ", and only plain names are supported",
                       place_);
    }
  }
  if (layers != config.end() && !layers->is_null() && !(layers->is_array() && layers->empty())) {
    if (targets_pattern_)
      refuse_adapter("layers_to_transform", "and a pattern in target_modules exclude each other", place_);
    layers_.emplace();
    for (const Json& layer : layers->is_array() ? *layers : Json::array({*layers})) {
      const int64_t number = layer.is_number_integer() ? layer.get<int64_t>() : -1;
      if (number < 0)
        refuse_adapter("layers_to_transform", "must be a layer's number or a list of them", place_);
      layers_->push_back(number);
    }
  }
  if (!layers_pattern_.empty() && !layers_)
    refuse_adapter("layers_pattern", "is set without layers_to_transform", place_);
}

bool PeftChoice::names(const Names& names, const PeftModules& of, size_t m) const {
  const bool head = of.modules[m].layer == kNoLayer;  // which "all-linear" leaves out
  if (names.all) return !head;
  if (names.pattern) return names.pattern->matches(of.paths[m]);
  return std::any_of(names.names.begin(), names.names.end(), [&](const std::string& name) {
    return (name == "all-linear" && !head) || names_module(name, of.paths[m]) ||
           names_module(canonical_path(name), of.modules[m].path);
  });
}

// By the first number in the path, or by the first one behind a name of layers_pattern. Without such a name
// the number is the third segment or a later one.
bool PeftChoice::in_layers(const std::string& path) const {
  std::vector<std::string> segments(1);
  for (const char c : path) {
    if (c == '.') segments.emplace_back();
    if (c != '.') segments.back() += c;
  }
  const auto layer_behind = [&](const std::string* name) -> std::optional<int64_t> {
    for (size_t i = name == nullptr ? 2 : 1; i + 1 < segments.size(); ++i) {
      const std::string& digits = segments[i];
      const bool number = !digits.empty() && digits.size() < 10 &&
                          digits.find_first_not_of("0123456789") == std::string::npos;
      if (number && (name == nullptr || segments[i - 1] == *name)) return std::stoll(digits);
    }
    return std::nullopt;
  };
  std::optional<int64_t> layer;
  if (layers_pattern_.empty()) layer = layer_behind(nullptr);
  for (const std::string& name : layers_pattern_)
    if (!layer) layer = layer_behind(&name);
  return layer && std::find(layers_->begin(), layers_->end(), *layer) != layers_->end();
}

std::optional<bool> PeftChoice::chooses(const PeftModules& of, size_t m) const {
  // Neither excluded nor chosen by layers: peft looks at these names alone.
  if (of.modules[m].stacked)
    return std::ranges::any_of(parameters_, [&](const std::string& name) {
      return names_module(name, of.paths[m]) || names_module(canonical_path(name), of.modules[m].path);
    });
  if (names(exclude_, of, m)) return false;
  if (targets_.unreadable) return std::nullopt;
  if (!names(targets_, of, m)) return false;
  if (!layers_) return true;
  const bool exact = std::any_of(targets_.names.begin(), targets_.names.end(), [&](const std::string& name) {
    return name == of.paths[m] || canonical_path(name) == of.modules[m].path;
  });
  return exact || in_layers(of.paths[m]);
}

void PeftChoice::require_known(const PeftModules& of, const NameMap& names) const {
  for (const std::string& name : targets_.names) {
    const std::string path = canonical_path(name);
    bool known = false;
    for (size_t m = 0; m < of.modules.size(); ++m)
      known = known || (!of.modules[m].stacked &&
                        (names_module(name, of.paths[m]) || names_module(path, of.modules[m].path)));
    if (!known) resolve_targets(names, {path}, place_);
  }
}

void PeftChoice::require_known_parameters(const PeftModules& of) const {
  for (const std::string& name : parameters_) {
    const bool known = std::ranges::any_of(of.modules, [&](const AdapterModule& module) {
      return module.stacked && names_module(canonical_path(name), module.path);
    });
    if (!known)
      refuse_adapter("target_parameters",
                     "has " + shown(name) + ", which is no parameter of experts that adapters may be on here",
                     place_);
  }
}

AdapterSite PeftChoice::site(const PeftModules& of, size_t m, const AdapterSpec& other) const {
  AdapterSite out{.module = m, .r = other.r, .alpha = other.alpha};
  const auto find = [&](const std::vector<Number>& numbers) {
    return std::find_if(numbers.begin(), numbers.end(),
                        [&](const Number& number) { return number.matches(of.paths[m]); });
  };
  if (const auto rank = find(ranks_); rank != ranks_.end()) out.r = static_cast<int64_t>(rank->value);
  if (const auto alpha = find(alphas_); alpha != alphas_.end()) out.alpha = alpha->value;
  return out;
}

}  // namespace lm
