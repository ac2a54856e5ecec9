#include "launcher/worker/answer.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace lm {

Answer answer_prompt(Rank& rank, std::span<const int32_t> prompt, const AnswerOptions& options) {
  Answer out;
  std::vector<int32_t> text(prompt.begin(), prompt.end());
  const double start = monotonic_seconds();
  while (std::ssize(out.tokens) < options.most && !(options.stopped && options.stopped())) {
    out.full = std::ssize(text) > rank.decoder().positions();
    if (out.full) break;
    const std::span<const float> logits = rank.decoder().logits(rank.step(), text);
    // Ranks that share weights must run the model equally often.
    const int32_t mine = choose_token(options.sampling, logits, std::ssize(out.tokens));
    const int32_t token = rank.group().gather("token", mine).front();
    if (out.tokens.empty()) out.prompt_seconds = monotonic_seconds() - start;
    if (std::ranges::find(options.stop, token) != options.stop.end()) break;
    out.tokens.push_back(token);
    text.push_back(token);
    if (options.on_token) options.on_token(token);
  }
  out.seconds = monotonic_seconds() - start - out.prompt_seconds;
  return out;
}

namespace {

[[noreturn]] void refuse_flag(const CommandLine& line, const std::string& what) {
  throw usage_error(what, "see `lmlaunch " + line.command + " --help`");
}

}  // namespace

Sampling sampling_of(const CommandLine& line) {
  Sampling out;
  out.temperature = line.number("--temperature").value_or(out.temperature);
  out.top_k = line.integer("--top-k").value_or(out.top_k);
  out.top_p = line.number("--top-p").value_or(out.top_p);
  out.seed = static_cast<uint64_t>(line.integer("--seed").value_or(0));
  if (out.top_p <= 0 || out.top_p > 1)
    refuse_flag(line, "--top-p: expected a share above 0 and at most 1, got " + *line.value("--top-p"));
  const bool samples = out.temperature > 0;
  for (const char* flag : {"--top-k", "--top-p", "--seed"}) {
    if (!samples && line.has(flag))
      refuse_flag(line, std::string(flag) +
                            " has no effect at temperature 0, where the likeliest token is "
                            "always taken: set --temperature as well");
  }
  return out;
}

}  // namespace lm
