#include "launcher/grown_model.h"

#include <fmt/format.h>
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "config/config_text.h"
#include "data/content_key.h"
#include "launcher/tokenizer_file.h"
#include "spec/families/family.h"
#include "weights/adapter_files.h"
#include "weights/loader.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr JsonLimits kConfigLimits = {.bytes = kMostConfigBytes, .depth = 32};
constexpr const char* kConfigFile = "config.json";

[[noreturn]] void refuse(const char* key, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw setting_error(std::string(key) + ": " + what, place, next);
}

// A table of layers' inputs has rows by tokens, too, and files name their number apart.
void require_one_table(const ModelSpec& spec, const std::string& place) {
  if (spec.embedding.inputs.width == 0) return;
  refuse("model.add_tokens",
         "the layers of " + spec.model_type +
             " have tables of inputs by token, which get "
             "no rows",
         place, "name tokens that its tokenizer has, such as its reserved ones");
}

int64_t first_row_like(const ModelConfig& model, const TokenizerFile& tokenizer, const ModelSpec& spec,
                       const std::string& place) {
  if (model.new_rows == "mean") return -1;
  const std::optional<int64_t> id = tokenizer.id_of(model.new_rows);
  if (id && *id >= 0 && *id < spec.vocab) return *id;
  refuse("model.new_rows", "the tokenizer has no token " + quote(model.new_rows.substr(0, 100)),
         TokenizerFile::path_in(place), "set \"mean\", or the text of a token that it has");
}

bool same_tokenizer(const std::string& a, const std::string& b) {
  std::error_code failed;
  const auto size = fs::file_size(TokenizerFile::path_in(a), failed);
  return !failed && size == fs::file_size(TokenizerFile::path_in(b), failed) && !failed;
}

// Tokens by which the adapter's tokenizer goes beyond the base's; empty: neither tells.
std::optional<std::pair<int64_t, int64_t>> more_of_tokenizer(const std::string& adapter,
                                                             const std::string& directory) {
  if (!TokenizerFile::exists(adapter) || !TokenizerFile::exists(directory)) return std::nullopt;
  if (same_tokenizer(adapter, directory)) return std::nullopt;
  const std::optional<int64_t> mine = TokenizerFile(directory).next_id(),
                               theirs = TokenizerFile(adapter).next_id();
  if (!mine || !theirs || *theirs <= *mine) return std::nullopt;
  return std::pair(*mine, *theirs);
}

void set_vocabulary(Json& config, int64_t rows) {
  const auto inner = config.find("text_config");
  const bool wrapped = inner != config.end() && inner->is_object();
  if (wrapped) (*inner)["vocab_size"] = rows;
  if (!wrapped || config.contains("vocab_size")) config["vocab_size"] = rows;
}

// Name, size and time of each file.
void add_state(const std::string& directory, std::vector<std::string>& parts) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& file : fs::directory_iterator(directory, ignored)) {
    std::error_code unknown;
    const auto size = fs::is_regular_file(file.path(), unknown) ? fs::file_size(file.path(), unknown) : 0;
    const auto time = fs::last_write_time(file.path(), unknown).time_since_epoch().count();
    files.push_back(fmt::format("{} {} {}", file.path().filename().string(), size, time));
  }
  std::ranges::sort(files);
  parts.push_back(fs::weakly_canonical(directory, ignored).string());
  std::ranges::move(files, std::back_inserter(parts));
}

std::string key_of(const GrownVocabulary& grown, const Config& config, const std::string& directory) {
  std::vector<std::string> parts = {"grown 1", config.model.init == ModelInit::kRandom ? "drawn" : "read"};
  add_state(directory, parts);
  parts.emplace_back(grown.adapter.empty() ? "made" : "of an adapter");
  if (!grown.adapter.empty()) add_state(grown.adapter, parts);
  const AddedRows& rows = grown.rows;
  parts.push_back(fmt::format("{} {} {} {}", rows.first, rows.end, rows.rows, rows.like));
  for (const NewToken& token : grown.tokens) parts.push_back(token.text);
  return to_hex(combine(parts));
}

bool holds_weights(const std::string& directory) {
  std::error_code ignored;
  return std::ranges::any_of(fs::directory_iterator(directory, ignored), [](const auto& file) {
    return file.path().filename().string().starts_with("model.safetensors");
  });
}

// All of them: a link is replaced where the directory gets a file of its own.
void link_files(const std::string& directory, const std::string& output) {
  for (const auto& file : fs::directory_iterator(fs::canonical(directory)))
    fs::create_symlink(file.path(), fs::path(output) / file.path().filename());
}

void write_config(const std::string& directory, int64_t rows, const std::string& output) {
  Json config = read_json_file(directory + "/" + kConfigFile, kConfigLimits);
  if (config.is_object()) set_vocabulary(config, rows);
  atomic_write_file(output + "/" + kConfigFile, config.dump(2) + "\n");
}

void write_tokenizer(const GrownVocabulary& grown, const std::string& directory, const std::string& output) {
  const std::string from = tokenizer_of(grown, directory);
  if (!TokenizerFile::exists(from)) return;
  TokenizerFile tokenizer(from);
  for (const NewToken& token : grown.tokens) tokenizer.add(token.text);
  tokenizer.write(output);
}

void fill_directory(const GrownVocabulary& grown, const Config& config, const std::string& directory,
                    const std::string& output) {
  link_files(directory, output);
  write_config(directory, grown.rows.rows, output);
  write_tokenizer(grown, directory, output);
  if (config.model.init == ModelInit::kRandom || !holds_weights(directory)) return;
  const ModelSpec spec = read_model_spec(directory);
  const ModelFiles base(directory);
  check_model_files(base, spec);  // rows that the model's own files lack are no new ones
  const std::string path = output + "/" + kAddedRows;
  if (grown.adapter.empty()) return write_added_rows(base, spec, grown.rows, path);
  copy_added_rows(base, ModelFiles(grown.adapter, kAdapterWeights), spec, grown.rows, path);
}

}  // namespace

std::string tokenizer_of(const std::optional<GrownVocabulary>& grown, const std::string& directory) {
  return grown && TokenizerFile::exists(grown->adapter) ? grown->adapter : directory;
}

std::optional<GrownVocabulary> grow_by_adapter(const std::string& adapter, const std::string& directory,
                                               ModelSpec& spec) {
  std::error_code absent;
  if (directory.empty() || !fs::exists(adapter + "/" + kAdapterWeights, absent)) return std::nullopt;
  const int64_t copied = rows_of_copies(ModelFiles(adapter, kAdapterWeights), spec);
  const auto more = more_of_tokenizer(adapter, directory);
  if (copied <= spec.vocab && !(more && more->second <= spec.vocab)) return std::nullopt;
  const int64_t first = more ? std::min(more->first, spec.vocab) : spec.vocab;
  const int64_t rows = std::max(copied, spec.vocab);
  require_one_table(spec, adapter);
  spec.vocab = rows;
  return GrownVocabulary{
      .tokens = {},
      .rows = {.first = first, .end = more ? std::min(more->second, rows) : rows, .rows = rows},
      .adapter = adapter};
}

std::optional<GrownVocabulary> grow_vocabulary(const Config& config, const std::string& directory,
                                               ModelSpec& spec) {
  std::optional<GrownVocabulary> grown;
  const std::string& init = config.lora.init;
  if (trains_adapter(config) && !init.empty()) grown = grow_by_adapter(init, directory, spec);
  const ModelConfig& model = config.model;
  if (model.add_tokens.empty()) return grown;
  const std::string place = tokenizer_of(grown, directory);
  if (place.empty())
    refuse("model.add_tokens",
           "the model is not on this machine, and its tokenizer tells which tokens are new", model.path,
           "download the model first");
  if (!TokenizerFile::exists(place))
    refuse("model.add_tokens", "the model has no tokenizer.json to which tokens could be added",
           TokenizerFile::path_in(place), "save its tokenizer in that form beside the weights");
  TokenizerFile tokenizer(place);
  std::vector<NewToken> added;
  const int64_t like = first_row_like(model, tokenizer, spec, place);
  for (const std::string& text : model.add_tokens) {
    if (tokenizer.id_of(text)) continue;
    const std::optional<int64_t> id = tokenizer.next_id();
    // PEFT's adapter has rows of tokens, and often no tokenizer that names them.
    const bool theirs = grown && place != grown->adapter && id && *id < grown->rows.end;
    if (!init.empty() && trains_adapter(config) && !theirs)
      refuse("model.add_tokens",
             "the adapter of lora.init is continued as it is, and was trained without a token " + quote(text),
             init, "leave model.add_tokens out, or leave out lora.init to train a fresh adapter");
    if (!id)
      refuse("model.add_tokens",
             "the tokenizer's numbers have holes, so that a new token would get one in use",
             TokenizerFile::path_in(place), "name tokens that it has, by lora.tokens");
    tokenizer.add(text);
    added.push_back({text, *id});
  }
  if (grown) grown->tokens = std::move(added);
  if (grown || added.empty()) return grown;
  require_one_table(spec, place);
  AddedRows rows{.first = std::min(added.front().id, spec.vocab), .end = added.back().id + 1, .like = like};
  rows.rows = std::max(spec.vocab, rows.end);
  spec.vocab = rows.rows;
  return GrownVocabulary{.tokens = std::move(added), .rows = rows};
}

std::string describe(const GrownVocabulary& grown, const ModelSpec& spec) {
  const AddedRows& rows = grown.rows;
  const auto like = [&] {
    if (!grown.adapter.empty()) return std::string("as the adapter has them");
    return rows.like < 0 ? "with the mean of all tokens' rows"
                         : fmt::format("with the row of token {}", rows.like);
  };
  return fmt::format("new tokens: {} to {}; the vocabulary has {} rows, and theirs begin {}", rows.first,
                     rows.end - 1, spec.vocab, like());
}

std::string grown_directory(const GrownVocabulary& grown, const Config& config, const std::string& directory,
                            const Environment& environment) {
  const std::string cache = config.data.cache_dir.empty() ? environment.token_cache() : config.data.cache_dir;
  if (cache.empty())
    refuse("model.add_tokens", "there is no cache in which the grown model's files could be", "",
           "set data.cache_dir");
  const std::string path = cache + "/models/" + key_of(grown, config, directory);
  if (fs::exists(path + "/" + kConfigFile)) return path;
  try {
    NewDirectory output(path, false);
    fill_directory(grown, config, directory, output.temporary());
    output.commit();
  } catch (const std::exception&) {
    // Another process was first.
    if (!fs::exists(path + "/" + kConfigFile)) throw;
  }
  return path;
}

}  // namespace lm
