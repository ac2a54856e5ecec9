#include "launcher/token_ids.h"

#include <fmt/format.h>
#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "config/config_text.h"

namespace lm {
namespace {

constexpr JsonLimits kLimits = {.bytes = int64_t{256} << 20, .depth = 32};

Error tokens_error(std::string what, std::string place, std::string next) {
  return Error(Exit::kConfig, {.area = "CONF-20",
                               .what = "lora.tokens: " + std::move(what),
                               .place = std::move(place),
                               .next = std::move(next),
                               .kept = "nothing was started or written"});
}

// tokenizer.json, of which only the vocabulary and the added tokens are read.
class Vocabulary {
 public:
  explicit Vocabulary(const std::string& directory) : path_(directory + "/tokenizer.json") {
    std::error_code ignored;
    if (directory.empty() || !std::filesystem::exists(path_, ignored))
      throw tokens_error("a token is named by its text, and the model has no tokenizer.json", path_,
                         "name tokens by their numbers, such as lora.tokens = [128011]");
    whole_ = read_json_file(path_, kLimits);
  }

  int64_t id_of(const std::string& text) const {
    std::optional<int64_t> id = added(text);
    if (!id) id = in_model(text);
    if (id) return *id;
    throw tokens_error(
        "the tokenizer has no token " + quote(text.substr(0, 100)), path_,
        "name a token that it has, such as one of its reserved ones; a new one is added with transformers "
        "(tokenizer.add_tokens and model.resize_token_embeddings), which writes another model.path");
  }

 private:
  static const Json* member(const Json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    const auto it = object.find(key);
    return it == object.end() ? nullptr : &*it;
  }
  static std::optional<int64_t> number(const Json* value) {
    if (value == nullptr || !value->is_number_integer()) return std::nullopt;
    return value->get<int64_t>();
  }
  std::optional<int64_t> added(const std::string& text) const {
    const Json* const list = member(whole_, "added_tokens");
    if (list == nullptr || !list->is_array()) return std::nullopt;
    for (const Json& one : *list) {
      const Json* const content = member(one, "content");
      if (content != nullptr && *content == text) return number(member(one, "id"));
    }
    return std::nullopt;
  }
  // BPE and WordPiece have numbers by text, Unigram a list of texts with scores.
  std::optional<int64_t> in_model(const std::string& text) const {
    const Json* const model = member(whole_, "model");
    const Json* const vocab = model == nullptr ? nullptr : member(*model, "vocab");
    if (vocab == nullptr) return std::nullopt;
    if (vocab->is_object()) return number(member(*vocab, text.c_str()));
    if (!vocab->is_array()) return std::nullopt;
    for (size_t i = 0; i < vocab->size(); ++i) {
      const Json& piece = (*vocab)[i];
      if (piece.is_array() && !piece.empty() && piece[0] == text) return static_cast<int64_t>(i);
    }
    return std::nullopt;
  }

  std::string path_;
  Json whole_;
};

}  // namespace

std::vector<int64_t> token_ids(const std::vector<TokenName>& names, const ModelSpec& model,
                               const std::string& directory) {
  std::optional<Vocabulary> vocabulary;
  std::vector<int64_t> out;
  for (const TokenName& name : names) {
    if (name.id < 0 && !vocabulary) vocabulary.emplace(directory);
    const int64_t id = name.id < 0 ? vocabulary->id_of(name.text) : name.id;
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
