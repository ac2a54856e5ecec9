// The numerics that a run has recorded in its directory, beside its config.toml. A file of its own: plan.json
// tells of one start, this is kept from the first. Reads only.
#pragma once

#include <optional>
#include <string>

#include "config/config.h"
#include "plan/numerics.h"

namespace lm {

inline constexpr char kNumericsFile[] = "numerics.json";

// Nothing where `directory` ("": none) holds no run, or one of another configuration, or of another device:
// none of these is what starts now. Throws Error(14) for a damaged file.
std::optional<NumericsPlan> recorded_numerics(const std::string& directory, const Config& config,
                                              DeviceType device);

}  // namespace lm
