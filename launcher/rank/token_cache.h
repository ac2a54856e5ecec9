// Where a job keeps its tokens: data.cache_dir, or the user's cache; where that cannot be written, the run's
// own directory, and without a run a directory that is gone with this object. One thread.
#pragma once

#include <string>

#include "config/config.h"

namespace lm {

class TokenCache {
 public:
  // `users`: the user's cache of tokens, "" without a home; `run`: the run's directory, "" none. What is used
  // in place of the user's is said if `says`. Creates what is missing; throws Error(21) where no place is
  // left.
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
