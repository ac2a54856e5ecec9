// The tokenizer of a model's directory as its files have it: tokenizer.json's vocabulary and added tokens. It
// can be given more of these, as transformers' add_tokens gives them. Owns the parsed file; one thread.
// Errors are those of base/json.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/json.h"

namespace lm {

class TokenizerFile {
 public:
  // Whether the directory has one. "" has none.
  static bool exists(const std::string& directory);
  static std::string path_in(const std::string& directory) { return directory + "/tokenizer.json"; }

  // REQUIRES: exists(directory)
  explicit TokenizerFile(const std::string& directory);

  std::optional<int64_t> id_of(const std::string& text) const;
  // The id that the tokenizers library gives the next added token; empty where the ids in use go beyond it,
  // so that it would be used twice.
  std::optional<int64_t> next_id() const;
  // One that it does not have; the library's defaults: found inside words, and shown in an answer's text.
  // REQUIRES: next_id()
  void add(const std::string& text);

  // Writes tokenizer.json, and the directory's other files that list added tokens, into `output`.
  void write(const std::string& output) const;

 private:
  std::optional<int64_t> added(const std::string& text) const;
  std::optional<int64_t> in_model(const std::string& text) const;

  std::string directory_;
  Json whole_;
  Json more_ = Json::object();  // what `add` added, by text
};

}  // namespace lm
