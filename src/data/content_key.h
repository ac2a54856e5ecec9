// The key of a token cache: a hash of the content that tokenisation depends on. Two runs with the same bytes
// in their data files, tokenizer, template and options get the same key, whatever the files' names.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <vector>

#include "data/hub.h"
#include "data/token_file.h"

namespace lm {

// Expands names, globs and names of data sets in the order given; the matches of one are sorted. Throws
// Error(11) for a name that matches nothing or is not a regular file.
std::vector<std::string> expand_files(const std::vector<std::string>& patterns,
                                      const DataCaches& caches = {});

// Hashes file contents. Hashes of large files are cached in `table_path` under (path, size, mtime, inode), so
// that an unchanged file is not read again; a lost or damaged table costs only time.
class ContentHasher {
 public:
  explicit ContentHasher(std::string table_path);
  ContentKey hash_file(const std::string& path);
  // Whether hashing is fast: the file is small, or its hash is cached.
  bool knows(const std::string& path) const;
  // Writes the table if it has changed; a failure is not an error.
  void save() const;

 private:
  // The cache key of a file's hash.
  struct Mark {
    std::string stamp, path;  // "<size> <mtime_ns> <inode> ", and the absolute path
    bool may_be_remembered = false;
  };
  static Mark mark_of(const std::string& path, const struct stat& info);
  std::optional<ContentKey> remembered(const Mark& mark) const;

  std::string table_path_;
  std::vector<std::string> lines_;  // "<size> <mtime_ns> <inode> <hash> <path>"
  bool changed_ = false;
};

// Combines parts in order, each with its length, so that different lists of parts give different keys.
ContentKey combine(const std::vector<std::string>& parts);
std::string to_hex(const ContentKey& key);

}  // namespace lm
