#include "spec/dropouts.h"

#include <fmt/format.h>

#include "spec/families/family.h"

namespace lm {

std::vector<std::string> dropouts_left_out(const std::string& json, const std::string& place) {
  const Json root = parse_json(json, place, {.bytes = kMostConfigBytes, .depth = 32});
  if (!root.is_object()) fail_json("config.json must hold one object", place, 0);
  const ConfigReader file(root, place, "");
  const auto [family, config, wrapped] = find_family(root, file);
  std::vector<std::string> out;
  for (const auto& [key, missing] : family.left_out) {
    const double p = config.number(key, missing);
    if (p != 0) out.push_back(fmt::format("{} = {}", key, p));
  }
  return out;
}

}  // namespace lm
