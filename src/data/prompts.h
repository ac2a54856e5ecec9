// A file of prompts for `generate --prompts`: in a .jsonl file every line is an object with `prompt` or
// `messages`, in any other every line is a verbatim prompt. Empty lines are skipped. Pure, except for reading
// the file; throws Error(11) "DATA-34" with the file and its line.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/text.h"

namespace lm {

struct AskedPrompt {
  std::string text = {};                   // a prompt; empty if the row is a conversation
  std::vector<ChatMessage> messages = {};  // a conversation up to the model's turn
  nlohmann::json row;                      // the line's object, to which the answer is added
  std::string place;                       // "prompts.jsonl:3"
};

// `system`: the system message of every prompt, and of conversations without their own; "" none. A prompt
// with it keeps its text: TextSession::prompt takes both.
std::vector<AskedPrompt> read_prompts(const std::string& path, const std::string& system);

}  // namespace lm
