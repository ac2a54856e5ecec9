#include "data/content_key.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>

#include "base/bytes.h"
#include "base/error.h"
#include "base/relative.h"

namespace lm {
namespace {

constexpr int64_t kRemembered = kMiB;  // hashing smaller files is faster than a lookup
constexpr size_t kTableLines = 4096;   // the oldest are dropped first
constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& place) {
  throw Error(Exit::kInput, {.area = "DATA-24",
                             .what = what,
                             .place = place,
                             .next = "check data.train, data.eval and model.path" + relative_hint(place)});
}

ContentKey digest(XXH3_state_t* state) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
  ContentKey key;
  std::copy_n(canonical.digest, key.size(), key.begin());
  return key;
}

std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> new_state() {
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  LM_CHECK(state != nullptr, "no memory for a hash");
  XXH3_128bits_reset(state.get());
  return state;
}

ContentKey read_and_hash(int fd, const std::string& path) {
  const auto state = new_state();
  std::vector<char> buffer(kBufferBytes);
  for (;;) {
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::string("cannot read: ") + std::strerror(errno), path);
    if (got == 0) return digest(state.get());
    XXH3_128bits_update(state.get(), buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

std::vector<std::string> expand_files(const std::vector<std::string>& patterns, const DataCaches& caches) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    struct stat info {};
    if (::stat(pattern.c_str(), &info) == 0) {  // a file name may contain [ or *
      files.push_back(pattern);
      continue;
    }
    glob_t found{};
    const int status = ::glob(pattern.c_str(), GLOB_TILDE | GLOB_BRACE, nullptr, &found);
    for (size_t i = 0; status == 0 && i < found.gl_pathc; ++i) files.emplace_back(found.gl_pathv[i]);
    ::globfree(&found);
    if (status == 0) continue;
    DataSetName name;
    if (!parse_data_set_name(pattern, name)) refuse("no such data file", pattern);
    const std::vector<std::string> set = find_data_set(pattern, name, caches);
    files.insert(files.end(), set.begin(), set.end());
  }
  if (files.empty()) refuse("no data file is named", "data.train");
  for (const std::string& file : files) {
    struct stat info {};
    if (::stat(file.c_str(), &info) != 0) refuse(std::string("cannot open: ") + std::strerror(errno), file);
    if (S_ISDIR(info.st_mode))
      refuse("a directory instead of a data file (write a glob such as dir/*.jsonl)", file);
    if (!S_ISREG(info.st_mode)) refuse("not a regular file", file);
  }
  return files;
}

ContentHasher::ContentHasher(std::string table_path) : table_path_(std::move(table_path)) {
  std::ifstream table(table_path_);
  for (std::string line; std::getline(table, line) && lines_.size() < 2 * kTableLines;)
    lines_.push_back(line);
}

ContentHasher::Mark ContentHasher::mark_of(const std::string& path, const struct stat& info) {
  char absolute[PATH_MAX];
  Mark mark{
      .stamp = fmt::format("{} {} {} ", info.st_size,
                           int64_t{info.st_mtim.tv_sec} * 1000000000 + info.st_mtim.tv_nsec, info.st_ino),
      .path = ::realpath(path.c_str(), absolute) != nullptr ? absolute : path};
  // A file that changes twice within one tick of the file system's clock keeps its stamp.
  const bool settled = ::time(nullptr) - info.st_mtim.tv_sec > 2;
  mark.may_be_remembered =
      settled && info.st_size >= kRemembered && mark.path.find('\n') == std::string::npos;
  return mark;
}

std::optional<ContentKey> ContentHasher::remembered(const Mark& mark) const {
  if (!mark.may_be_remembered) return std::nullopt;
  const std::string& stamp = mark.stamp;
  const size_t hex = 2 * sizeof(ContentKey);
  for (const std::string& line : lines_) {
    if (line.size() != stamp.size() + hex + 1 + mark.path.size()) continue;
    if (line.compare(0, stamp.size(), stamp) != 0 ||
        line.compare(stamp.size() + hex + 1, mark.path.size(), mark.path) != 0)
      continue;
    ContentKey key{};
    bool good = true;
    for (size_t i = 0; i < key.size(); ++i) {
      good = good && std::sscanf(line.c_str() + stamp.size() + 2 * i, "%2hhx", &key[i]) == 1;
    }
    if (good) return key;
  }
  return std::nullopt;
}

bool ContentHasher::knows(const std::string& path) const {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return false;
  return info.st_size < kRemembered || remembered(mark_of(path, info)).has_value();
}

ContentKey ContentHasher::hash_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(std::string("cannot open: ") + std::strerror(errno), path);
  const auto close_later =
      std::unique_ptr<const int, void (*)(const int*)>(&fd, [](const int* f) { ::close(*f); });
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) refuse("not a regular file", path);
  const Mark mark = mark_of(path, info);
  if (const auto known = remembered(mark)) return *known;
  const ContentKey key = read_and_hash(fd, path);
  if (mark.may_be_remembered) {
    lines_.push_back(mark.stamp + to_hex(key) + " " + mark.path);
    changed_ = true;
  }
  return key;
}

void ContentHasher::save() const {
  if (!changed_) return;
  const std::string temporary = fmt::format("{}.tmp-{}", table_path_, ::getpid());
  {
    std::ofstream out(temporary);
    for (size_t i = lines_.size() > kTableLines ? lines_.size() - kTableLines : 0; i < lines_.size(); ++i) {
      out << lines_[i] << '\n';
    }
    if (!out.flush()) {
      ::unlink(temporary.c_str());
      return;
    }
  }
  if (::rename(temporary.c_str(), table_path_.c_str()) != 0) ::unlink(temporary.c_str());
}

ContentKey combine(const std::vector<std::string>& parts) {
  const auto state = new_state();
  for (const std::string& part : parts) {
    const uint64_t size = part.size();
    XXH3_128bits_update(state.get(), &size, sizeof size);
    XXH3_128bits_update(state.get(), part.data(), part.size());
  }
  return digest(state.get());
}

std::string to_hex(const ContentKey& key) {
  return fmt::format("{:02x}", fmt::join(key, ""));
}

}  // namespace lm
