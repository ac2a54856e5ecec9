#include "export/gguf_tokenizer.h"

#include <fmt/format.h>
#include <algorithm>
#include <filesystem>
#include <unordered_map>

#include "base/bytes.h"
#include "base/error.h"
#include "base/json.h"

namespace lm {
namespace {

// llama.cpp's token types.
constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;
constexpr int64_t kMostTokenizer = 256 * kMiB;

// Pre-tokenizers: the regular expression in tokenizer.json, and llama.cpp's name for it.
struct Splitting {
  const char* pattern;
  const char* name;
};
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr Splitting kSplittings[] = {
    {kLlama3, "llama-bpe"},
    {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "gpt-4o"},
    {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "tekken"},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "qwen2"}};

[[noreturn]] void refuse(const std::string& what, const std::string& place) {
  throw Error(Exit::kInput,
              {.area = "FILE-26",
               .what = "llama.cpp cannot be given this tokenizer: " + what,
               .place = place,
               .next = "leave --gguf out, and convert the exported directory with llama.cpp's own "
                       "convert_hf_to_gguf.py"});
}

// What llama.cpp's converter takes for a control token, whether the tokenizer calls it special or not.
bool looks_special(const std::string& text) {
  constexpr std::string_view kNames[] = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"};
  const auto between = [&](std::string_view begin, std::string_view end) {
    return text.size() >= begin.size() + end.size() && text.starts_with(begin) && text.ends_with(end);
  };
  return std::ranges::find(kNames, text) != std::end(kNames) || between("<|", "|>") ||
         between("<\uFF5C", "\uFF5C>") || between("<unused", ">");
}

// A token that is looked for in the text itself, where blanks are blanks.
std::string with_blanks(std::string text) {
  constexpr std::string_view kBlank = "\u2581";
  for (size_t at = text.find(kBlank); at != std::string::npos; at = text.find(kBlank, at + 1))
    text.replace(at, kBlank.size(), " ");
  return text;
}

// The form of a value in messages.
std::string shown(const std::string& text) {
  return text.substr(0, 100);
}

class Tokenizer {
 public:
  Tokenizer(const std::string& directory, int64_t vocab)
      : place_(directory + "/tokenizer.json"), config_place_(directory + "/tokenizer_config.json") {
    whole_ = read_json_file(place_, {.bytes = kMostTokenizer, .depth = 32});
    if (std::filesystem::exists(config_place_))
      config_ = read_json_file(config_place_, {.bytes = kMostTokenizer, .depth = 32});
    const Json& model = at(whole_, "model");
    if (at(model, "type") != "BPE") refuse("its model is of type " + shown(at(model, "type").dump()), place_);
    read_tokens(model, vocab);
    pieces_ = model.value("byte_fallback", false);
    read_merges(model);
  }

  // `model`: of a tokenizer that llama.cpp splits and joins by its own rules; null: by the file's.
  void add_to(GgufValues& values, const char* model) const {
    values.add("tokenizer.ggml.model", std::string(model != nullptr ? model : pieces_ ? "llama" : "gpt2"));
    if (model == nullptr) values.add("tokenizer.ggml.pre", pieces_ ? "default" : splitting());
    values.add("tokenizer.ggml.tokens", tokens_);
    values.add("tokenizer.ggml.token_type", types_);
    if (pieces_) {
      values.add("tokenizer.ggml.scores", scores());
      values.add("tokenizer.ggml.add_space_prefix",
                 whole_.value("normalizer", Json()).dump().find("\"Prepend\"") != std::string::npos ||
                     prepends(at(whole_, "pre_tokenizer")));
    }
    if (!pieces_ || model != nullptr) {
      std::vector<std::string> merges;
      for (const auto& [left, right] : merges_) merges.push_back(left + " " + right);
      values.add("tokenizer.ggml.merges", merges);
    }
    for (const char* name : {"bos", "eos", "unk", "pad"}) {
      const int64_t id = special(std::string(name) + "_token");
      const std::string key = name == std::string("unk")   ? "unknown"
                              : name == std::string("pad") ? "padding"
                                                           : name;
      if (id >= 0) values.add("tokenizer.ggml." + key + "_token_id", static_cast<uint32_t>(id));
    }
    values.add("tokenizer.ggml.add_bos_token", writes_bos());
    values.add("tokenizer.ggml.add_eos_token", false);
  }

  // From tokenizer_config.json; "" if there is none.
  std::string chat_template() const {
    const auto found = config_.find("chat_template");
    if (found == config_.end()) return "";
    if (found->is_string()) return found->get<std::string>();
    for (const Json& one : found->is_array() ? *found : Json::array()) {
      if (one.value("name", "") == "default") return one.value("template", "");
    }
    return "";
  }

 private:
  const Json& at(const Json& object, const char* key) const {
    const auto found = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || found == object.end())
      refuse(std::string("it has no \"") + key + "\"", place_);
    return *found;
  }

  void read_tokens(const Json& model, int64_t vocab) {
    tokens_.resize(static_cast<size_t>(vocab));
    types_.assign(static_cast<size_t>(vocab), kUnused);
    const auto put = [&](const std::string& text, const Json& id, int32_t type) {
      const int64_t i = id.is_number_integer() ? id.get<int64_t>() : -1;
      if (i < 0 || i >= vocab)
        refuse(fmt::format("token \"{}\" has the id {}, but the model has {} tokens", shown(text),
                           shown(id.dump()), vocab),
               place_);
      tokens_[static_cast<size_t>(i)] = text;
      types_[static_cast<size_t>(i)] = type;
      ids_[text] = static_cast<int32_t>(i);
    };
    const std::string unknown = model.contains("unk_token") && model["unk_token"].is_string()
                                    ? model["unk_token"].get<std::string>()
                                    : "";
    for (const auto& [text, id] : at(model, "vocab").items()) {
      const bool byte = text.size() == 6 && text.starts_with("<0x") && text.ends_with('>');
      put(text, id, !unknown.empty() && text == unknown ? kUnknown : byte ? kByte : kNormal);
    }
    for (const Json& added : whole_.value("added_tokens", Json::array())) {
      const std::string text = added.value("content", "");
      if (text == unknown && !unknown.empty()) continue;
      const bool control = added.value("special", false) || looks_special(text);
      put(text, at(added, "id"), control ? kControl : kUserDefined);
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (types_[i] == kUnused) tokens_[i] = fmt::format("[PAD{}]", i);
      if (types_[i] == kUserDefined) tokens_[i] = with_blanks(tokens_[i]);
    }
  }

  // Merges are pairs, or in older files "left right".
  void read_merges(const Json& model) {
    for (const Json& merge : at(model, "merges")) {
      if (merge.is_array() && merge.size() == 2) {
        merges_.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      } else {
        const std::string text = merge.is_string() ? merge.get<std::string>() : "";
        const size_t blank = text.find(' ', 1);
        if (blank == std::string::npos) refuse("a merge is " + shown(merge.dump()), place_);
        merges_.emplace_back(text.substr(0, blank), text.substr(blank + 1));
      }
    }
  }

  // Earlier merges get higher scores, so that llama.cpp merges in the same order.
  std::vector<float> scores() const {
    std::vector<float> out(tokens_.size(), 0);
    float next = 0;
    for (const auto& [left, right] : merges_) {
      const auto found = ids_.find(left + right);
      if (found != ids_.end() && out[static_cast<size_t>(found->second)] == 0)
        out[static_cast<size_t>(found->second)] = next;
      next -= 1;
      // Characters and bytes, which are not merged, keep 0; the first merge must differ.
      if (found != ids_.end() && out[static_cast<size_t>(found->second)] == 0)
        out[static_cast<size_t>(found->second)] = -0.5F;
    }
    return out;
  }

  static bool prepends(const Json& splitter) {
    if (!splitter.is_object()) return false;
    for (const Json& one : splitter.value("pretokenizers", Json::array())) {
      if (prepends(one)) return true;
    }
    return splitter.value("type", "") == "Metaspace" && splitter.value("prepend_scheme", "always") != "never";
  }

  std::string splitting() const {
    const Json& whole = at(whole_, "pre_tokenizer");
    std::vector<Json> steps;
    if (whole.is_object() && whole.value("type", "") == "Sequence") {
      for (const Json& step : at(whole, "pretokenizers")) steps.push_back(step);
    } else {
      steps.push_back(whole);
    }
    const auto type = [&](size_t i) { return steps[i].is_object() ? steps[i].value("type", "") : ""; };
    const auto bytes = [&](size_t i, bool regex) {
      return type(i) == "ByteLevel" && steps[i].value("use_regex", true) == regex &&
             !steps[i].value("add_prefix_space", true);
    };
    if (steps.size() == 1 && bytes(0, true)) return "gpt-2";
    if (steps.size() == 2 && type(0) == "Digits" && steps[0].value("individual_digits", false) &&
        bytes(1, true))
      return "smollm";
    if (steps.size() == 2 && type(0) == "Split" && bytes(1, false) &&
        steps[0].value("behavior", "") == "Isolated" && steps[0].contains("pattern")) {
      const std::string pattern = steps[0]["pattern"].value("Regex", "");
      // llama-bpe takes words that are tokens as they are; dbrx is the same but for that.
      if (pattern == kLlama3 && !at(whole_, "model").value("ignore_merges", false)) return "dbrx";
      for (const Splitting& known : kSplittings) {
        if (pattern == known.pattern) return known.name;
      }
    }
    refuse("its pre-tokenizer has no name there (" + whole.dump().substr(0, 200) + ")", place_);
  }

  // The id of "eos_token" and the like; -1: none.
  int64_t special(const std::string& key) const {
    const auto found = config_.find(key);
    if (found == config_.end()) return -1;
    const std::string text = found->is_object()   ? found->value("content", "")
                             : found->is_string() ? found->get<std::string>()
                                                  : "";
    const auto id = ids_.find(text);
    return id == ids_.end() ? -1 : id->second;
  }

  // Whether the tokenizer prepends the BOS token to plain text, by the template of its post-processor.
  bool writes_bos() const {
    const auto found = whole_.find("post_processor");
    const int64_t bos = special("bos_token");
    return found != whole_.end() && bos >= 0 && begins_with(*found, tokens_[static_cast<size_t>(bos)]);
  }
  static bool begins_with(const Json& processor, const std::string& token) {
    if (!processor.is_object()) return false;
    for (const Json& one : processor.value("processors", Json::array())) {
      if (begins_with(one, token)) return true;
    }
    const Json single = processor.value("single", Json::array());
    return !single.empty() && single[0].contains("SpecialToken") &&
           single[0]["SpecialToken"].value("id", "") == token;
  }

  std::string place_, config_place_;
  Json whole_, config_ = Json::object();
  std::vector<std::string> tokens_;
  std::vector<int32_t> types_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<std::pair<std::string, std::string>> merges_;
  bool pieces_ = false;  // SentencePiece style: blanks are part of words, bytes are tokens
};

}  // namespace

void add_tokenizer(const std::string& directory, int64_t vocab, const std::string& chat_template,
                   GgufValues& values, const char* model) {
  const std::string own = directory + "/chat_template.jinja";
  try {
    const Tokenizer tokenizer(directory, vocab);
    tokenizer.add_to(values, model);
    std::string text = chat_template;
    if (text.empty() && std::filesystem::exists(own)) text = read_small_file(own, kMiB);
    if (text.empty()) text = tokenizer.chat_template();
    if (!text.empty()) values.add("tokenizer.chat_template", text);
  } catch (const nlohmann::json::exception& error) {  // a value of an unexpected type
    refuse(json_reason(error), directory + "/tokenizer.json");
  }
}

}  // namespace lm
