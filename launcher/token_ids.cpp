#include "launcher/token_ids.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "config/config_text.h"
#include "launcher/tokenizer_file.h"

namespace lm {
namespace {

Error tokens_error(std::string what, std::string place, std::string next) {
  return setting_error("lora.tokens: " + std::move(what), std::move(place), std::move(next));
}

TokenizerFile open_tokenizer(const std::string& directory) {
  if (!TokenizerFile::exists(directory))
    throw tokens_error("a token is named by its text, and the model has no tokenizer.json",
                       TokenizerFile::path_in(directory),
                       "name tokens by their numbers, such as lora.tokens = [128011]");
  return TokenizerFile(directory);
}

}  // namespace

std::vector<int64_t> token_ids(const std::vector<TokenName>& names, const ModelSpec& model,
                               const std::string& directory, const std::vector<NewToken>& added) {
  std::optional<TokenizerFile> tokenizer;
  const auto id_of = [&](const std::string& text) {
    const auto fresh = std::ranges::find(added, text, &NewToken::text);
    if (fresh != added.end()) return fresh->id;
    if (!tokenizer) tokenizer.emplace(open_tokenizer(directory));
    if (const std::optional<int64_t> id = tokenizer->id_of(text)) return *id;
    throw tokens_error("the tokenizer has no token " + quote(text.substr(0, 100)),
                       TokenizerFile::path_in(directory),
                       "name a token that it has, such as one of its reserved ones, or add this one: "
                       "model.add_tokens = [" +
                           quote(text.substr(0, 100)) + "]");
  };
  std::vector<int64_t> out;
  for (const TokenName& name : names) {
    const int64_t id = name.id < 0 ? id_of(name.text) : name.id;
    if (id < 0 || id >= model.vocab)
      throw tokens_error(fmt::format("{} is token {}, and the model's embedding has {} rows",
                                     value_text(name), id, model.vocab),
                         "", "name tokens below that number");
    if (std::find(out.begin(), out.end(), id) != out.end())
      throw tokens_error(fmt::format("{} is token {}, which is named twice", value_text(name), id), "",
                         "name it once");
    out.push_back(id);
  }
  return out;
}

}  // namespace lm
