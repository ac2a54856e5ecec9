#include "base/hub_snapshot.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "base/file.h"

namespace lm {

namespace fs = std::filesystem;

namespace {

// Each part of a branch with '/' in its name, such as "refs/pr/1", must be a plain name.
bool plain_revision(std::string_view revision) {
  for (size_t from = 0; from <= revision.size();) {
    const size_t to = std::min(revision.find('/', from), revision.size());
    if (!plain_name(revision.substr(from, to - from))) return false;
    from = to + 1;
  }
  return revision.size() < 256;
}

}  // namespace

bool plain_name(std::string_view name) {
  return !name.empty() && name[0] != '.' && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

std::optional<HubName> parse_hub_name(const std::string& text) {
  const size_t slash = text.find('/'), at = text.find('@');
  if (slash == std::string::npos || at < slash) return std::nullopt;
  HubName out{.org = text.substr(0, slash), .name = text.substr(slash + 1, at - slash - 1)};
  if (at != std::string::npos) out.revision = text.substr(at + 1);
  const bool plain = plain_name(out.org) && plain_name(out.name) && plain_revision(out.revision);
  return plain ? std::optional(out) : std::nullopt;
}

fs::path hub_snapshot(const fs::path& repository, const std::function<bool(const fs::path&)>& is_one,
                      const std::string& revision) {
  if (!plain_revision(revision)) return {};
  const fs::path ref = repository / "refs" / revision, snapshots = repository / "snapshots";
  std::error_code ignored;
  if (fs::is_regular_file(ref, ignored)) {
    std::string commit = read_small_file(ref.string(), 256);
    while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
    const fs::path named = snapshots / commit;
    return plain_name(commit) && is_one(named) ? named : fs::path();
  }
  if (revision != "main") {
    const fs::path named = snapshots / revision;
    return plain_name(revision) && is_one(named) ? named : fs::path();
  }
  fs::path only;
  for (const auto& entry : fs::directory_iterator(snapshots, ignored)) {
    if (!is_one(entry.path())) continue;
    if (!only.empty()) return {};  // ambiguous
    only = entry.path();
  }
  return only;
}

std::optional<HubName> name_of_snapshot(const fs::path& place) {
  const fs::path directory = (place / "").lexically_normal().parent_path();
  const fs::path snapshots = directory.parent_path();
  const std::string folder = snapshots.parent_path().filename().string(), begin = "models--";
  const size_t between = folder.find("--", begin.size());
  if (snapshots.filename() != "snapshots" || !folder.starts_with(begin) || between == std::string::npos)
    return std::nullopt;
  return HubName{.org = folder.substr(begin.size(), between - begin.size()),
                 .name = folder.substr(between + 2),
                 .revision = directory.filename().string()};
}

}  // namespace lm
