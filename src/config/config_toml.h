// A run's TOML file, strictly: unknown keys and tables, wrong types, duplicates and values out of range are
// all reported at once, each with file:line:col, the nearest key and the accepted values. Any thread may
// call; nothing is created or written.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"

namespace lm {

// Reads `path` and then applies `overrides`, each "table.key=value" with a TOML value or a bare word; throws
// Error(10) with every problem found. The result is valid: each key is in its range, and the keys agree. If
// the trained weights are fp32 (model.dtype, lora.dtype) and optimizer.master is not given, it becomes
// "fp32".
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});

// The same from a text; `place` names it in messages.
Config parse_config(const std::string& text, const std::string& place,
                    const std::vector<std::string>& overrides = {});

}  // namespace lm
