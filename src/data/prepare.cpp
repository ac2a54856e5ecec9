#include "data/prepare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "config/config_names.h"
#include "data/content_key.h"
#include "data/prepare_request.h"
#include "data/python.h"

namespace lm {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr auto kForgotten = std::chrono::hours(7 * 24);  // unfinished files
constexpr auto kUnused = std::chrono::hours(90 * 24);    // tokens that no run has used since

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

// Created for this user only: the caches contain the training text.
std::string make_cache_dir(const std::string& wanted) {
  std::string dir = wanted;
  if (dir.empty()) {
    const passwd* user = ::getpwuid(::getuid());
    dir = std::string(user != nullptr ? user->pw_dir : ".") + "/.cache/lmlaunch/tokens";
  }
  std::error_code error;
  const bool made = fs::create_directories(dir, error);
  if (error)
    refuse(Exit::kIo, "cannot make the cache directory: " + error.message(), dir, "set data.cache_dir");
  if (made) ::chmod(dir.c_str(), 0700);
  return dir;
}

bool exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Held while a cache is written, so that one of several runs tokenizes and the others wait for it.
class CacheLock {
 public:
  CacheLock(const std::string& path, const std::function<bool()>& stopped) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0)
      refuse(Exit::kIo, std::string("cannot make the lock: ") + std::strerror(errno), path,
             "set data.cache_dir");
    for (bool told = false; ::flock(fd_, LOCK_EX | LOCK_NB) != 0; told = true) {
      if (!told) log_note("DATA-24", "another run is tokenising the same data; waiting for it");
      ::usleep(100000);
      if (stopped && stopped()) {
        ::close(fd_);
        refuse(Exit::kStopped, "stopped while waiting for another run's tokens", path, "start again");
      }
    }
  }
  ~CacheLock() { ::close(fd_); }
  CacheLock(const CacheLock&) = delete;
  CacheLock& operator=(const CacheLock&) = delete;

 private:
  int fd_;
};

void run_python(const PrepareOptions& options, const std::vector<std::string>& files, const std::string& out,
                const ContentKey& key) {
  const std::string program = options.program_dir + "/prepare.py";
  if (!exists(program)) refuse(Exit::kInternal, "the data program is not installed", program, "build again");
  Json request = prepare_request(options, files);
  request.update({{"out", out}, {"key", to_hex(key)}});
  ask_python(options.python, program, request, options.stopped);
}

// Of a summary: [right, characters of each ending], ...; in all as many endings as there are examples.
std::vector<ChoiceGroup> groups_of(const Json& rows, int64_t examples) {
  std::vector<ChoiceGroup> groups;
  int64_t endings = 0;
  for (const Json& row : rows) {
    auto numbers = row.get<std::vector<int32_t>>();
    if (numbers.size() < 3) throw std::out_of_range("a row of choices without endings");
    const int32_t right = numbers.front();
    numbers.erase(numbers.begin());
    const auto least = std::ranges::min(numbers);
    if (right < 0 || right >= std::ssize(numbers) || least < 1)
      throw std::out_of_range("a row of choices whose right ending is none");
    endings += std::ssize(numbers);
    groups.push_back({right, std::move(numbers)});
  }
  if (!groups.empty() && endings != examples) throw std::out_of_range("its number of endings");
  return groups;
}

// Of a summary: equally many numbers of each example, or none.
std::vector<float> labels_of(const Json& summary, int64_t examples) {
  std::vector<float> labels = summary.value("labels", Json::array()).get<std::vector<float>>();
  if (!labels.empty() && (examples == 0 || std::ssize(labels) % examples != 0))
    throw std::out_of_range("its number of labels");
  return labels;
}

// `counts`: the number of files of each entry of PrepareOptions::files.
Prepared describe(const TokenFile& file, bool from_cache, const std::vector<size_t>& counts) {
  Prepared prepared{.path = file.name(),
                    .from_cache = from_cache,
                    .examples = file.examples(),
                    .tokens = file.tokens(),
                    .trained_tokens = file.trained_tokens(),
                    .sample_tokens = file.examples() > 0 ? file.length(0) : 0};
  // Deeply nested JSON can be parsed, but overflows the stack when it is copied.
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > 8) throw std::length_error("nested too deeply");
    return true;
  };
  try {
    const Json summary = Json::parse(file.summary(), shallow);
    prepared.dropped = summary.at("dropped").get<int64_t>();
    prepared.notes = summary.at("notes").get<std::vector<std::string>>();
    for (const Json& range : summary.at("text"))
      prepared.text.push_back({range.at(0).get<int64_t>(), range.at(1).get<int64_t>()});
    prepared.chat_template = summary.at("chat_template").get<std::string>();
    prepared.plain_pairs = summary.at("pairs").get<int64_t>();
    prepared.choice_rows = summary.at("choices").get<int64_t>();
    prepared.groups = groups_of(summary.at("groups"), prepared.examples);
    prepared.labels = labels_of(summary, prepared.examples);
    prepared.has_template = summary.at("template").get<bool>();
    const auto of_files = summary.at("files").get<std::vector<int64_t>>();
    size_t next = 0;
    int64_t first = 0;
    for (const size_t count : counts) {
      int64_t end = first;
      for (size_t i = 0; i < count; ++i) end += of_files.at(next++);
      prepared.entries.push_back({std::exchange(first, end), end});
    }
    if (next != of_files.size() || first != prepared.examples) throw std::out_of_range("its counts of files");
    for (const Json& piece : summary.at("sample")) {
      prepared.sample.push_back({piece.at("text").get<std::string>(), piece.at("trained").get<bool>()});
    }
  } catch (const std::exception& error) {
    refuse(Exit::kInput, std::string("damaged token file: its summary: ") + error.what(), file.name(),
           "delete it");
  }
  return prepared;
}

// The cache in `path`, if it exists, is intact and has this key. With `tells` logs a damaged one, which is
// then rewritten.
std::optional<Prepared> cached(const std::string& path, const ContentKey& key,
                               const std::vector<size_t>& counts, bool tells) {
  if (!exists(path)) return std::nullopt;
  try {
    const TokenFile file(path);
    if (file.key() == key) {
      ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);  // marks it as used
      return describe(file, true, counts);
    }
    if (tells) log_warning("DATA-24", path + " belongs to other data; tokenising again");
  } catch (const Error& error) {
    if (tells) log_warning(error.text().area, std::string(error.what()) + "; tokenising again");
  }
  return std::nullopt;
}

// Removes the files from which an interrupted preparation would resume; token_file.py has their names.
void remove_unfinished(const std::string& temporary) {
  for (const char* suffix : {"", ".marks", ".offsets", ".state", ".state.new"})
    ::unlink((temporary + suffix).c_str());
}

// "0123456789abcdef0123456789abcdef.tokens": a token file of ours.
bool names_tokens(const std::string& name) {
  const bool long_enough = name.size() == 2 * sizeof(ContentKey) + 7;
  return long_enough && name.ends_with(".tokens") &&
         name.find_first_not_of("0123456789abcdef") == name.size() - 7;
}

// Removes preparations interrupted over a week ago, and tokens unused for three months. They can be rebuilt;
// a current reader has them open.
void remove_forgotten(const std::string& dir) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(dir, ignored)) {
    const std::string name = entry.path().filename().string();
    const bool whole = names_tokens(name);
    if (!whole && !name.ends_with(".tokens.tmp")) continue;
    const auto age = fs::file_time_type::clock::now() - entry.last_write_time(ignored);
    if (whole && age > kUnused) fs::remove(entry.path(), ignored);
    if (whole) continue;
    const int lock =
        ::open((dir + "/" + name.substr(0, name.size() - 11) + ".lock").c_str(), O_RDWR | O_CLOEXEC);
    if (age > kForgotten && (lock < 0 || ::flock(lock, LOCK_EX | LOCK_NB) == 0))
      remove_unfinished(entry.path());
    if (lock >= 0) ::close(lock);
  }
}

// The expanded PrepareOptions::files, and the number of files of each entry.
struct DataFiles {
  std::vector<std::string> files;
  std::vector<size_t> counts;
};

DataFiles data_files(const PrepareOptions& options) {
  DataFiles out;
  for (const std::string& entry : options.files) {
    const std::vector<std::string> found = expand_files({entry}, options.caches);
    out.files.insert(out.files.end(), found.begin(), found.end());
    out.counts.push_back(found.size());
  }
  if (out.files.empty()) expand_files({});  // refuses
  return out;
}

std::string token_path(const std::string& dir, const ContentKey& key) {
  return dir + "/" + to_hex(key) + ".tokens";
}

Prepared prepare_quietly(const PrepareOptions& options) {
  const auto [files, counts] = data_files(options);
  const std::string dir = make_cache_dir(options.cache_dir);
  ContentHasher hasher(dir + "/hashes");
  const ContentKey key = token_key(options, files, hasher);
  hasher.save();
  const std::string path = token_path(dir, key);
  if (auto found = cached(path, key, counts, false)) return *found;

  const CacheLock lock(dir + "/" + to_hex(key) + ".lock", options.stopped);
  if (auto found = cached(path, key, counts, true)) return *found;  // written while we waited
  const std::string temporary = path + ".tmp";                      // exclusive: we hold the lock
  remove_forgotten(dir);
  try {
    run_python(options, files, temporary, key);
    const Prepared prepared = describe(TokenFile(temporary), false, counts);
    if (prepared.examples == 0) {
      refuse(Exit::kInput, fmt::format("not one token is a training target in {} examples", prepared.dropped),
             names_of(options.files), "check the format of the data and data.loss_on");
    }
  } catch (const Error& error) {
    if (error.code() != Exit::kStopped && error.text().kept.empty()) remove_unfinished(temporary);
    throw;
  } catch (...) {
    remove_unfinished(temporary);
    throw;
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    refuse(Exit::kIo, std::string("cannot publish the token cache: ") + std::strerror(errno), path,
           "check data.cache_dir");
  }
  sync_directory(dir);  // Python has synced the file; a run that resumes from a checkpoint needs both
  return describe(TokenFile(path), false, counts);
}

}  // namespace

// Not cached: "auto" and "plain" share their tokens.
std::string note_on_rendering(const Prepared& prepared, Render render) {
  if (render != Render::kAuto) {
    if (prepared.plain_pairs > 0) return "";
    return fmt::format("data.render = \"{}\" changes nothing: no row is a plain prompt and completion{}",
                       name_of(render),
                       render == Render::kPlain && prepared.has_template
                           ? "; but generate and samples then write their prompts without the chat template"
                           : "");
  }
  if (prepared.plain_pairs == 0 || !prepared.has_template) return "";
  return fmt::format(
      "{} {} a plain prompt and completion, and trained as plain text, without the model's chat template, "
      "which "
      "generate, chat and samples use: set data.render = \"chat\" to train them by the template, or "
      "\"plain\" to prompt without it as well",
      prepared.plain_pairs, prepared.plain_pairs == 1 ? "row is" : "rows are");
}

Prepared prepare_tokens(const PrepareOptions& options) {
  Prepared prepared = prepare_quietly(options);
  const std::string note = note_on_rendering(prepared, options.render);
  if (!note.empty()) prepared.notes.push_back(note);
  return prepared;
}

std::optional<Prepared> find_tokens(const PrepareOptions& options) {
  if (options.cache_dir.empty()) return std::nullopt;  // no home directory: a run decides on a place
  try {
    const auto [files, counts] = data_files(options);
    ContentHasher hasher(options.cache_dir + "/hashes");
    if (!std::ranges::all_of(files, [&](const std::string& file) { return hasher.knows(file); }))
      return std::nullopt;
    const ContentKey key = token_key(options, files, hasher);
    return cached(token_path(options.cache_dir, key), key, counts, false);
  } catch (const Error&) {  // a missing file, or anything else that a run will refuse
    return std::nullopt;
  }
}

Prepared prepare_evaluation(PrepareOptions options) {
  options.max_rows = 0;
  options.score = options.format == DataFormat::kChoices;
  Prepared prepared = prepare_tokens(options);
  if (options.score || prepared.choice_rows == 0) return prepared;
  options.score = true;  // detected
  return prepare_tokens(options);
}

std::string names_of(const std::vector<std::string>& files) {
  constexpr size_t kNamed = 3;
  std::string out;
  for (size_t i = 0; i < std::min(files.size(), kNamed); ++i) out += (i == 0 ? "" : ", ") + files[i];
  return files.size() <= kNamed ? out : out + fmt::format(" and {} more", files.size() - kNamed);
}

}  // namespace lm
