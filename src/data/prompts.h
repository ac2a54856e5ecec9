// A file of prompts for `generate --prompts`: in a .jsonl file every line is an object with `prompt` or
// `messages`, in any other every line is a verbatim prompt. And files of prompts with references, for
// eval.generate. Empty lines are skipped. Pure, except for reading the files; throws Error(11) "DATA-34" with
// the file and its line.
#pragma once

#include <map>
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

// A prompt whose answer is known.
struct ReferencePrompt {
  std::string text = {};                   // a prompt; empty if the row is a conversation
  std::string system = {};                 // of a prompt; "": none
  std::vector<ChatMessage> messages = {};  // a conversation up to the model's turn
  std::string reference = {};
  std::string place = {};  // "asked.jsonl:3"
  // The prompt as text: of a conversation its last message.
  const std::string& asked() const { return messages.empty() ? text : messages.back().content; }
};

// The rows of files of JSON lines: `prompt` and `completion`, each a string or a list of messages, with an
// optional `system`; or `messages`, of which the last is the reference. `columns`: data.columns.
std::vector<ReferencePrompt> read_references(const std::vector<std::string>& files,
                                             const std::map<std::string, std::string>& columns);

}  // namespace lm
