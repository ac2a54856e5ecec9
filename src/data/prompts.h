// A file of prompts for `generate --prompts`: of a .jsonl file every line is an object with `prompt` or
// `messages`, of any other every line is a prompt as it stands. Empty lines are skipped. Pure but for the
// reading of the file; throws Error(11) "DATA-34" with the file and its line.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/text.h"

namespace lm {

struct AskedPrompt {
  std::string text = {};                   // a prompt; empty where the row is a conversation
  std::vector<ChatMessage> messages = {};  // a conversation up to where the model speaks
  nlohmann::json row;                      // the line's object, for the answer to stand in
  std::string place;                       // "prompts.jsonl:3"
};

// `system`: put before every prompt, and before conversations that do not begin with one of their own; ""
// none. A prompt with it keeps its text: TextSession::prompt takes both.
std::vector<AskedPrompt> read_prompts(const std::string& path, const std::string& system);

}  // namespace lm
