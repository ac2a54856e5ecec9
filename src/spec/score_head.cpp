#include "spec/score_head.h"

#include <utility>

#include "base/error.h"
#include "spec/model_spec.h"

namespace lm {
namespace {

struct Classifier {
  std::string_view model_type, name;
};
constexpr Classifier kClassifiers[] = {
    {"arcee", "ArceeForSequenceClassification"},
    {"exaone4", "Exaone4ForSequenceClassification"},
    {"gemma", "GemmaForSequenceClassification"},
    {"gemma2", "Gemma2ForSequenceClassification"},
    {"gemma3_text", "Gemma3TextForSequenceClassification"},
    {"glm", "GlmForSequenceClassification"},
    {"glm4", "Glm4ForSequenceClassification"},
    {"gpt2", "GPT2ForSequenceClassification"},
    {"llama", "LlamaForSequenceClassification"},
    {"ministral3", "Ministral3ForSequenceClassification"},
    {"mistral", "MistralForSequenceClassification"},
    {"nemotron", "NemotronForSequenceClassification"},
    {"olmo2", "Olmo2ForSequenceClassification"},
    {"olmo3", "Olmo3ForSequenceClassification"},
    {"phi3", "Phi3ForSequenceClassification"},
    {"qwen2", "Qwen2ForSequenceClassification"},
    {"qwen3", "Qwen3ForSequenceClassification"},
    {"smollm3", "SmolLM3ForSequenceClassification"},
    {"starcoder2", "Starcoder2ForSequenceClassification"},
};

}  // namespace

std::string_view problem_name(LabelProblem problem) {
  constexpr std::string_view kNames[] = {"", "single_label_classification", "multi_label_classification",
                                         "regression"};
  return kNames[static_cast<size_t>(problem)];
}

std::string_view classifier_of(std::string_view model_type) {
  for (const Classifier& one : kClassifiers) {
    if (one.model_type == model_type) return one.name;
  }
  return "";
}

void set_score_head(ModelSpec& spec, ScoreHead head, const std::string& place) {
  const std::string_view name = spec.wrapper.empty() ? classifier_of(spec.model_type) : "";
  if (name.empty()) {
    throw setting_error(
        "train.objective = \"classify\" and \"reward\" are not supported for model_type = \"" +
            (spec.wrapper.empty() ? spec.model_type : spec.wrapper) + "\"",
        place, "use a model of another family, such as llama, qwen3 or gemma3_text");
  }
  // Those classes neither scale nor cap their scores.
  head.unread = spec.names.head;
  spec.architecture = name;
  spec.names.head = "score";
  spec.head = {};
  spec.tied = false;
  spec.score = std::move(head);
}

}  // namespace lm
