// What the fuzz targets share: what counts as a finding, and files in memory for parsers that want a path.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace lm::fuzz {

// Ends the process, which is a finding.
inline void require(bool holds) {
  if (!holds) std::abort();
}

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// What `parser` gives. It refuses what it does not accept with this exit code and in few words, whatever
// stands in the file; then there is nothing. Any other exception is a finding, and so is any of what is done
// with the result.
template <class Parser>
auto parse(Exit refusal, const Parser& parser) -> std::optional<decltype(parser())> {
  try {
    return parser();
  } catch (const Error& error) {
    require(error.code() == refusal && error.report().size() <= 32768);
    return std::nullopt;
  }
}

// Takes what stands before the first byte 0xFF off `rest`: no text in UTF-8 has such a byte, so it separates
// the texts of one input.
inline std::string_view next_text(std::string_view& rest) {
  const std::string_view text = rest.substr(0, rest.find('\xFF'));
  rest.remove_prefix(std::min(rest.size(), text.size() + 1));
  return text;
}

class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { require(fd_ >= 0); }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // The file has these parts, one after another, and then zeros, which take no memory.
  void set(std::initializer_list<std::string_view> parts, int64_t zeros = 0) {
    require(ftruncate(fd_, 0) == 0);
    int64_t size = 0;
    for (const std::string_view part : parts) {
      require(pwrite(fd_, part.data(), part.size(), size) == std::ssize(part));
      size += std::ssize(part);
    }
    require(ftruncate(fd_, size + zeros) == 0);
  }
  // A safetensors file with this header.
  void set_safetensors(std::string_view header, int64_t data_bytes) {
    const uint64_t length = header.size();
    set({{reinterpret_cast<const char*>(&length), sizeof length}, header}, data_bytes);
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

// A directory whose files are links, as in the hub's cache.
class Directory {
 public:
  Directory() : path_((std::filesystem::temp_directory_path() / "lmlaunch-fuzz-XXXXXX").string()) {
    require(mkdtemp(path_.data()) != nullptr);
  }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  void link(const std::string& name, const MemoryFile& file) {
    std::filesystem::create_symlink(file.path(), path_ + "/" + name);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace lm::fuzz
