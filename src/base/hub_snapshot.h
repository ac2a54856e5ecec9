// Repositories in the cache of the Hugging Face hub: REPOSITORY/snapshots/REVISION/ holds the files of a
// revision, REPOSITORY/refs/main names the one that was downloaded last. Reads directories and that one file.
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace lm {

// Letters, digits, '.', '_' and '-', and not hidden: no path, whatever it is put behind.
bool plain_name(std::string_view name);

// The snapshot that refs/main names, else the only one; empty when there is none, several, or `is_one` says
// no.
std::filesystem::path hub_snapshot(const std::filesystem::path& repository,
                                   const std::function<bool(const std::filesystem::path&)>& is_one);

}  // namespace lm
