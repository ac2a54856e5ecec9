#include "launcher/serve/openai_answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>

namespace lm {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Of UTF-8: bytes that continue a character are not counted.
int64_t characters(const std::string& text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// The form of /v1/completions: lists with an element for each token. The token itself is among
// `top_logprobs`, so that a client sees whether it is the likeliest.
Json completion_logprobs(const std::vector<TokenScore>& scores, int64_t& offset) {
  Json tokens = Json::array(), logprobs = Json::array(), top = Json::array(), offsets = Json::array();
  for (const TokenScore& score : scores) {
    tokens.push_back(score.text);
    logprobs.push_back(score.logprob ? Json(*score.logprob) : Json());
    offsets.push_back(offset);
    offset += characters(score.text);
    Json alternatives = Json::object();
    // Tokens may have the same text, which then stands for the likeliest of them: the first.
    for (const auto& [text, logprob] : score.top) alternatives.emplace(text, logprob);
    if (score.logprob) alternatives.emplace(score.text, *score.logprob);
    top.push_back(score.logprob ? alternatives : Json());
  }
  return {{"tokens", tokens}, {"token_logprobs", logprobs}, {"top_logprobs", top}, {"text_offset", offsets}};
}

Json chat_token(const std::string& text, double logprob) {
  Json bytes = Json::array();
  for (const char c : text) bytes.push_back(static_cast<int>(static_cast<unsigned char>(c)));
  return {{"token", text}, {"logprob", logprob}, {"bytes", bytes}};
}

Json chat_logprobs(const std::vector<TokenScore>& scores) {
  Json content = Json::array();
  for (const TokenScore& score : scores) {
    Json token = chat_token(score.text, score.logprob.value_or(0));
    token["top_logprobs"] = Json::array();
    for (const auto& [text, logprob] : score.top) token["top_logprobs"].push_back(chat_token(text, logprob));
    content.push_back(token);
  }
  return {{"content", content}};
}

Json usage_of(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
}

Json head(const std::string& id, const char* object, int64_t created, const std::string& model) {
  return {{"id", id}, {"object", object}, {"created", created}, {"model", model}};
}

// Differs from answer to answer of this process.
std::string next_id(bool chat, int64_t created) {
  static std::atomic<int64_t> count = 0;
  return fmt::format("{}-{}-{}", chat ? "chatcmpl" : "cmpl", created, ++count);
}

}  // namespace

OpenAiAnswer::OpenAiAnswer(bool chat, bool logprobs, std::string model, int64_t created)
    : chat_(chat),
      logprobs_(logprobs),
      model_(std::move(model)),
      id_(next_id(chat, created)),
      created_(created) {}

std::string OpenAiAnswer::whole(const std::vector<AnswerPart>& choices, const Usage& usage) const {
  Json out = head(id_, chat_ ? "chat.completion" : "text_completion", created_, model_);
  out["choices"] = Json::array();
  for (const AnswerPart& one : choices) {
    Json choice = {{"index", one.index}};
    int64_t offset = 0;
    if (chat_)
      choice["message"] = {{"role", "assistant"}, {"content", one.text}};
    else
      choice["text"] = one.text;
    choice["logprobs"] = nullptr;
    if (logprobs_)
      choice["logprobs"] = chat_ ? chat_logprobs(one.scores) : completion_logprobs(one.scores, offset);
    choice["finish_reason"] = one.finish_reason;
    out["choices"].push_back(choice);
  }
  out["usage"] = usage_of(usage);
  return text_of(out);
}

std::string OpenAiAnswer::role_part() const {
  Json out = head(id_, "chat.completion.chunk", created_, model_);
  out["choices"] = Json::array({{{"index", 0},
                                 {"delta", {{"role", "assistant"}, {"content", ""}}},
                                 {"logprobs", nullptr},
                                 {"finish_reason", nullptr}}});
  return text_of(out);
}

std::string OpenAiAnswer::part(const AnswerPart& part) {
  Json out = head(id_, chat_ ? "chat.completion.chunk" : "text_completion", created_, model_);
  Json choice = {{"index", part.index}};
  const auto index = static_cast<size_t>(part.index);
  if (offsets_.size() <= index) offsets_.resize(index + 1, 0);
  if (chat_)
    choice["delta"] = part.text.empty() ? Json::object() : Json{{"content", part.text}};
  else
    choice["text"] = part.text;
  choice["logprobs"] = nullptr;
  if (logprobs_ && !part.scores.empty())
    choice["logprobs"] =
        chat_ ? chat_logprobs(part.scores) : completion_logprobs(part.scores, offsets_[index]);
  choice["finish_reason"] = part.finish_reason.empty() ? Json() : Json(part.finish_reason);
  out["choices"] = Json::array({choice});
  return text_of(out);
}

std::string OpenAiAnswer::usage_part(const Usage& usage) const {
  Json out = head(id_, chat_ ? "chat.completion.chunk" : "text_completion", created_, model_);
  out["choices"] = Json::array();
  out["usage"] = usage_of(usage);
  return text_of(out);
}

namespace {

Json model_of(const std::string& model, int64_t created) {
  return {{"id", model}, {"object", "model"}, {"created", created}, {"owned_by", "lmlaunch"}};
}

}  // namespace

std::string openai_models(const std::string& model, int64_t created) {
  return text_of({{"object", "list"}, {"data", Json::array({model_of(model, created)})}});
}

std::string openai_model(const std::string& model, int64_t created) {
  return text_of(model_of(model, created));
}

}  // namespace lm
