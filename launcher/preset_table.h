// Where presets come from: the files of configs/, and a table of models, methods and cards.
#pragma once

#include <vector>

#include "launcher/presets.h"

namespace lm {

// The files of configs/ (presets.cmake).
const std::vector<Preset>& preset_files();
// Named MODEL-METHOD-MEMORY, on a GPU or, with -cpu, without one.
std::vector<Preset> preset_table();

}  // namespace lm
