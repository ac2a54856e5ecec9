// A Hugging Face tokenizer as llama.cpp wants it: its words, how they are joined, its special tokens and its
// chat template, out of tokenizer.json and tokenizer_config.json. llama.cpp knows the ways of splitting text
// by name, so a tokenizer that splits in another way is refused. Throws Error(11).
#pragma once

#include <string>

#include "export/gguf.h"

namespace lm {

// `vocab`: rows of the embedding; ids without a token are named [PAD12] and never written. `chat_template`:
// "" = the directory's own.
void add_tokenizer(const std::string& directory, int64_t vocab, const std::string& chat_template,
                   GgufValues& values);

}  // namespace lm
