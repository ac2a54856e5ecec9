// A model's own tokenizer and chat template at hand: prompts to tokens, and an answer's tokens back to text
// as they come. A Python program that stays until the end, as the one for training data; it dies with this
// process. Calls block; one thread. Throws Error(10 or 11) as ask_python does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lm {

class PythonSession;

struct TextTools {
  std::string python;              // interpreter
  std::string program_dir;         // the folder prepare/
  std::string model_dir;           // holds tokenizer.json
  std::string chat_template = {};  // in Jinja; "": the model's own
  std::string date = {};           // "2026-01-31", for a template that asks; "": today's
  bool plain = false;  // prompts are written without the template, as data.render = "plain" trains
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

class TextSession {
 public:
  explicit TextSession(const TextTools& tools);
  ~TextSession();

  const std::vector<int32_t>& stop() const { return stop_; }  // tokens that end an answer
  bool has_template() const { return has_template_; }

  // As a user's message when the model has a chat template and the tools are not `plain`, else as plain text.
  // `system`: a message before it; in plain text, text before it with an empty line between, as training
  // writes it; "" none.
  std::vector<int32_t> prompt(const std::string& text, const std::string& system = "");
  // A conversation up to where the model speaks; without a chat template in the form that training gives it.
  std::vector<int32_t> conversation(const std::vector<ChatMessage>& messages);

  // An answer's tokens one by one: the text that is certain now. What may be part of a character waits.
  void begin_answer();
  std::string next(int32_t token);
  std::string end_answer();  // the rest

 private:
  std::unique_ptr<PythonSession> python_;
  std::vector<int32_t> stop_;
  bool has_template_ = false;
};

}  // namespace lm
