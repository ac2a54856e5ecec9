#include "launcher/worker/scored_answers.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/log.h"
#include "data/answer_scores.h"
#include "data/score_command.h"
#include "launcher/worker/answer_batch.h"
#include "launcher/worker/chat_prompt.h"

namespace lm {

ScoredAnswers::ScoredAnswers(const Job& job) : job_(job) {
  const std::vector<std::string>& files = job.config.eval.generate.data;
  if (files.empty()) return;
  TextSession session(text_tools(job));
  stop_ = session.stop();
  for (ReferencePrompt& asked : read_references(files, job.config.data.columns)) {
    const std::vector<int32_t> tokens = asked.messages.empty() ? session.prompt(asked.text, asked.system)
                                                               : session.conversation(asked.messages);
    const int64_t room = job.plan.cache_positions - job.model.virtual_tokens();
    if (tokens.empty() || std::ssize(tokens) > room)
      throw Error(
          Exit::kInput,
          {.area = "DATA-24",
           .what = fmt::format("a prompt of eval.generate.data has {} tokens, and with its answer it "
                               "may have {}",
                               tokens.size(), room),
           .place = asked.place,
           .next = room < kSamplePositions ? "leave it out, or raise data.max_length" : "leave it out"});
    rows_.push_back({std::move(asked), tokens});
  }
}

std::optional<ScoredAnswers::Tokens> ScoredAnswers::generate(Rank& rank,
                                                             const std::function<bool()>& stopped) const {
  Tokens answers(rows_.size());
  AnswerBatch batch(rank);
  size_t begun = 0;
  while (begun < rows_.size() || batch.running() > 0) {
    if (stopped && stopped()) return std::nullopt;
    while (begun < rows_.size() && batch.has_room()) {
      std::vector<int32_t>& answer = answers[begun];
      batch.add({.prompt = rows_[begun++].tokens,
                 .most = job_.config.eval.generate.max_tokens,
                 .stop = stop_,
                 .on_token =
                     [&answer](int32_t token, std::span<const float>) {
                       answer.push_back(token);
                       return true;
                     },
                 .on_end = [](bool) {}});
    }
    batch.step();
  }
  return answers;
}

AnswerScores ScoredAnswers::scores_of(const Tokens& answers) const {
  TextSession session(text_tools(job_));
  std::vector<ScoredAnswer> texts;
  for (size_t row = 0; row < rows_.size(); ++row) {
    const ReferencePrompt& asked = rows_[row].asked;
    ScoredAnswer& one = texts.emplace_back();
    one.prompt = asked.asked();
    one.reference = asked.reference;
    session.begin_answer();
    for (const int32_t token : answers[row]) one.answer += session.next(token);
    one.answer += session.end_answer();
  }
  const EvalGenerateConfig& keys = job_.config.eval.generate;
  AnswerScores out{.scores = score_answers(texts, keys.metrics), .answers = std::ssize(texts)};
  if (keys.command.empty()) return out;
  const CommandScores printed = run_score_command(keys.command, keys.command_seconds, texts);
  if (!printed.failure.empty())
    log_warning("DATA-35", "eval.generate.command (" + keys.command.front() + ") gives no score: " +
                               printed.failure + "; the evaluation continues without it");
  out.scores.insert(out.scores.end(), printed.scores.begin(), printed.scores.end());
  return out;
}

std::optional<AnswerScores> ScoredAnswers::score(Rank& rank, const std::function<bool()>& stopped) const {
  const std::optional<Tokens> answers = generate(rank, stopped);
  if (!answers) return std::nullopt;
  return rank.group().rank() == 0 ? scores_of(*answers) : AnswerScores{};
}

}  // namespace lm
