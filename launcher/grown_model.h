// A model with more tokens than its files have: those of model.add_tokens, or those of an adapter that was
// trained with more. What it becomes is decided from the tokenizer alone, so that a plan needs no weights; a
// run then makes a directory in the cache that stands for such a model: links to the model's files, the new
// config.json and tokenizer, and added_rows.safetensors (weights/added_rows.h). Everything that reads a model
// reads that directory. Values; one thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "launcher/environment.h"
#include "launcher/token_ids.h"
#include "weights/added_rows.h"

namespace lm {

struct GrownVocabulary {
  std::vector<NewToken> tokens;  // of model.add_tokens; an adapter's are in its tokenizer, if it has one
  AddedRows rows;
  std::string adapter = {};  // whose tokenizer and rows are taken; "": they are made
  bool operator==(const GrownVocabulary&) const = default;
};

// The directory of the tokenizer that the tokens of `grown` are added to: the adapter's, if it has one.
std::string tokenizer_of(const std::optional<GrownVocabulary>& grown, const std::string& directory);

// Sets the spec's vocabulary. Empty: the model has all tokens, and stays as it is. `directory`: the model's;
// "": it is not here. Throws Error(10) for tokens that cannot be added.
std::optional<GrownVocabulary> grow_vocabulary(const Config& config, const std::string& directory,
                                               ModelSpec& spec);
// The part of it that is an adapter's.
std::optional<GrownVocabulary> grow_by_adapter(const std::string& adapter, const std::string& directory,
                                               ModelSpec& spec);

// "new tokens: 128256 to 128257; the vocabulary has 128258 rows, ...", for the log.
std::string describe(const GrownVocabulary& grown, const ModelSpec& spec);

// The directory that stands for the model. It is made once, and found afterwards, by the state of the model's
// files; several processes may ask at once. Throws Error(11, 20, 21).
std::string grown_directory(const GrownVocabulary& grown, const Config& config, const std::string& directory,
                            const Environment& environment);

}  // namespace lm
