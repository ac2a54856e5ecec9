#include "launcher/score_model.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "spec/score_head.h"

namespace lm {
namespace {

Json read_object(const std::string& path) {
  std::error_code absent;
  if (!std::filesystem::exists(path, absent)) return Json::object();
  Json json = read_json_file(path, {.bytes = int64_t{32} << 20, .depth = 32});
  return json.is_object() ? json : Json::object();
}

// The id of the tokenizer's padding token; -1 if its files do not tell.
int64_t padding_of_tokenizer(const std::string& directory) {
  const Json config = read_object(directory + "/tokenizer_config.json");
  const auto pad = config.find("pad_token"), added = config.find("added_tokens_decoder");
  if (pad == config.end() || added == config.end() || !added->is_object()) return -1;
  const Json text = pad->is_object() && pad->contains("content") ? (*pad)["content"] : *pad;
  for (const auto& [id, token] : added->items()) {
    if (token.is_object() && token.contains("content") && token["content"] == text && id.size() < 10)
      return std::atoll(id.c_str());
  }
  return -1;
}

// What transformers needs to find a text's last token: the model's padding token, its tokenizer's, or the end
// token.
int64_t padding_token(const std::string& directory, const ModelSpec& spec) {
  if (spec.pad_token >= 0 || directory.empty()) return spec.pad_token;
  int64_t token = padding_of_tokenizer(directory);
  const Json config = read_object(directory + "/config.json");
  if (const auto eos = config.find("eos_token_id"); token < 0 && eos != config.end()) {
    const Json& first = eos->is_array() && !eos->empty() ? eos->front() : *eos;
    if (first.is_number_integer()) token = first.get<int64_t>();
  }
  return token < spec.vocab ? token : -1;
}

LabelProblem problem_of(LabelProblem asked, size_t labels) {
  if (asked != LabelProblem::kAuto) return asked;
  return labels == 1 ? LabelProblem::kRegression : LabelProblem::kSingleLabel;
}

// Of files that have a head. Its names may be replaced, and its rows not.
ScoreHead continued(const Config& config, const std::string& place, ScoreHead head) {
  const std::vector<std::string>& names = config.train.labels;
  const bool reward = config.train.objective == ObjectiveChoice::kReward;
  const size_t wanted = reward ? 1 : names.empty() ? head.labels.size() : names.size();
  if (wanted != head.labels.size()) {
    throw setting_error(fmt::format("the model's head has {} labels, and {} needs {}", head.labels.size(),
                                    reward ? "train.objective = \"reward\"" : "train.labels", wanted),
                        place,
                        reward ? "train a base model, or one with one label"
                               : "leave train.labels out, or name as many labels as the model has");
  }
  if (!names.empty()) head.labels = names;
  if (config.train.problem != LabelProblem::kAuto) head.problem = config.train.problem;
  return head;
}

ScoreHead fresh(const Config& config, const std::string& place) {
  ScoreHead head{.labels = config.train.labels, .fresh = true};
  if (config.train.objective == ObjectiveChoice::kReward) head.labels = {"LABEL_0"};
  if (head.labels.empty()) {
    throw setting_error(
        "train.objective = \"classify\" needs the labels' names, and the model's files have none", place,
        "set train.labels = [\"negative\", \"positive\"]; one name: regression");
  }
  head.problem = problem_of(config.train.problem, head.labels.size());
  return head;
}

}  // namespace

void settle_scores(const Config& config, const std::string& directory, ModelSpec& spec) {
  const std::string& place = config.model.path;
  if (!trains_scores(config)) {
    if (!spec.scores()) return;
    throw setting_error(
        "the model has a head of scores (" + spec.architecture +
            "), and train.objective = \"sft\" trains a "
            "vocabulary head",
        place, "set train.objective = \"classify\" or \"reward\", or use the model that writes text");
  }
  ScoreHead head = spec.scores() ? continued(config, place, spec.score) : fresh(config, place);
  head.pad_token = padding_token(directory, spec);
  if (!head.fresh) {
    spec.score.labels = head.labels;
    spec.score.problem = head.problem;
    spec.score.pad_token = head.pad_token;
    return;
  }
  set_score_head(spec, std::move(head), place);
}

void refuse_scores(const ModelSpec& spec, bool adapter, const std::string& place) {
  if (!spec.scores() && !adapter) return;
  const std::string what = spec.scores() ? "model has a head of scores (" + spec.architecture + ")"
                                         : "adapter has a head of scores";
  throw setting_error(
      "the " + what + ", and writes no text", place,
      "`lmlaunch eval` gives its accuracy on data; generate, chat and serve need a model with a "
      "vocabulary head");
}

}  // namespace lm
