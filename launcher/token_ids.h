// The numbers of the tokens that lora.tokens names. Reads the model's tokenizer.json where one is named by
// its text. Throws Error(10) for a token that the tokenizer or the model does not have.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "spec/model_spec.h"

namespace lm {

struct NewToken {
  std::string text;
  int64_t id = 0;
};

// In the order of `names`. `directory`: of the tokenizer; "": it is not here, and only numbers are known.
// `added`: tokens that it is given beside its own.
std::vector<int64_t> token_ids(const std::vector<TokenName>& names, const ModelSpec& model,
                               const std::string& directory, const std::vector<NewToken>& added);

}  // namespace lm
