#include "data/prompts.h"

#include <fmt/format.h>

#include <functional>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace lm {
namespace {

constexpr int64_t kMostBytes = int64_t{64} << 20;  // answering so much text would take days

constexpr const char* kAskedRow =
    R"(write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]} on each line)";
constexpr const char* kReferenceRow =
    R"(write {"prompt": "...", "completion": "..."}, or {"messages": [...]} with an assistant's message at the )"
    "end, on each line";

[[noreturn]] void refuse(const std::string& what, const std::string& place, const char* next = kAskedRow) {
  throw Error(Exit::kInput, {.area = "DATA-34", .what = what, .place = place, .next = next});
}

std::string text_of(const Json& object, const std::string& key, const std::string& place,
                    const char* next = kAskedRow) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string())
    refuse(fmt::format("\"{}\" is not a string", key), place, next);
  return found->get<std::string>();
}

std::vector<ChatMessage> all_messages(const Json& list, const std::string& place,
                                      const char* next = kAskedRow) {
  if (!list.is_array() || list.empty()) refuse("\"messages\" is not a list of messages", place, next);
  std::vector<ChatMessage> out;
  for (const Json& one : list) {
    if (!one.is_object()) refuse("a message is an object with \"role\" and \"content\"", place, next);
    out.push_back({text_of(one, "role", place, next), text_of(one, "content", place, next)});
  }
  return out;
}

std::vector<ChatMessage> messages_of(const Json& list, const std::string& place) {
  std::vector<ChatMessage> out = all_messages(list, place);
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

void each_line(const std::string& path, const std::function<void(std::string, const std::string&)>& use) {
  const std::string text = read_small_file(path, kMostBytes);
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    use(std::move(line), fmt::format("{}:{}", path, number));
  }
}

// A row with a prompt and its reference.
struct ReferenceRow {
  Json row;
  const std::string& place;
  const std::map<std::string, std::string>& columns;

  std::string name(const std::string& ours) const {
    const auto found = columns.find(ours);
    return found == columns.end() ? ours : found->second;
  }
  bool has(const std::string& ours) const { return row.contains(name(ours)); }
  std::string text(const std::string& ours) const { return text_of(row, name(ours), place, kReferenceRow); }
  std::vector<ChatMessage> list(const std::string& ours) const {
    return all_messages(row[name(ours)], place, kReferenceRow);
  }

  // The conversation's last message becomes the reference.
  void take_last(std::vector<ChatMessage> conversation, ReferencePrompt& out) const {
    const bool answered = conversation.size() > 1 && conversation.back().role == "assistant";
    if (!answered) refuse("the conversation does not end with an answer", place, kReferenceRow);
    out.reference = std::move(conversation.back().content);
    conversation.pop_back();
    out.messages = std::move(conversation);
  }

  ReferencePrompt read() const {
    if (!row.is_object()) refuse("the line is not a JSON object", place, kReferenceRow);
    if (has("messages") == has("prompt"))
      refuse(has("prompt") ? "\"prompt\" and \"messages\" are in one row"
                           : "the row has neither \"prompt\" nor \"messages\"",
             place, kReferenceRow);
    ReferencePrompt out{.place = place};
    if (has("messages")) {
      take_last(list("messages"), out);
      return out;
    }
    if (!has("completion")) refuse("the row has no \"completion\"", place, kReferenceRow);
    if (!row[name("prompt")].is_array()) {
      out.text = text("prompt");
      out.reference = text("completion");
      if (has("system") && !row[name("system")].is_null()) out.system = text("system");
      return out;
    }
    std::vector<ChatMessage> conversation = list("prompt");  // trl's form
    if (row[name("completion")].is_array()) {
      for (ChatMessage& one : list("completion")) conversation.push_back(std::move(one));
    } else {
      conversation.push_back({"assistant", text("completion")});
    }
    take_last(std::move(conversation), out);
    return out;
  }
};

}  // namespace

std::vector<AskedPrompt> read_prompts(const std::string& path, const std::string& system) {
  const bool objects = path.ends_with(".jsonl");
  std::vector<AskedPrompt> out;
  each_line(path, [&](std::string line, const std::string& place) {
    out.push_back(objects ? parsed(line, place)
                          : AskedPrompt{.text = line, .row = Json{{"prompt", line}}, .place = place});
    std::vector<ChatMessage>& messages = out.back().messages;
    if (!system.empty() && !messages.empty() && messages.front().role != "system")
      messages.insert(messages.begin(), {"system", system});
  });
  if (out.empty()) refuse("the file has no prompt", path);
  return out;
}

std::vector<ReferencePrompt> read_references(const std::vector<std::string>& files,
                                             const std::map<std::string, std::string>& columns) {
  std::vector<ReferencePrompt> out;
  for (const std::string& path : files) {
    const size_t before = out.size();
    each_line(path, [&](const std::string& line, const std::string& place) {
      out.push_back(ReferenceRow{parse_json(line, place), place, columns}.read());
    });
    if (out.size() == before) refuse("the file has no prompt", path, kReferenceRow);
  }
  return out;
}

}  // namespace lm
