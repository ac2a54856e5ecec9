// Converts a Hugging Face tokenizer for llama.cpp: vocabulary, merges, special tokens and chat template, from
// tokenizer.json and tokenizer_config.json. llama.cpp identifies pre-tokenizers by name, so a tokenizer with
// another pre-tokenizer is refused. Throws Error(11).
#pragma once

#include <string>

#include "export/gguf.h"

namespace lm {

// `vocab`: rows of the embedding; ids without a token are named [PAD12] and never written. `chat_template`:
// "" = the directory's own. `model`: llama.cpp's name for a tokenizer of its own, which needs no other one;
// null: by tokenizer.json.
void add_tokenizer(const std::string& directory, int64_t vocab, const std::string& chat_template,
                   GgufValues& values, const char* model = nullptr);

}  // namespace lm
