// A model's own tokenizer and chat template: encodes prompts, and decodes an answer's tokens as a stream. A
// persistent Python program, like that for training data; it is killed with this process. Calls block; one
// thread. Throws Error(10 or 11) as ask_python does.
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
  std::string date = {};           // "2026-01-31", for a template that uses it; "": today's
  bool plain = false;  // prompts are formatted without the template, as data.render = "plain" trains them
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

  // Encoded as a user's message if the model has a chat template and the tools are not `plain`, else as plain
  // text. `system`: a system message; in plain text, text before it with an empty line between, as in
  // training; "" none.
  std::vector<int32_t> prompt(const std::string& text, const std::string& system = "");
  // A conversation up to the model's turn; without a chat template in the form of training.
  std::vector<int32_t> conversation(const std::vector<ChatMessage>& messages);

  // A text as it is, with the tokens that the tokenizer adds.
  std::vector<int32_t> plain(const std::string& text);

  // Decodes an answer's tokens one by one: next returns the text that is complete. Bytes of an incomplete
  // character wait. Answers under way at the same time have different numbers.
  void begin_answer(int64_t answer = 0);
  std::string next(int32_t token, int64_t answer = 0);
  std::string end_answer(int64_t answer = 0);  // the rest

  // Tokens as one text, and the text of each alone, special tokens included.
  struct Decoded {
    std::string text;
    std::vector<std::string> pieces;
  };
  Decoded decode(const std::vector<int32_t>& tokens);

 private:
  std::unique_ptr<PythonSession> python_;
  std::vector<int32_t> stop_;
  bool has_template_ = false;
};

}  // namespace lm
