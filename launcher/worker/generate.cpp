#include <algorithm>
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "data/prompts.h"
#include "launcher/worker/answer_batch.h"
#include "launcher/worker/chat_prompt.h"
#include "launcher/worker/worker_commands.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 128;

void print_json(nlohmann::ordered_json json, const ChatPrompt::Spoken& answer, size_t prompt_tokens) {
  json["text"] = answer.text;
  json["tokens"] = answer.tokens;
  json["prompt_tokens"] = prompt_tokens;
  json["prompt_seconds"] = answer.prompt_seconds;
  json["seconds"] = answer.seconds;
  std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}

AnswerOptions options_of(const CommandLine& line) {
  return {.most = line.integer("--max-tokens").value_or(kDefaultTokens), .sampling = sampling_of(line)};
}

void refuse_empty(const std::vector<int32_t>& prompt, const std::string& place) {
  if (!prompt.empty()) return;
  throw Error(Exit::kInput, {.area = "DATA-24",
                             .what = "the model's tokenizer makes no token of the prompt",
                             .place = place,
                             .next = "ask something else"});
}

// The rows of a file while they are answered. They are printed in the order of the file.
class AnsweredRows {
 public:
  AnsweredRows(ChatPrompt& chat_prompt, const std::vector<AskedPrompt>& asked)
      : chat_prompt_(chat_prompt), asked_(asked) {}

  // Row n is sampled with --seed + n, and its answer does not depend on the other rows.
  void begin(AnswerBatch& batch, std::vector<int32_t> prompt, AnswerOptions options) {
    const auto number = std::ssize(rows_);
    Row& row = rows_.emplace_back();  // a deque: it stays where it is
    row.begun = monotonic_seconds();
    row.prompt_tokens = prompt.size();
    options.sampling.seed += static_cast<uint64_t>(number);
    chat_prompt_.text().begin_answer(number);
    batch.add({.prompt = std::move(prompt),
               .most = options.most,
               .stop = chat_prompt_.text().stop(),
               .sampling = options.sampling,
               .on_token =
                   [this, &row, number](int32_t token, std::span<const float>) {
                     if (row.answer.tokens.empty())
                       row.answer.prompt_seconds = monotonic_seconds() - row.begun;
                     row.answer.tokens.push_back(token);
                     row.answer.text += chat_prompt_.text().next(token, number);
                     return true;
                   },
               .on_end = [this, &row, number](bool) { end(row, number); }});
  }

  size_t begun() const { return rows_.size(); }

 private:
  struct Row {
    ChatPrompt::Spoken answer;
    size_t prompt_tokens = 0;
    double begun = 0;
    bool ended = false;
  };

  void end(Row& row, int64_t number) {
    row.answer.text += chat_prompt_.text().end_answer(number);
    const double seconds = monotonic_seconds() - row.begun;
    if (row.answer.tokens.empty()) row.answer.prompt_seconds = seconds;
    row.answer.seconds = seconds - row.answer.prompt_seconds;
    row.ended = true;
    for (; printed_ < rows_.size() && rows_[printed_].ended; ++printed_)
      print_json(nlohmann::ordered_json(asked_[printed_].row), rows_[printed_].answer,
                 rows_[printed_].prompt_tokens);
  }

  ChatPrompt& chat_prompt_;
  const std::vector<AskedPrompt>& asked_;
  std::deque<Row> rows_;
  size_t printed_ = 0;
};

// Every row's object with its answer, several rows at a time.
Exit answer_file(const CommandLine& line) {
  const AnswerOptions options = options_of(line);
  const int64_t together = texts_together(line);
  const std::string system = line.value("--system").value_or("");
  const std::vector<AskedPrompt> asked = read_prompts(*line.value("--prompts"), system);
  ChatPrompt chat_prompt(line);
  std::vector<std::vector<int32_t>> prompts;
  int64_t longest = 0;
  for (const AskedPrompt& one : asked) {
    prompts.push_back(one.messages.empty() ? chat_prompt.text().prompt(one.text, system)
                                           : chat_prompt.text().conversation(one.messages));
    refuse_empty(prompts.back(), one.place);
    longest = std::max(longest, static_cast<int64_t>(std::ssize(prompts.back())));
  }
  chat_prompt.load(longest + options.most, std::min<int64_t>(together, std::ssize(prompts)));
  AnswerBatch batch(chat_prompt.rank());
  AnsweredRows rows(chat_prompt, asked);
  while (rows.begun() < prompts.size() || batch.running() > 0) {
    while (rows.begun() < prompts.size() && batch.has_room())
      rows.begin(batch, std::move(prompts[rows.begun()]), options);
    batch.step();
  }
  return Exit::kDone;
}

}  // namespace

Exit generate_command(const CommandLine& line) {
  if (line.has("--prompts")) return answer_file(line);
  const std::optional<std::string> text = line.value("--prompt");
  if (!text || text->empty()) {
    throw usage_error("generate needs --prompt TEXT",
                      "lmlaunch generate " + line.positional[0] + " --prompt \"...\"");
  }
  const AnswerOptions options = options_of(line);
  ChatPrompt chat_prompt(line);
  const std::vector<int32_t> prompt = chat_prompt.text().prompt(*text, line.value("--system").value_or(""));
  refuse_empty(prompt, *text);
  chat_prompt.load(std::ssize(prompt) + options.most);
  const bool json = line.has("--json");
  const auto answer = chat_prompt.answer(prompt, options, [json](const std::string& piece) {
    if (json) return;
    std::fputs(piece.c_str(), stdout);
    std::fflush(stdout);
  });
  json ? print_json({}, answer, prompt.size()) : static_cast<void>(std::printf("\n"));
  return Exit::kDone;
}

}  // namespace lm
