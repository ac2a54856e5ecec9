// Values of other trainers' files: JSON and YAML values as text, numbers, switches and TOML. Pure.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

std::string lower(std::string text);
bool contains(const std::string& text, std::string_view part);
std::string text_of(const nlohmann::json& value);
// A list, or names with commas between.
std::vector<std::string> names_of(const nlohmann::json& value);
// The part behind the last dot: "AdamW" of "torch.optim.AdamW".
std::string last_of(const std::string& component);

// null, false, 0, "", "none", "no", [], {}: a switch that is off.
bool is_off(const nlohmann::json& value);
std::optional<double> as_number(const nlohmann::json& value);
std::string whole_text(double number);
// As TOML: YAML passes 2e-5 as text.
std::string toml_of(const nlohmann::json& value);

}  // namespace lm
