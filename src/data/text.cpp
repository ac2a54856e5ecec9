#include "data/text.h"

#include "data/python.h"

namespace lm {
namespace {

using Json = nlohmann::json;

Json ask(const TextTools& tools, Json request) {
  request["model_dir"] = tools.model_dir;
  return ask_python(tools.python, tools.program_dir + "/text.py", request);
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
