#include "launcher/worker/token_cache.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// Why nothing can be written there; "" if it can. The directory is made for the user alone: tokens reveal the
// training text.
std::string refusal(const std::string& directory) {
  std::error_code error;
  if (fs::create_directories(directory, error)) fs::permissions(directory, fs::perms::owner_all, error);
  if (error) return error.message();
  return access(directory.c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

std::string home_cache() {
  const passwd* const user = getpwuid(getuid());
  return std::string(user == nullptr ? "." : user->pw_dir) + "/.cache/lmlaunch/tokens";
}

std::string temporary_directory() {
  std::error_code ignored;
  std::string name = (fs::temp_directory_path(ignored) / "lmlaunch-tokens-XXXXXX").string();
  if (mkdtemp(name.data()) != nullptr) return name;
  throw Error(Exit::kIo, {.area = "DATA-33",
                          .what = std::string("no directory for the token cache can be written: ") +
                                  std::strerror(errno),
                          .place = name,
                          .next = "set data.cache_dir to a directory that can be written"});
}

}  // namespace

TokenCache::TokenCache(const DataConfig& data, const std::string& users, const std::string& run, bool says)
    : directory_(!data.cache_dir.empty() ? data.cache_dir
                 : users.empty()         ? home_cache()
                                         : users) {
  if (!data.cache_dir.empty()) return;  // what was asked for, or an error
  const std::string reason = refusal(directory_), cache = directory_;
  if (reason.empty()) return;
  temporary_ = run.empty();
  directory_ = temporary_ ? temporary_directory() : run + "/tokens";
  if (says)
    log_note("DATA-33", fmt::format("the cache {} cannot be written ({}): tokens are cached in {}{}, and "
                                    "measurements are not cached",
                                    cache, reason, directory_, temporary_ ? " until the end" : ""));
}

TokenCache::~TokenCache() {
  std::error_code ignored;
  if (temporary_) fs::remove_all(directory_, ignored);
}

}  // namespace lm
