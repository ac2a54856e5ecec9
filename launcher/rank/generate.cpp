#include <cstdio>
#include <nlohmann/json.hpp>

#include "launcher/rank/rank_commands.h"
#include "launcher/rank/speaker.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 128;

void print_json(const Speaker::Spoken& answer, size_t prompt_tokens) {
  const nlohmann::ordered_json json = {{"text", answer.text},
                                       {"tokens", answer.tokens},
                                       {"prompt_tokens", prompt_tokens},
                                       {"prompt_seconds", answer.prompt_seconds},
                                       {"seconds", answer.seconds}};
  std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

}  // namespace

Exit generate_command(const CommandLine& line) {
  const std::optional<std::string> text = line.value("--prompt");
  if (!text || text->empty()) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "generate needs --prompt TEXT",
                               .place = "the command line",
                               .next = "lmlaunch generate " + line.positional[0] + " --prompt \"...\""});
  }
  const AnswerOptions options{.most = line.integer("--max-tokens").value_or(kDefaultTokens),
                              .sampling = sampling_of(line)};
  Speaker speaker(line);
  const std::vector<int32_t> prompt = speaker.text().prompt(*text);
  if (prompt.empty()) {
    throw Error(Exit::kInput, {.area = "DATA-24",
                               .what = "the model's tokenizer makes no token of the prompt",
                               .place = *text,
                               .next = "ask something else"});
  }
  speaker.load(std::ssize(prompt) + options.most);
  const bool json = line.has("--json");
  const auto answer = speaker.answer(prompt, options, [json](const std::string& piece) {
    if (json) return;
    std::fputs(piece.c_str(), stdout);
    std::fflush(stdout);
  });
  json ? print_json(answer, prompt.size()) : static_cast<void>(std::printf("\n"));
  return Exit::kDone;
}

}  // namespace lm
