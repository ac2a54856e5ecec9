#include "data/hub.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/hub_snapshot.h"
#include "base/relative.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffixes[] = {".jsonl", ".ndjson", ".json",  ".parquet", ".csv",
                                          ".tsv",   ".txt",    ".arrow", ".gz",      ".zst"};
// The datasets library's synonyms of a split's name in a file's path.
const std::map<std::string, std::set<std::string>> kSplitWords = {
    {"train", {"train", "training"}},
    {"validation", {"validation", "valid", "val", "dev"}},
    {"test", {"test", "testing", "eval", "evaluation"}}};

[[noreturn]] void refuse(const std::string& what, const std::string& place, const std::string& next) {
  throw Error(Exit::kInput, {.area = "DATA-25", .what = what, .place = place, .next = next});
}

bool is_data(const std::string& file) {
  return std::ranges::any_of(kSuffixes, [&](std::string_view suffix) { return file.ends_with(suffix); });
}

std::string joined(const std::set<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

// A file of a data set: its path below the set's directory gives configuration and split.
struct Found {
  std::string path, config, split;  // "" if not in the path
};

// "train_sft" of "train_sft-00000-of-00003.parquet"; "" of other names.
std::string numbered_split(const std::string& name) {
  static const std::regex pattern(R"((\w+(\.\w+)*)-\d{5}-of-\d{5}.*)");
  std::smatch match;
  return std::regex_match(name, match, pattern) ? match[1].str() : "";
}

std::string split_of(const std::string& relative) {
  if (std::string split = numbered_split(fs::path(relative).filename().string()); !split.empty())
    return split;
  std::string word;
  std::set<std::string> words;
  for (const char c : relative + "/") {
    if (std::isalpha(static_cast<unsigned char>(c))) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else {
      words.insert(std::exchange(word, ""));
    }
  }
  for (const auto& [split, names] : kSplitWords) {
    if (std::ranges::any_of(names, [&](const std::string& name) { return words.contains(name); }))
      return split;
  }
  return "";
}

// As huggingface_hub downloads them: snapshots/REVISION/[CONFIG/]train-00000-of-00001.parquet and the like.
std::vector<Found> of_snapshot(const fs::path& repository) {
  std::error_code ignored;
  const fs::path snapshot = hub_snapshot(repository, [](const fs::path& at) { return fs::is_directory(at); });
  std::vector<Found> out;
  if (snapshot.empty()) return out;
  for (const auto& entry : fs::recursive_directory_iterator(snapshot, ignored)) {
    // Relative to the snapshot: the files are links to blobs.
    const fs::path relative = entry.path().lexically_relative(snapshot);
    const std::string name = entry.path().filename().string();
    // JSON files without a split in their name that only describe the set.
    if (!entry.is_regular_file(ignored) || !is_data(name) || name == "dataset_infos.json") continue;
    const std::string first = relative.has_parent_path() ? relative.begin()->string() : "";
    const bool folder = first.empty() || first == "data" || !split_of(first).empty();
    out.push_back({entry.path().string(), folder ? "" : first, split_of(relative.string())});
  }
  return out;
}

// "UltraChat" -> "ultra_chat": the datasets library's name of a data set's files.
std::string snake_case(const std::string& name) {
  std::string out = std::regex_replace(name, std::regex("([A-Z]+)([A-Z][a-z])"), "$1_$2");
  out = std::regex_replace(out, std::regex("([a-z0-9])([A-Z])"), "$1_$2");
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// As load_dataset leaves them: CONFIG/VERSION/HASH/NAME-train[-00000-of-00002].arrow.
std::vector<Found> of_arrow_cache(const fs::path& directory) {
  const std::string folder = directory.filename().string(),
                    prefix = folder.substr(folder.find("___") + 3) + "-";
  std::map<std::string, fs::path> newest;  // per configuration
  std::error_code ignored;
  for (auto entry = fs::recursive_directory_iterator(directory, ignored);
       entry != fs::recursive_directory_iterator(); entry.increment(ignored)) {
    if (entry->path().filename() != "dataset_info.json") continue;
    const fs::path made = entry->path().parent_path();
    const std::string config = fs::relative(made, directory, ignored).begin()->string();
    fs::path& known = newest[config];
    if (known.empty() || fs::last_write_time(made, ignored) > fs::last_write_time(known, ignored))
      known = made;
  }
  std::vector<Found> out;
  for (const auto& [config, made] : newest) {
    for (const auto& entry : fs::directory_iterator(made, ignored)) {
      const std::string name = entry.path().filename().string();
      // Skips the files of map() and filter() in the same directory.
      if (!name.ends_with(".arrow") || !name.starts_with(prefix)) continue;
      const std::string rest = name.substr(prefix.size(), name.size() - prefix.size() - 6);
      const std::string numbered = numbered_split(rest);
      out.push_back({entry.path().string(), config, numbered.empty() ? rest : numbered});
    }
  }
  return out;
}

std::vector<std::string> choose(const std::string& text, const DataSetName& name, std::vector<Found> found,
                                const std::string& place) {
  std::set<std::string> configs, splits;
  for (const Found& one : found) configs.insert(one.config);
  configs.erase("");
  if (!name.config.empty()) {
    std::erase_if(found, [&](const Found& one) { return one.config != name.config; });
    if (found.empty())
      refuse("the data set has no configuration \"" + name.config + "\"" +
                 (configs.empty() ? "" : "; it has " + joined(configs)),
             place, "write " + name.org + "/" + name.name + (configs.empty() ? "" : "/CONFIG"));
  } else if (configs.size() > 1) {
    refuse("the data set has several configurations: " + joined(configs), place,
           "name one of them: " + name.org + "/" + name.name + "/" + *configs.begin() +
               (name.split == "train" ? "" : ":" + name.split));
  }
  for (const Found& one : found) splits.insert(one.split);
  std::vector<std::string> files;
  // Without a split in any name everything is "train", as in the datasets library.
  const bool all = name.split == "train" && splits == std::set<std::string>{""};
  for (const Found& one : found) {
    if (all || one.split == name.split) files.push_back(one.path);
  }
  splits.erase("");
  if (files.empty())
    refuse("the data set has no split \"" + name.split + "\"" +
               (splits.empty() ? "" : "; it has " + joined(splits)),
           place, "write " + text.substr(0, text.find(':')) + ":SPLIT, or name its files");
  std::ranges::sort(files);
  return files;
}

}  // namespace

bool parse_data_set_name(const std::string& text, DataSetName& out) {
  const size_t colon = text.find(':');
  std::vector<std::string> parts{""};
  for (const char c : text.substr(0, colon)) {
    if (c == '/') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  if (parts.size() < 2 || parts.size() > 3 || !std::ranges::all_of(parts, plain_name) || is_data(text))
    return false;
  out = {.org = parts[0], .name = parts[1], .config = parts.size() == 3 ? parts[2] : "", .split = "train"};
  if (colon == std::string::npos) return true;
  out.split = text.substr(colon + 1);
  return plain_name(out.split);
}

std::vector<std::string> find_data_set(const std::string& text, const DataSetName& name,
                                       const DataCaches& caches) {
  std::string looked;
  const auto look = [&](const fs::path& place, auto&& list) {
    looked += (looked.empty() ? "" : ", ") + place.string();
    return list(place);
  };
  for (const std::string& cache : caches.hub) {
    const fs::path place = fs::path(cache) / ("datasets--" + name.org + "--" + name.name);
    if (auto found = look(place, of_snapshot); !found.empty()) return choose(text, name, found, place);
  }
  for (const std::string& cache : caches.datasets) {
    const fs::path place = fs::path(cache) / (name.org + "___" + snake_case(name.name));
    if (auto found = look(place, of_arrow_cache); !found.empty()) return choose(text, name, found, place);
  }
  refuse("no such file, and no data set of this name in the local caches (looked in " +
             (looked.empty() ? "nothing: HOME is not set" : looked) + ")",
         text,
         "fetch it: lmlaunch fetch " + name.org + "/" + name.name + " --data, or name files" +
             relative_hint(text));
}

}  // namespace lm
