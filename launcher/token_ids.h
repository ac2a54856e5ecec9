// The numbers of the tokens that lora.tokens names. Reads the model's tokenizer.json where one is named by
// its text. Throws Error(10) for a token that the tokenizer or the model does not have.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "spec/model_spec.h"

namespace lm {

// In the order of `names`. `directory`: the model's; "": it is not here, and only numbers are known.
std::vector<int64_t> token_ids(const std::vector<TokenName>& names, const ModelSpec& model,
                               const std::string& directory);

}  // namespace lm
