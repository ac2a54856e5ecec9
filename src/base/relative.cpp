#include "base/relative.h"

#include <filesystem>

namespace lm {

std::string relative_hint(const std::string& path) {
  if (path.empty() || path[0] == '/' || path[0] == '~') return "";
  std::error_code ignored;
  const std::string here = std::filesystem::current_path(ignored).string();
  return "; relative paths begin in the folder in which lmlaunch is started" +
         (here.empty() ? "" : ", " + here);
}

std::string with_home(const std::string& path, const std::string& home) {
  const bool in_home = path == "~" || path.starts_with("~/");
  return in_home && !home.empty() ? home + path.substr(1) : path;
}

}  // namespace lm
