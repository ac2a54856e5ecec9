// A model that generate and chat prompt: from a run, a checkpoint, a model's directory or an adapter's.
#pragma once

#include <memory>
#include <string>

#include "data/text.h"
#include "launcher/command_line.h"
#include "launcher/worker/adapters.h"
#include "launcher/worker/answer.h"
#include "launcher/worker/job.h"

namespace lm {

// The text program for a model's directory; `chat_template`: replaces its own, "": it does not. `date`: for
// templates that print one, "": today's. `render`: plain prompts are written without a template.
TextTools text_tools(const Environment& environment, const std::string& model_dir,
                     const std::string& chat_template, const std::string& date, Render render);

// The same for what a job trains or evaluates, once its data is open.
TextTools text_tools(const Job& job);

class ChatPrompt {
 public:
  // Opens the subject, with the adapters of --adapter, and its tokenizer, without weights.
  explicit ChatPrompt(const CommandLine& line);

  TextSession& text() { return *text_; }
  const ModelSpec& spec() const { return spec_; }
  Render render() const { return subject_.config.data.render; }  // how its training rows were written
  // Plans and loads, for texts of at most so many tokens, `texts` of them together. Throws Error(12) if that
  // does not fit.
  void load(int64_t positions, int64_t texts = 1);
  Rank& rank() { return *rank_; }
  // `on_text` gets whole characters as they are generated.
  struct Spoken : Answer {
    std::string text;
  };
  Spoken answer(std::span<const int32_t> prompt, AnswerOptions options,
                const std::function<void(const std::string&)>& on_text);

 private:
  const CommandLine& line_;
  std::unique_ptr<ScratchDirectory> scratch_;  // of several adapters as one, until they are loaded
  Subject subject_;
  ModelSpec spec_;
  std::unique_ptr<TextSession> text_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Rank> rank_;
};

}  // namespace lm
