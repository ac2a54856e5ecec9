#include "data/text.h"

#include "data/python.h"

namespace lm {
namespace {

using Json = nlohmann::json;

std::vector<int32_t> ids_of(const Json& answer) {
  return answer.at("ids").get<std::vector<int32_t>>();
}
std::string text_of(const Json& answer) {
  return answer.at("text").get<std::string>();
}

}  // namespace

TextSession::TextSession(const TextTools& tools)
    : python_(std::make_unique<PythonSession>(tools.python, tools.program_dir + "/text.py")) {
  const Json model = python_->ask({{"model_dir", tools.model_dir},
                                   {"chat_template", tools.chat_template},
                                   {"date", tools.date},
                                   {"plain", tools.plain}});
  stop_ = model.at("stop").get<std::vector<int32_t>>();
  has_template_ = model.at("template").get<bool>();
}

TextSession::~TextSession() = default;

std::vector<int32_t> TextSession::prompt(const std::string& text, const std::string& system) {
  return ids_of(python_->ask({{"prompt", text}, {"system", system}}));
}

std::vector<int32_t> TextSession::conversation(const std::vector<ChatMessage>& messages) {
  Json list = Json::array();
  for (const ChatMessage& one : messages) list.push_back({{"role", one.role}, {"content", one.content}});
  return ids_of(python_->ask({{"messages", list}}));
}

std::vector<int32_t> TextSession::plain(const std::string& text) {
  return ids_of(python_->ask({{"plain", text}}));
}

void TextSession::begin_answer(int64_t answer) {
  python_->ask({{"begin", true}, {"answer", answer}});
}

std::string TextSession::next(int32_t token, int64_t answer) {
  return text_of(python_->ask({{"next", token}, {"answer", answer}}));
}

std::string TextSession::end_answer(int64_t answer) {
  return text_of(python_->ask({{"end", true}, {"answer", answer}}));
}

TextSession::Decoded TextSession::decode(const std::vector<int32_t>& tokens) {
  const Json answer = python_->ask({{"decode", tokens}});
  return {text_of(answer), answer.at("pieces").get<std::vector<std::string>>()};
}

}  // namespace lm
