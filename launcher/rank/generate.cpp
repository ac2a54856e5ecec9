#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "data/prompts.h"
#include "launcher/rank/rank_commands.h"
#include "launcher/rank/speaker.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 128;

void print_json(nlohmann::ordered_json json, const Speaker::Spoken& answer, size_t prompt_tokens) {
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

// Every row's object with its answer, in the order of the file. Row n is sampled with --seed + n, and its
// answer does not depend on the rows before it.
Exit answer_file(const CommandLine& line) {
  AnswerOptions options = options_of(line);
  const std::string system = line.value("--system").value_or("");
  const std::vector<AskedPrompt> asked = read_prompts(*line.value("--prompts"), system);
  Speaker speaker(line);
  std::vector<std::vector<int32_t>> prompts;
  int64_t longest = 0;
  for (const AskedPrompt& one : asked) {
    prompts.push_back(one.messages.empty() ? speaker.text().prompt(one.text, system)
                                           : speaker.text().conversation(one.messages));
    refuse_empty(prompts.back(), one.place);
    longest = std::max(longest, static_cast<int64_t>(std::ssize(prompts.back())));
  }
  speaker.load(longest + options.most);
  for (size_t i = 0; i < asked.size(); ++i) {
    speaker.forget();
    const auto answer = speaker.answer(prompts[i], options, [](const std::string&) {});
    print_json(nlohmann::ordered_json(asked[i].row), answer, prompts[i].size());
    ++options.sampling.seed;
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
  Speaker speaker(line);
  const std::vector<int32_t> prompt = speaker.text().prompt(*text, line.value("--system").value_or(""));
  refuse_empty(prompt, *text);
  speaker.load(std::ssize(prompt) + options.most);
  const bool json = line.has("--json");
  const auto answer = speaker.answer(prompt, options, [json](const std::string& piece) {
    if (json) return;
    std::fputs(piece.c_str(), stdout);
    std::fflush(stdout);
  });
  json ? print_json({}, answer, prompt.size()) : static_cast<void>(std::printf("\n"));
  return Exit::kDone;
}

}  // namespace lm
