#include "plan/trained_tensors.h"

#include <fmt/format.h>
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/name_pattern.h"
#include "config/config_text.h"
#include "plan/name_hint.h"

namespace lm {
namespace {

using Patterns = std::vector<NamePattern>;

Error only_error(std::string what, std::string next) {
  return setting_error("train.only: " + std::move(what), "", std::move(next));
}

bool matches_any(const Patterns& patterns, const std::string& name) {
  return std::ranges::any_of(patterns, [&](const NamePattern& pattern) { return pattern.matches(name); });
}

// Its tensors' names: "a, b and c".
std::string listed(const Parameter& parameter) {
  std::string out;
  for (size_t p = 0; p < parameter.parts.size(); ++p) {
    const char* const between = p == 0 ? "" : p + 1 == parameter.parts.size() ? " and " : ", ";
    out += between + parameter.parts[p].name;
  }
  return out;
}

// Projections with one input are one matrix here, which is trained or frozen as a whole.
void require_whole(const Patterns& patterns, const Parameter& parameter) {
  const auto chosen = std::ranges::count_if(
      parameter.parts, [&](const ParameterPart& part) { return matches_any(patterns, part.name); });
  if (chosen == 0 || chosen == std::ssize(parameter.parts)) return;
  throw only_error(fmt::format("it names {} of {}, which are one parameter here", chosen, listed(parameter)),
                   "name all of them, or none");
}

// No trained tensor has this name.
Error unknown_name(const std::string& pattern, const std::vector<std::string>& names, const ModelSpec& spec) {
  const std::string next =
      "name whole segments between points, or \"regex:...\"; names are those of the model's files";
  if (spec.tied && NamePattern(pattern).matches(spec.names.head + std::string(".weight"))) {
    return only_error(value_text(pattern) + " has no tensor of its own: the model's head is tied to " +
                          spec.names.embedding + ".weight",
                      "name the embedding, which is trained in both places");
  }
  return only_error(
      value_text(pattern) + " is in no name of a tensor that can be trained" + name_hint(pattern, names),
      next);
}

}  // namespace

TrainedFilter trained_filter(const TrainConfig& train, const ModelSpec& spec) {
  if (train.only.empty()) return {};
  const auto patterns = std::make_shared<Patterns>(train.only.begin(), train.only.end());
  std::vector<std::string> names;
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const Parameter& parameter : block.trainable) {
      require_whole(*patterns, parameter);
      for (const ParameterPart& part : parameter.parts) names.push_back(part.name);
    }
  }
  for (size_t p = 0; p < patterns->size(); ++p) {
    const auto matches = [&](const std::string& name) { return (*patterns)[p].matches(name); };
    if (std::ranges::none_of(names, matches)) throw unknown_name(train.only[p], names, spec);
  }
  return
      [patterns](const Parameter& parameter) { return matches_any(*patterns, parameter.parts.front().name); };
}

}  // namespace lm
