// How PEFT chooses the modules of an adapter, and each one's rank and alpha, from adapter_config.json:
// target_modules, target_parameters, exclude_modules, layers_to_transform, layers_pattern, rank_pattern,
// alpha_pattern. Pure but for the regular expressions' memory; the texts are untrusted.
#pragma once

#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "spec/adapter_sites.h"

namespace lm {

// A regular expression of Python that means the same here. Matching takes polynomial time.
class PeftPattern {
 public:
  // Empty where it is longer than 1000 characters or has what the two languages read differently:
  // references, named groups, lookbehind, flags, \A, \Z, possessive quantifiers; or counted repetitions.
  static std::optional<PeftPattern> parse(const std::string& text);
  // All of the text; or, as a pattern's key is matched, all of it or its end behind a point.
  bool matches(const std::string& text) const { return std::regex_match(text, whole_); }
  bool matches_end(const std::string& text) const { return std::regex_match(text, end_); }

 private:
  explicit PeftPattern(const std::string& text);
  std::regex whole_, end_;
};

// A model's modules as an adapter's base names them.
struct PeftModules {
  std::vector<AdapterModule> modules;
  // Their paths in the class that the adapter was trained in, which may be a wrapper's.
  std::vector<std::string> paths;
};

// Reads the keys above. Errors are Error(11) with the key's name; `place` names the file.
class PeftChoice {
 public:
  // `config` and the two patterns in the file's order, which decides between keys that match.
  PeftChoice(const Json& config, const std::string& text, std::string place);

  bool by_pattern() const { return targets_pattern_; }  // target_modules is one regular expression
  // Whether more than the ends of paths is compared, so that a wrapper's names differ.
  bool needs_paths() const {
    return targets_pattern_ || exclude_.pattern || !ranks_.empty() || !alphas_.empty();
  }
  // Whether module `m` is chosen; empty where that is said by an expression that has no equal here.
  std::optional<bool> chooses(const PeftModules& of, size_t m) const;
  // Throws where one of the names in target_modules is that of no module.
  void require_known(const PeftModules& of, const NameMap& names) const;
  // Throws where one of those in target_parameters is that of no experts' parameter.
  void require_known_parameters(const PeftModules& of) const;
  AdapterSite site(const PeftModules& of, size_t m, const AdapterSpec& other) const;

 private:
  // A list of names or one expression.
  struct Names {
    bool all = false;  // "all-linear"
    std::vector<std::string> names;
    std::optional<PeftPattern> pattern;
    bool unreadable = false;  // an expression that PeftPattern does not take
  };
  struct Number {
    std::string key;
    std::optional<PeftPattern> pattern;  // empty: the key is a plain name
    double value = 0;
    bool matches(const std::string& path) const;
  };

  Names read_names(const Json& config, const char* key) const;
  std::vector<Number> read_numbers(const std::string& text, const char* key) const;
  void read_layers(const Json& config);
  bool names(const Names& names, const PeftModules& of, size_t m) const;
  bool in_layers(const std::string& path) const;

  std::string place_;
  std::vector<std::string> parameters_;  // names: of whole paths, or of their ends
  bool targets_pattern_ = false;
  Names targets_, exclude_;
  std::optional<std::vector<int64_t>> layers_;
  std::vector<std::string> layers_pattern_;
  std::vector<Number> ranks_, alphas_;
};

[[noreturn]] void refuse_adapter(const std::string& key, const std::string& what, const std::string& place);

inline constexpr int64_t kMostRank = 1 << 16;

}  // namespace lm
