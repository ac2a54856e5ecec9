// Downloads models and data sets from the hub: `lmlaunch fetch`, and the question on a terminal whether to
// fetch a missing model. A Python program does the transfer (src/data/fetch). This is the only part of
// lmlaunch that uses the network for more than the ranks of a run. If stop signals are blocked (supervise.h),
// one ends a fetch with Error(75); otherwise it ends the process.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/hub_snapshot.h"
#include "config/config.h"
#include "launcher/command_line.h"

namespace lm {

enum class FetchPart : uint8_t { kAll, kConfigAlone };

// For a `model.path` that is not found locally (kAll: whose weights are incomplete): asks on a terminal
// whether to fetch it, and fetches it. Does nothing without a terminal, with HF_HUB_OFFLINE, and for any
// other path. True if something was fetched. Throws Error(75) on a stop signal, and the errors of a fetch.
bool offer_to_fetch(const std::string& path, FetchPart part);

// Calls settle_model, and offers to fetch the models that model.path and lora.init name.
void settle_or_fetch(Config& config, FetchPart part);

Exit fetch_command(const CommandLine& line);

}  // namespace lm
