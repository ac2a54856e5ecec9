#include "base/hub_snapshot.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "base/file.h"

namespace lm {

namespace fs = std::filesystem;

bool plain_name(std::string_view name) {
  return !name.empty() && name[0] != '.' && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

fs::path hub_snapshot(const fs::path& repository, const std::function<bool(const fs::path&)>& is_one) {
  const fs::path main = repository / "refs" / "main", snapshots = repository / "snapshots";
  std::error_code ignored;
  if (fs::is_regular_file(main, ignored)) {
    std::string revision = read_small_file(main.string(), 256);
    while (!revision.empty() && std::isspace(static_cast<unsigned char>(revision.back())))
      revision.pop_back();
    const fs::path named = snapshots / revision;
    return plain_name(revision) && is_one(named) ? named : fs::path();
  }
  fs::path only;
  for (const auto& entry : fs::directory_iterator(snapshots, ignored)) {
    if (!is_one(entry.path())) continue;
    if (!only.empty()) return {};  // which of them, nobody says
    only = entry.path();
  }
  return only;
}

}  // namespace lm
