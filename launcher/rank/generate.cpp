#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/process.h"
#include "data/text.h"
#include "launcher/rank/job.h"
#include "launcher/rank/rank_commands.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 128;

Batch one_document(const std::vector<int32_t>& tokens) {
  Batch batch;
  const auto n = static_cast<int32_t>(tokens.size());
  batch.token = tokens;
  for (int32_t i = 0; i < n; ++i) batch.position.push_back(i);
  batch.target.assign(tokens.size(), -1);
  batch.sample.assign(tokens.size(), 0);
  batch.document_start = {0, n};
  return batch;
}

// Greedy. The whole text goes through the model for each token: a quick look, not a server.
std::vector<int32_t> generate(Rank& rank, const Prompt& prompt, int64_t max_tokens) {
  std::vector<int32_t> text = prompt.tokens, answer;
  while (static_cast<int64_t>(answer.size()) < max_tokens) {
    const std::vector<float> logits =
        rank.step().logits(one_document(text), {static_cast<int32_t>(text.size()) - 1});
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (std::find(prompt.stop.begin(), prompt.stop.end(), best) != prompt.stop.end()) break;
    answer.push_back(best);
    text.push_back(best);
  }
  return answer;
}

}  // namespace

Exit generate_command(const CommandLine& line) {
  const std::optional<std::string> text = line.value("--prompt");
  if (!text || text->empty()) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "generate needs --prompt TEXT",
                               .place = "the command line",
                               .next = "lmlaunch generate " + line.positional[0] + " --prompt \"...\"",
                               .kept = ""});
  }
  Subject subject = open_subject(line.positional[0]);
  const int64_t max_tokens = line.integer("--max-tokens").value_or(kDefaultTokens);
  const Environment environment = read_environment();
  const std::string model = resolve_model(subject.config.model.path, environment);
  const std::filesystem::path program =
      std::filesystem::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  const TextTools tools{environment.python, program.lexically_normal().string(), model};
  const Prompt prompt = encode_prompt(tools, *text);
  // The plan is made for one text of this length.
  subject.config.data.max_length = static_cast<int64_t>(prompt.tokens.size()) + max_tokens;
  subject.config.train.global_batch = 1;
  subject.config.train.micro_batch = 1;
  const std::unique_ptr<Job> job = open_job(subject.config, line, PlanPurpose::kGenerate);
  const std::unique_ptr<Rank> rank = make_rank(*job, false);
  load_rank(*job, *rank, subject.trained);
  const std::vector<int32_t> answer = generate(*rank, prompt, max_tokens);
  const std::string written = decode_tokens(tools, answer);
  if (line.has("--json")) {
    const nlohmann::ordered_json json = {{"text", written}, {"tokens", answer}};
    std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    std::printf("%s\n", written.c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
