#include "launcher/serve/openai_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kMostPrompts = 256, kMostStops = 16, kMostLogprobs = 20;

[[noreturn]] void refuse(const std::string& param, const std::string& what) {
  throw BadRequest(fmt::format("{}: {}", param, what), param);
}

// The values of a request's keys. A key with null counts as left out.
class Keys {
 public:
  explicit Keys(const Json& object) : object_(object) {}

  const Json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool flag(const char* key) const {
    const Json* const value = find(key);
    if (value != nullptr && !value->is_boolean()) refuse(key, "expected true or false");
    return value != nullptr && value->get<bool>();
  }
  std::optional<int64_t> integer(const char* key, int64_t least, int64_t most) const {
    const Json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    const bool whole = value->is_number_integer() &&
                       !(value->is_number_unsigned() && value->get<uint64_t>() > uint64_t{INT64_MAX});
    if (!whole || value->get<int64_t>() < least || value->get<int64_t>() > most)
      refuse(key, fmt::format("expected a whole number from {} to {}", least, most));
    return value->get<int64_t>();
  }
  double number(const char* key, double otherwise, double least, double most) const {
    const Json* const value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most))
      refuse(key, fmt::format("expected a number from {} to {}", least, most));
    return value->get<double>();
  }
  // Keys that may only have the value that changes nothing.
  void refuse_other(const char* key, const Json& allowed) const {
    const Json* const value = find(key);
    if (value != nullptr && *value != allowed && !(value->is_object() && value->empty()) &&
        !(value->is_array() && value->empty()))
      refuse(key, "only " + allowed.dump() + " is supported");
  }
  void refuse_unknown(std::span<const char* const> known, std::span<const char* const> of_kind) const {
    for (const auto& [key, value] : object_.items()) {
      const auto same = [&key = key](const char* name) { return key == name; };
      if (std::ranges::none_of(known, same) && std::ranges::none_of(of_kind, same))
        refuse(key, "this key is not supported");
    }
  }

 private:
  const Json& object_;
};

std::vector<int32_t> tokens_of(const Json& list, int64_t vocab) {
  std::vector<int32_t> out;
  for (const Json& one : list) {
    const bool number = one.is_number_unsigned() && one.get<uint64_t>() < static_cast<uint64_t>(vocab);
    if (!number) refuse("prompt", fmt::format("a token is a number below {}", vocab));
    out.push_back(one.get<int32_t>());
  }
  return out;
}

// A string, tokens, or a list of either.
std::vector<PromptInput> prompts_of(const Json* prompt, int64_t vocab) {
  if (prompt == nullptr) refuse("prompt", "it is missing");
  std::vector<PromptInput> out;
  const auto add = [&](const Json& one) {
    if (one.is_string())
      out.push_back({.text = one.get<std::string>(), .is_text = true});
    else if (one.is_array() && !one.empty())
      out.push_back({.tokens = tokens_of(one, vocab)});
    else
      refuse("prompt", "expected a string, a list of tokens, or a list of either");
  };
  const bool many = prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  if (!many) {
    add(*prompt);
  } else {
    if (std::ssize(*prompt) > kMostPrompts)
      refuse("prompt", fmt::format("at most {} in a request", kMostPrompts));
    for (const Json& one : *prompt) add(one);
  }
  return out;
}

// A string, or OpenAI's list of parts, all of them text.
std::string content_of(const Json& message) {
  const auto content = message.find("content");
  if (content != message.end() && content->is_string()) return content->get<std::string>();
  if (content == message.end() || !content->is_array())
    refuse("messages", "a message's content is a string or a list of parts");
  std::string out;
  for (const Json& part : *content) {
    if (!part.is_object() || part.value("type", Json()) != "text" || !part.value("text", Json()).is_string())
      refuse("messages", "a part of a message's content is {\"type\": \"text\", \"text\": \"...\"}");
    out += part["text"].get<std::string>();
  }
  return out;
}

std::vector<ChatMessage> messages_of(const Json* list) {
  if (list == nullptr || !list->is_array() || list->empty())
    refuse("messages", "expected a list of messages");
  std::vector<ChatMessage> out;
  for (const Json& one : *list) {
    if (!one.is_object() || !one.value("role", Json()).is_string())
      refuse("messages", "a message is an object with role and content");
    const auto role = one["role"].get<std::string>();
    if (role != "system" && role != "developer" && role != "user" && role != "assistant")
      refuse("messages", "the roles are system, user and assistant");
    out.push_back({role == "developer" ? "system" : role, content_of(one)});
  }
  if (out.back().role == "assistant") refuse("messages", "the last message is the model's own");
  return out;
}

std::vector<std::string> stops_of(const Json* stop) {
  std::vector<std::string> out;
  const auto add = [&](const Json& one) {
    if (!one.is_string() || one.get_ref<const std::string&>().empty())
      refuse("stop", "expected a string or a list of strings, none of them empty");
    out.push_back(one.get<std::string>());
  };
  if (stop == nullptr) return out;
  if (!stop->is_array()) {
    add(*stop);
  } else {
    if (std::ssize(*stop) > kMostStops) refuse("stop", fmt::format("at most {}", kMostStops));
    for (const Json& one : *stop) add(one);
  }
  return out;
}

constexpr std::array kKnown = {"model",
                               "max_tokens",
                               "temperature",
                               "top_p",
                               "top_k",
                               "seed",
                               "stop",
                               "stream",
                               "stream_options",
                               "n",
                               "logprobs",
                               "presence_penalty",
                               "frequency_penalty",
                               "logit_bias",
                               "user",
                               "metadata",
                               "store"};
constexpr std::array kOfCompletions = {"prompt", "echo", "best_of", "suffix"};
constexpr std::array kOfChats = {"messages", "max_completion_tokens", "top_logprobs", "response_format",
                                 "tools"};

void refuse_unsupported(const Keys& keys, bool chat) {
  keys.refuse_unknown(
      kKnown, chat ? std::span<const char* const>(kOfChats) : std::span<const char* const>(kOfCompletions));
  for (const char* one : {"n", "best_of"}) keys.refuse_other(one, 1);
  for (const char* none : {"presence_penalty", "frequency_penalty"}) keys.refuse_other(none, 0);
  for (const char* none : {"logit_bias", "tools"}) keys.refuse_other(none, Json::object());
  keys.refuse_other("suffix", "");
  keys.refuse_other("response_format", {{"type", "text"}});
}

std::optional<int64_t> logprobs_of(const Keys& keys, bool chat) {
  if (!chat) return keys.integer("logprobs", 0, kMostLogprobs);
  const std::optional<int64_t> top = keys.integer("top_logprobs", 0, kMostLogprobs);
  if (!keys.flag("logprobs")) return std::nullopt;
  return top.value_or(0);
}

}  // namespace

OpenAiRequest parse_openai_request(const std::string& body, bool chat, const std::string& model,
                                   int64_t vocab) {
  Json object;
  try {
    object = parse_json(body, "the request");
  } catch (const Error& error) {
    throw BadRequest(error.text().what, "");
  }
  if (!object.is_object()) throw BadRequest("the request is no JSON object", "");
  const Keys keys(object);
  refuse_unsupported(keys, chat);
  if (const Json* const named = keys.find("model"); named != nullptr && *named != model)
    throw BadRequest(fmt::format("the model {} is not served here; {} is", named->dump(), model), "model",
                     404);
  OpenAiRequest out{.chat = chat};
  if (chat)
    out.prompts.push_back({.messages = messages_of(keys.find("messages"))});
  else
    out.prompts = prompts_of(keys.find("prompt"), vocab);
  constexpr int64_t kMostTokens = int64_t{1} << 30;
  out.echo = !chat && keys.flag("echo");
  out.max_tokens = keys.integer("max_tokens", out.echo ? 0 : 1, kMostTokens);
  if (chat && !out.max_tokens) out.max_tokens = keys.integer("max_completion_tokens", 1, kMostTokens);
  out.temperature = keys.number("temperature", 1, 0, 2);
  out.top_p = keys.number("top_p", 1, 0, 1);
  if (out.top_p <= 0) refuse("top_p", "expected a share above 0");
  out.top_k = keys.integer("top_k", 0, kMostTokens).value_or(0);
  const std::optional<int64_t> seed = keys.integer("seed", INT64_MIN, INT64_MAX);
  if (seed) out.seed = static_cast<uint64_t>(*seed);
  out.stop = stops_of(keys.find("stop"));
  out.logprobs = logprobs_of(keys, chat);
  out.stream = keys.flag("stream");
  if (const Json* const options = keys.find("stream_options")) {
    if (!options->is_object() || !out.stream)
      refuse("stream_options", "expected an object, beside \"stream\": true");
    out.include_usage = Keys(*options).flag("include_usage");
  }
  return out;
}

std::string openai_error(int status, const std::string& message, const std::string& param) {
  nlohmann::ordered_json error;
  error["message"] = message;
  error["type"] =
      status < 500 ? (status == 401 ? "authentication_error" : "invalid_request_error") : "server_error";
  error["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  error["code"] = status == 404 && param == "model" ? nlohmann::ordered_json("model_not_found")
                                                    : nlohmann::ordered_json();
  return nlohmann::ordered_json{{"error", error}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lm
