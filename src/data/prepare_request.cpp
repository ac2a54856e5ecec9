#include "data/prepare_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_names.h"
#include "data/template_date.h"

namespace lm {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kHashedEnd = kMiB;

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

// The options on rows, in the form of prepare/'s request.
Json row_options(const PrepareOptions& options) {
  Json out = {{"format", name_of(options.format)},
              {"loss_on", name_of(options.loss_on)},
              {"columns", options.columns},
              {"bad_rows", name_of(options.bad_rows)},
              {"max_rows", options.max_rows},
              {"answers", name_of(options.answers)},
              {"reasoning", name_of(options.reasoning)},
              {"render", options.render == Render::kChat ? "chat" : "plain"},
              {"score", options.score}};
  if (options.objective == ObjectiveChoice::kSft) return out;
  out["objective"] = name_of(options.objective);
  out["labels"] = options.labels;
  out["problem"] = name_of(options.problem);
  return out;
}

bool exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool asks_for_date(const PrepareOptions& options) {
  return template_asks_for_date(options.chat_template, options.model_dir);
}

// What the tokens depend on besides the data files.
std::vector<std::string> parts_of(const PrepareOptions& options, ContentHasher& hasher) {
  std::vector<std::string> parts{fmt::format("tokens {}", kTokenFileVersion), row_options(options).dump(),
                                 "ids " + std::to_string(options.vocab)};
  const auto add = [&](const std::string& name, const std::string& path) {
    parts.push_back(name + " " + (exists(path) ? to_hex(hasher.hash_file(path)) : "-"));
  };
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "generation_config.json", "chat_template.jinja"}) {
    add(name, options.model_dir + "/" + name);
  }
  for (const std::string& folder : {options.model_dir + "/additional_chat_templates", options.program_dir}) {
    std::vector<fs::path> entries;
    std::error_code absent;
    for (const auto& entry : fs::directory_iterator(folder, absent)) {
      if (entry.is_regular_file()) entries.push_back(entry.path());
    }
    std::sort(entries.begin(), entries.end());
    for (const fs::path& entry : entries) add(entry.filename(), entry);
  }
  if (!options.chat_template.empty()) {
    if (!exists(options.chat_template))
      refuse(Exit::kInput, "data.chat_template names no file", options.chat_template,
             "name a file that holds a chat template in Jinja");
    add("own template", options.chat_template);
  }
  if (asks_for_date(options)) parts.push_back("date " + options.date);
  return parts;
}

// The kind of a file follows from its suffix, so the suffix is part of the key: ".jsonl", ".jsonl.gz".
std::string kind_of(const std::string& file) {
  const fs::path name(file);
  const bool packed = name.extension() == ".gz" || name.extension() == ".zst";
  return (packed ? name.stem().extension().string() : "") + name.extension().string();
}

// A hash of the size and both ends, which overlap in a small file.
ContentKey ends_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const auto fail = [&](int error) {
    refuse(Exit::kInput, std::string("cannot read: ") + std::strerror(error), file,
           "check the file, and start again");
  };
  std::error_code absent;
  const auto size = static_cast<int64_t>(fs::file_size(file, absent));
  if (absent) fail(absent.value());
  std::string bytes(static_cast<size_t>(std::min(size, kHashedEnd)), 0);
  std::vector<std::string> parts{std::to_string(size)};
  for (const int64_t at : {int64_t{0}, size - std::ssize(bytes)}) {
    in.seekg(at);
    if (!in.read(bytes.data(), std::ssize(bytes))) fail(in.eof() ? EIO : errno);
    parts.push_back(bytes);
  }
  return combine(parts);
}

}  // namespace

Json prepare_request(const PrepareOptions& options, const std::vector<std::string>& files) {
  Json request = row_options(options);
  request.update({{"files", files},
                  {"model_dir", options.model_dir},
                  {"chat_template", options.chat_template},
                  {"workers", options.workers},
                  {"vocab", options.vocab},
                  {"date", asks_for_date(options) ? options.date : ""}});
  return request;
}

ContentKey token_key(const PrepareOptions& options, const std::vector<std::string>& files,
                     ContentHasher& hasher) {
  std::vector<std::string> parts = parts_of(options, hasher);
  for (const std::string& file : files) parts.push_back(kind_of(file) + " " + to_hex(hasher.hash_file(file)));
  return combine(parts);
}

ContentKey stream_key(const PrepareOptions& options, const std::vector<std::string>& files,
                      ContentHasher& hasher) {
  std::vector<std::string> parts = parts_of(options, hasher);
  parts.emplace_back("streamed");
  for (const std::string& file : files) parts.push_back(kind_of(file) + " " + to_hex(ends_of(file)));
  return combine(parts);
}

}  // namespace lm
