#include "data/text.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "data/child_process.h"

namespace lm {
namespace {

using Json = nlohmann::json;

Json ask(const TextTools& tools, Json request) {
  request["model_dir"] = tools.model_dir;
  const ChildResult result =
      run_child({tools.python, "-I", "-B", tools.program_dir + "/text.py"},
                request.dump(-1, ' ', false, Json::error_handler_t::replace), log_line, {});
  const Json answer = Json::parse(result.output, nullptr, false);
  if (answer.is_object() && !answer.contains("error") && result.status == 0) return answer;
  const Json error = answer.is_object() ? answer.value("error", Json::object()) : Json::object();
  throw Error(Exit::kInput, {.area = error.value("area", "DATA-23"),
                             .what = error.value("what", "the tokenizer's program failed"),
                             .place = error.value("place", tools.model_dir),
                             .next = error.value("next", "run lmlaunch doctor"),
                             .kept = ""});
}

}  // namespace

Prompt encode_prompt(const TextTools& tools, const std::string& text) {
  const Json answer = ask(tools, {{"prompt", text}, {"chat", true}});
  return {answer.at("ids").get<std::vector<int32_t>>(), answer.at("stop").get<std::vector<int32_t>>()};
}

std::string decode_tokens(const TextTools& tools, const std::vector<int32_t>& tokens) {
  return ask(tools, {{"ids", tokens}}).at("text").get<std::string>();
}

}  // namespace lm
