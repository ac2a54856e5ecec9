// Models and data sets from the hub: `lmlaunch fetch`, and the question on a terminal whether a model that is
// not here shall be fetched. The transfer is a Python program (src/data/fetch). This is the only part of
// lmlaunch that uses the network for more than the ranks of a run. Where stop signals are blocked
// (supervise.h), one ends a fetch with Error(75); elsewhere it ends the process.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/hub_snapshot.h"
#include "config/config.h"
#include "launcher/command_line.h"

namespace lm {

enum class FetchPart : uint8_t { kAll, kConfigAlone };

// For `model.path` of a model that is not here (of kAll: whose weights are not all here): asks on a terminal
// whether to fetch it, and fetches it. Elsewhere, with HF_HUB_OFFLINE, and for any other path it does
// nothing. True when something was fetched. Throws Error(75) on a stop signal, and what a fetch throws.
bool offer_to_fetch(const std::string& path, FetchPart part);

// model.path and lora.init as settle_model leaves them, after that question about what they name.
void settle_or_fetch(Config& config, FetchPart part);

Exit fetch_command(const CommandLine& line);

}  // namespace lm
