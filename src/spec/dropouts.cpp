#include "spec/dropouts.h"

#include <fmt/format.h>

#include "spec/families/family.h"

namespace lm {

NamedDropouts named_dropouts(const std::string& json, const std::string& place) {
  const Json root = parse_json(json, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!root.is_object()) fail_json("config.json must hold one object", place, 0);
  const ConfigReader file(root, place, "");
  const auto [family, config, wrapped] = find_family(root, file);
  NamedDropouts out;
  const auto name = [&config = config](const DropoutKey& dropout, std::vector<std::string>& names) {
    if (dropout.key == nullptr) return;
    const double p = config.number(dropout.key, dropout.missing);
    if (p != 0) names.push_back(fmt::format("{} = {}", dropout.key, p));
  };
  name(family.embedding_dropout, out.applied);
  name(family.residual_dropout, out.applied);
  name(family.left_out, out.left_out);
  return out;
}

}  // namespace lm
