#include "spec/config_reader.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace lm {

std::string ConfigReader::name(const std::string& key) const {
  const auto alias = std::ranges::find(aliases_, key, &KeyAlias::ours);
  return alias == aliases_.end() ? key : alias->file;
}

const Json* ConfigReader::find(const char* key) const {
  const auto it = object_.find(name(key));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool ConfigReader::is_null(const char* key) const {
  const auto it = object_.find(name(key));
  return it != object_.end() && it->is_null();
}

ConfigReader ConfigReader::inside(const char* key) const {
  const Json* const value = find(key);
  if (!value) fail(key, "is missing");
  return inside(key, *value);
}

ConfigReader ConfigReader::inside(const char* key, const Json& object) const {
  if (!object.is_object()) fail(key, std::string("must be an object, not ") + object.type_name());
  return {object, place_, prefix_ + name(key) + "."};
}

std::optional<std::string> ConfigReader::text(const char* key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) fail(key, std::string("must be a string, not ") + value->type_name());
  return value->get<std::string>();
}

bool ConfigReader::boolean(const char* key, bool missing) const {
  const Json* value = find(key);
  if (!value) return missing;
  if (!value->is_boolean()) fail(key, std::string("must be true or false, not ") + value->type_name());
  return value->get<bool>();
}

double ConfigReader::number(const char* key, double missing) const {
  const Json* value = find(key);
  if (!value) return missing;
  // transformers writes {"__float__": "Infinity"} for what JSON has no number for.
  if (value->is_object() && value->contains("__float__")) fail(key, "must be finite");
  if (!value->is_number()) fail(key, std::string("must be a number, not ") + value->type_name());
  const double number = value->get<double>();
  if (!std::isfinite(number)) fail(key, "must be finite");
  return number;
}

double ConfigReader::required_number(const char* key) const {
  if (!find(key)) fail(key, "is missing");
  return number(key, 0);
}

double ConfigReader::positive(const char* key, double missing) const {
  const double value = number(key, missing);
  if (!(value >= 1e-6) || value > 1e6) fail(key, "must be in [1e-6, 1e6]");
  return value;
}

int64_t ConfigReader::size(const char* key, int64_t missing, int64_t most) const {
  return integer(key, missing, 1, most);
}

int64_t ConfigReader::count(const char* key, int64_t missing, int64_t most) const {
  return integer(key, missing, 0, most);
}

int64_t ConfigReader::required_size(const char* key, int64_t most) const {
  if (!find(key)) fail(key, "is missing");
  return integer(key, 0, 1, most);
}

int64_t ConfigReader::integer(const char* key, int64_t missing, int64_t least, int64_t most) const {
  const Json* value = find(key);
  if (!value) return missing;
  if (!value->is_number_integer()) fail(key, std::string("must be an integer, not ") + value->type_name());
  const bool huge = value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(most);
  const int64_t number = huge ? 0 : value->get<int64_t>();
  if (huge || number < least || number > most) {
    fail(key, fmt::format("= {} is outside {} .. {}", value->dump(), least, most));
  }
  return number;
}

void ConfigReader::fail(const std::string& key, const std::string& what) const {
  throw Error(Exit::kInput, {.area = "MODEL-23",
                             .what = prefix_ + name(key) + " " + what,
                             .place = place_,
                             .next = "use a model that this version supports, or correct config.json"});
}

}  // namespace lm
