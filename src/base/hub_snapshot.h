// Repositories in the cache of the Hugging Face hub: REPOSITORY/snapshots/COMMIT/ holds the files of a
// commit, REPOSITORY/refs/BRANCH names the commit of a branch or tag that was downloaded last. Reads
// directories and those files.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace lm {

// Letters, digits, '.', '_' and '-', and not hidden: one path component, with no special meaning.
bool plain_name(std::string_view name);

// "ORG/NAME" or "ORG/NAME@REVISION": a branch, a tag or a commit.
struct HubName {
  std::string org, name, revision = "main";

  std::string repository() const { return org + "/" + name; }
  // "models--ORG--NAME" in a cache; of data sets `kind` is "datasets".
  std::string folder(const std::string& kind = "models") const { return kind + "--" + org + "--" + name; }
  // As a user types it: "main" is omitted.
  std::string text() const { return repository() + (revision == "main" ? "" : "@" + revision); }
};
std::optional<HubName> parse_hub_name(const std::string& text);

// The snapshot of `revision`: the one that refs/REVISION names, else snapshots/REVISION; for "main" without a
// ref the only snapshot. Empty if there is none, several, or `is_one` returns false.
std::filesystem::path hub_snapshot(const std::filesystem::path& repository,
                                   const std::function<bool(const std::filesystem::path&)>& is_one,
                                   const std::string& revision = "main");

// The name and the commit of a directory that is a model's snapshot in a cache; nullopt for other
// directories.
std::optional<HubName> name_of_snapshot(const std::filesystem::path& place);

}  // namespace lm
