// The names under which an export writes the trained tensors of a run: those of its base model's files, for a
// text model inside another one with the wrapper's prefix. Only reads files.
#pragma once

#include <functional>
#include <string>

namespace lm {

// A function from a tensor's name in a checkpoint's manifest. If the run's base model is not found, or its
// files are damaged, names stay as they are.
using TensorNames = std::function<std::string(const std::string&)>;
TensorNames exported_names(const std::string& run);

}  // namespace lm
