// Where a job caches its tokens: data.cache_dir, or the user's cache; if that cannot be written, the run's
// own directory, and without a run a temporary directory that this object deletes. One thread.
#pragma once

#include <string>

#include "config/config.h"

namespace lm {

class TokenCache {
 public:
  // `users`: the user's cache of tokens, "": no home directory; `run`: the run's directory, "": none. `says`:
  // log which directory replaces the user's. Creates what is missing; throws Error(21) if no directory can be
  // used.
  TokenCache(const DataConfig& data, const std::string& users, const std::string& run, bool says);
  ~TokenCache();
  TokenCache(const TokenCache&) = delete;
  TokenCache& operator=(const TokenCache&) = delete;
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  bool temporary_ = false;
};

}  // namespace lm
