#include "launcher/worker/samples.h"

#include <fmt/format.h>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "launcher/worker/chat_prompt.h"

namespace lm {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 20;  // size limit of a file of prompts

Error refusal(const std::string& what, const std::string& place, const std::string& next) {
  return Error(Exit::kConfig, {.area = "CONF-20", .what = what, .place = place, .next = next});
}

void add_lines(const std::string& text, std::vector<std::string>& out) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty()) out.push_back(line);
    begin = end + 1;
  }
}

// The prompts of the configuration, or the lines of "@FILE".
std::vector<std::string> prompts_of(const std::vector<std::string>& written) {
  std::vector<std::string> out;
  for (const std::string& one : written) {
    one.starts_with('@') ? add_lines(read_small_file(one.substr(1), kMostBytes), out) : out.push_back(one);
  }
  if (out.empty() && !written.empty())
    throw refusal("there is no prompt in it", written.front(), "write one on each line");
  return out;
}

// As one line of the log.
std::string in_a_line(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n')
      out += "\\n";
    else if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f)
      out += c;
  }
  return out;
}

}  // namespace

Samples::Samples(const Job& job) : job_(job) {
  const std::vector<std::string> texts = prompts_of(job.config.train.sample_prompts);
  if (texts.empty()) return;
  options_.most = job.config.train.sample_tokens;
  TextSession session(text_tools(job));
  options_.stop = session.stop();
  for (const std::string& text : texts) {
    prompts_.push_back({text, session.prompt(text)});
    const int64_t tokens = std::ssize(prompts_.back().tokens),
                  room = job.plan.cache_positions - job.model.virtual_tokens();
    if (tokens == 0 || tokens > room)
      throw refusal(
          fmt::format("a prompt of train.sample_prompts has {} tokens, and with its answer it may have {}",
                      tokens, room),
          in_a_line(text.substr(0, 60)),
          "shorten it" + std::string(room < kSamplePositions ? ", or raise data.max_length" : ""));
  }
}

void Samples::answer(Rank& rank, int64_t step, MetricsFile& metrics,
                     const std::function<bool()>& stopped) const {
  bool cut = false;
  AnswerOptions options = options_;
  options.stopped = [&] { return cut = stopped && stopped(); };
  if (empty() || options.stopped()) return;
  rank.decoder().forget();  // the weights have changed since the last time
  std::optional<TextSession> session;
  if (rank.group().rank() == 0) session.emplace(text_tools(job_));
  for (const SamplePrompt& prompt : prompts_) {
    const Answer answer = answer_prompt(rank, prompt.tokens, options);
    if (cut) return;
    if (!session) continue;
    session->begin_answer();
    std::string text;
    for (const int32_t token : answer.tokens) text += session->next(token);
    text += session->end_answer();
    metrics.write_sample(step, prompt.text, text);
    log_line(fmt::format("sample after step {}: {} => {}", step, in_a_line(prompt.text), in_a_line(text)));
  }
}

}  // namespace lm
