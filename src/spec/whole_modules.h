// Modules of a model that may be trained whole beside adapters (lora.also, PEFT's modules_to_save): the
// embeddings of tokens and positions, the head, and the norms. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spec/model_spec.h"

namespace lm {

// lora.also's words for the token embedding, the head and all norms, in every family.
inline constexpr std::string_view kAlsoEmbedding = "embed_tokens", kAlsoHead = "lm_head",
                                  kAlsoNorms = "norms";

struct WholeModule {
  std::string path;       // "model.embed_tokens"
  std::string_view word;  // of lora.also; "": it has none
};
// In the order of the blocks. A tied head is the embedding's matrix, and none of them; nor is a head of
// scores, which is trained anyway.
std::vector<WholeModule> whole_modules(const ModelSpec& spec);

// Words where all modules of a word are among `paths`, else paths; in the order of whole_modules.
std::vector<std::string> shortest_also(const ModelSpec& spec, const std::vector<std::string>& paths);

}  // namespace lm
