// A head of scores in place of the vocabulary head, as transformers' classes for sequence classification have
// it: a matrix "score" [labels, H], whose products with the final norm of a text's last token are the text's
// scores. Values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/choices.h"

namespace lm {

// problem_type of config.json.
std::string_view problem_name(LabelProblem problem);

struct ScoreHead {
  std::vector<std::string> labels = {};  // their names; empty: the model has a vocabulary head
  LabelProblem problem = LabelProblem::kSingleLabel;
  // A text's scores are those of its last token that is not this one; -1: of its last token.
  int64_t pad_token = -1;
  // The model's files have no such head: it begins with random values, and the vocabulary head that they have
  // ("lm_head") is not read.
  bool fresh = false;
  std::string unread = {};
  bool operator==(const ScoreHead&) const = default;
};

struct ModelSpec;

// transformers' class for sequence classification of a model_type; "" where it has none.
std::string_view classifier_of(std::string_view model_type);

// The model gets such a head in place of its vocabulary head. Throws Error(10) if transformers has no class
// for it; `place` names the model.
void set_score_head(ModelSpec& spec, ScoreHead head, const std::string& place);

}  // namespace lm
