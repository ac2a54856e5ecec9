#include "data/prompts.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace lm {
namespace {

constexpr int64_t kMostBytes = int64_t{64} << 20;  // answering so much text would take days

[[noreturn]] void refuse(const std::string& what, const std::string& place) {
  throw Error(Exit::kInput, {.area = "DATA-34",
                             .what = what,
                             .place = place,
                             .next = "write {\"prompt\": \"...\"} or {\"messages\": [{\"role\": \"user\", "
                                     "\"content\": \"...\"}]} on each line"});
}

std::string text_of(const Json& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) refuse(fmt::format("\"{}\" is not a string", key), place);
  return found->get<std::string>();
}

std::vector<ChatMessage> messages_of(const Json& list, const std::string& place) {
  if (!list.is_array() || list.empty()) refuse("\"messages\" is not a list of messages", place);
  std::vector<ChatMessage> out;
  for (const Json& one : list) {
    if (!one.is_object()) refuse("a message is an object with \"role\" and \"content\"", place);
    out.push_back({text_of(one, "role", place), text_of(one, "content", place)});
  }
  if (out.back().role == "assistant") refuse("the conversation ends with the model's own message", place);
  return out;
}

AskedPrompt parsed(const std::string& line, const std::string& place) {
  AskedPrompt out{.row = parse_json(line, place), .place = place};
  if (!out.row.is_object()) refuse("the line is not a JSON object", place);
  const bool conversation = out.row.contains("messages");
  if (conversation == out.row.contains("prompt"))
    refuse(conversation ? "\"prompt\" and \"messages\" are in one row"
                        : "the row has neither \"prompt\" nor \"messages\"",
           place);
  if (conversation) {
    out.messages = messages_of(out.row["messages"], place);
  } else if (out.row["prompt"].is_array()) {  // trl's form of conversations
    out.messages = messages_of(out.row["prompt"], place);
  } else {
    out.text = text_of(out.row, "prompt", place);
  }
  return out;
}

}  // namespace

std::vector<AskedPrompt> read_prompts(const std::string& path, const std::string& system) {
  const std::string text = read_small_file(path, kMostBytes);
  const bool objects = path.ends_with(".jsonl");
  std::vector<AskedPrompt> out;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    const std::string place = fmt::format("{}:{}", path, number);
    out.push_back(objects ? parsed(line, place)
                          : AskedPrompt{.text = line, .row = Json{{"prompt", line}}, .place = place});
    std::vector<ChatMessage>& messages = out.back().messages;
    if (!system.empty() && !messages.empty() && messages.front().role != "system")
      messages.insert(messages.begin(), {"system", system});
  }
  if (out.empty()) refuse("the file has no prompt", path);
  return out;
}

}  // namespace lm
