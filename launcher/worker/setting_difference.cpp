#include "launcher/worker/setting_difference.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/json.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "launcher/recorded.h"

namespace lm {
namespace {

void compare_keys(const Config& a, const Config& b, SettingDifference& out) {
  // A key matters if it does for one of the two: [lora] for the run that trains an adapter.
  std::vector<KeyDifference> matter = config_difference(a, b);
  for (KeyDifference& other : config_difference(b, a)) matter.push_back(std::move(other));
  const std::vector<KeyText> left = list_keys(a), right = list_keys(b);
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i].value == right[i].value) continue;
    const std::string key = left[i].table + "." + left[i].name;
    const bool matters = std::ranges::find(matter, key, &KeyDifference::key) != matter.end();
    (matters ? out.settings : out.without_effect).push_back({key, {left[i].value, right[i].value}});
  }
}

// The values of a JSON object in a run's directory; none if it has no such file.
std::map<std::string, std::string> recorded_values(const std::string& run, const std::string& name) {
  std::map<std::string, std::string> out;
  const std::string path = run + "/" + name;
  if (!std::filesystem::exists(path)) return out;
  const Json json = read_json_file(path);
  for (const auto& [key, value] : json.items())
    out[key] = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return out;
}

void compare_files(const std::string& a, const std::string& b, const std::string& name,
                   const std::string& table, std::vector<ValueDifference>& out) {
  std::map<std::string, std::array<std::string, 2>> values;
  for (const auto& [key, value] : recorded_values(a, name)) values[key][0] = value;
  for (const auto& [key, value] : recorded_values(b, name)) values[key][1] = value;
  for (const auto& [key, both] : values) {
    if (both[0] != both[1]) out.push_back({table + "." + key, both});
  }
}

std::string date_of(const std::string& run) {
  return std::filesystem::exists(run + "/" + kDateFile) ? recorded_date(run) : "";
}

}  // namespace

SettingDifference compare_settings(const std::string& a, const std::string& b) {
  SettingDifference out;
  compare_keys(load_config(a + "/config.toml"), load_config(b + "/config.toml"), out);
  compare_files(a, b, kNumericsFile, "numerics", out.recorded);
  compare_files(a, b, kBaseModelFile, "base_model", out.recorded);
  const std::array<std::string, 2> dates = {date_of(a), date_of(b)};
  if (dates[0] != dates[1]) out.recorded.push_back({"date", dates});
  return out;
}

}  // namespace lm
