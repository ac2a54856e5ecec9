#include "data/template_date.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"

namespace lm {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// The limits of prepare/sandbox.py and prepare/tokenise.py.
constexpr int64_t kMostTemplate = kMiB, kMostConfig = 32 * kMiB;

// The only function by which a template gets the date.
bool asks(const std::string& text) {
  return text.find("strftime_now") != std::string::npos;
}

std::string text_of(const fs::path& path, int64_t most) {
  try {
    return read_small_file(path, most);
  } catch (const Error&) {
    return "";
  }
}

// JSON may escape characters (\u0073): so the text is parsed, not searched.
bool config_asks(const std::string& text) {
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > 64) throw std::length_error("nested too deeply");
    return true;
  };
  try {
    const Json config = Json::parse(text, shallow);
    const Json found = config.is_object() ? config.value("chat_template", Json()) : Json();
    if (found.is_string()) return asks(found.get<std::string>());
    for (const Json& one : found) {
      if (one.is_object() && one.contains("template") && one["template"].is_string() &&
          asks(one["template"].get<std::string>()))
        return true;
    }
  } catch (const std::exception&) {
  }
  return false;
}

}  // namespace

bool template_asks_for_date(const std::string& own, const std::string& model_dir) {
  if (!own.empty()) return asks(text_of(own, kMostTemplate));
  const fs::path model(model_dir);
  bool files = false;
  std::error_code absent;
  if (fs::is_regular_file(model / "chat_template.jinja", absent)) {
    files = true;
    if (asks(text_of(model / "chat_template.jinja", kMostTemplate))) return true;
  }
  for (const auto& entry : fs::directory_iterator(model / "additional_chat_templates", absent)) {
    if (entry.path().extension() != ".jinja") continue;
    files = true;
    if (asks(text_of(entry.path(), kMostTemplate))) return true;
  }
  return !files && config_asks(text_of(model / "tokenizer_config.json", kMostConfig));
}

}  // namespace lm
