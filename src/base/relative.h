// Relative and "~" paths: a hint for messages about a missing file, and expansion. Any thread.
#pragma once

#include <string>

namespace lm {

// "; relative paths begin in the folder in which lmlaunch is started, /here"; "" for an absolute path.
std::string relative_hint(const std::string& path);

// `path` with a leading "~" or "~/" as `home`; unchanged if `home` is "" and for "~user".
std::string with_home(const std::string& path, const std::string& home);

}  // namespace lm
