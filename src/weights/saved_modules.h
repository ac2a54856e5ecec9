// What PEFT's adapter_config.json says of the model's own tensors: modules_to_save, which were trained whole
// beside the adapter, and trainable_token_indices, rows of the embedding. The texts are untrusted; errors are
// Error(11) with the key's name.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "spec/model_spec.h"

namespace lm {

// Their paths in the base, as AdapterSpec::also has them; a head of scores is not among them. PEFT takes each
// module whose path ends with an entry. Refused: what is no embedding, head or norm, and of a tied model
// what would leave its two uses of the matrix different. `place` names the file.
std::vector<std::string> read_saved_modules(const Json& config, const ModelSpec& base,
                                            const std::string& place);

// trainable_token_indices as AdapterSpec::tokens has them: a list, or that of the embedding by its name; of a
// tied model the head may be named with the same rows.
std::vector<int64_t> read_token_indices(const Json& config, const ModelSpec& base, const std::string& place);

// The entries that choose these paths, and nothing else of the base. `wrapped`: it is inside another model.
// Of a tied model PEFT shares an embedding that is called "embed_tokens" with the head (`ensures_tying`); of
// others both are named. Either way it reads the head's copy from the file (`copies_head`).
struct SavedModules {
  std::vector<std::string> entries;
  bool ensures_tying = false;
  bool copies_head = false;
};
SavedModules saved_modules(const ModelSpec& base, const std::vector<std::string>& also);

}  // namespace lm
