#include "launcher/tokenizer_file.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/file.h"

namespace lm {
namespace {

constexpr JsonLimits kLimits = {.bytes = int64_t{256} << 20, .depth = 32};

const Json* member(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() ? nullptr : &*it;
}

std::optional<int64_t> number(const Json* value) {
  if (value == nullptr || !value->is_number_integer()) return std::nullopt;
  return value->get<int64_t>();
}

const Json* vocabulary(const Json& whole) {
  const Json* const model = member(whole, "model");
  return model == nullptr ? nullptr : member(*model, "vocab");
}

bool is_there(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// As tokenizer.json and tokenizer_config.json have it.
Json added_token(const std::string& text) {
  return {{"content", text}, {"lstrip", false},  {"normalized", true},
          {"rstrip", false}, {"special", false}, {"single_word", false}};
}

}  // namespace

bool TokenizerFile::exists(const std::string& directory) {
  return !directory.empty() && is_there(path_in(directory));
}

TokenizerFile::TokenizerFile(const std::string& directory)
    : directory_(directory), whole_(read_json_file(path_in(directory), kLimits)) {
  if (!whole_.is_object()) fail_json("tokenizer.json must hold one object", path_in(directory), 0);
}

std::optional<int64_t> TokenizerFile::id_of(const std::string& text) const {
  const std::optional<int64_t> id = added(text);
  return id ? id : in_model(text);
}

std::optional<int64_t> TokenizerFile::added(const std::string& text) const {
  const Json* const list = member(whole_, "added_tokens");
  if (list == nullptr || !list->is_array()) return std::nullopt;
  for (const Json& one : *list) {
    const Json* const content = member(one, "content");
    if (content != nullptr && *content == text) return number(member(one, "id"));
  }
  return std::nullopt;
}

// BPE and WordPiece have numbers by text, Unigram a list of texts with scores.
std::optional<int64_t> TokenizerFile::in_model(const std::string& text) const {
  const Json* const vocab = vocabulary(whole_);
  if (vocab == nullptr) return std::nullopt;
  if (vocab->is_object()) return number(member(*vocab, text.c_str()));
  if (!vocab->is_array()) return std::nullopt;
  for (size_t i = 0; i < vocab->size(); ++i) {
    const Json& piece = (*vocab)[i];
    if (piece.is_array() && !piece.empty() && piece[0] == text) return static_cast<int64_t>(i);
  }
  return std::nullopt;
}

std::optional<int64_t> TokenizerFile::next_id() const {
  const Json* const vocab = vocabulary(whole_);
  const int64_t count = vocab == nullptr ? 0 : std::ssize(*vocab);
  int64_t last = -1, last_added = -1;
  if (vocab != nullptr && vocab->is_object()) {
    for (const auto& [text, id] : vocab->items()) last = std::max(last, number(&id).value_or(-1));
  }
  if (const Json* const list = member(whole_, "added_tokens"); list != nullptr && list->is_array()) {
    for (const Json& one : *list) last_added = std::max(last_added, number(member(one, "id")).value_or(-1));
  }
  const int64_t next = last_added >= count ? last_added + 1 : count;
  return last >= next ? std::nullopt : std::optional(next);
}

void TokenizerFile::add(const std::string& text) {
  const int64_t id = next_id().value();
  Json& list = whole_["added_tokens"];
  if (!list.is_array()) list = Json::array();
  Json token = added_token(text);
  token["id"] = id;
  list.push_back(std::move(token));
  more_[text] = id;
}

void TokenizerFile::write(const std::string& output) const {
  atomic_write_file(path_in(output), whole_.dump(2) + "\n");
  // Of transformers 4: each token with its flags, by id; and of slow tokenizers ids by text.
  const std::string config = "/tokenizer_config.json", ids = "/added_tokens.json";
  if (is_there(directory_ + config)) {
    Json json = read_json_file(directory_ + config, kLimits);
    const auto decoder = json.is_object() ? json.find("added_tokens_decoder") : json.end();
    if (json.is_object() && decoder != json.end() && decoder->is_object()) {
      for (const auto& [text, id] : more_.items())
        (*decoder)[std::to_string(id.get<int64_t>())] = added_token(text);
    }
    atomic_write_file(output + config, json.dump(2) + "\n");
  }
  if (!is_there(directory_ + ids)) return;
  Json json = read_json_file(directory_ + ids, kLimits);
  if (json.is_object()) json.update(more_);
  atomic_write_file(output + ids, json.dump(2) + "\n");
}

}  // namespace lm
