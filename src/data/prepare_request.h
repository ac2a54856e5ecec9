// What the Python programs of prepare/ are asked, and the keys of what they make. Pure but for the files that
// they hash. Throws Error(11) for files that cannot be read.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/content_key.h"
#include "data/prepare.h"

namespace lm {

// Without the place of the result.
nlohmann::json prepare_request(const PrepareOptions& options, const std::vector<std::string>& files);

// The hash of everything that the tokens depend on.
ContentKey token_key(const PrepareOptions& options, const std::vector<std::string>& files,
                     ContentHasher& hasher);
// The same of rows that are streamed: of a data file, which may be larger than any disk here, its kind, its
// size, and its first and last MiB.
ContentKey stream_key(const PrepareOptions& options, const std::vector<std::string>& files,
                      ContentHasher& hasher);

}  // namespace lm
